"""Rows: what one token leaves in each layer, kept once.

layout, pricing               what a layer keeps, and what a change of memory costs before it is made; pure arithmetic
segments, ops                 segments and holds; orders for the device; pure state
prefixes, anchors             indexes that find kept prefixes, and kept recurrent states, by the tokens before them
ledger, books, grants         what the bank asks of its books, the books themselves, and what turns get; pure state
admission, reclaim, chains    the ways a turn gets its rows; what makes room for them; merging; on the books
laws                          conservation laws of the books, for audits
buffers, states, transfer     MLX buffers of segments and their recurrent states; rows to and from disk; device thread
plan, caches                  what one round reads and writes; the cache objects that mlx-lm models see; device thread
attention, indexed            attention over chains in tiles fixed by absolute position, or over selected rows; device
fused                         attention of one strip over one segment by MLX's fused kernel; device thread
weights, hosted               softmax weights; attention of short strips on a CPU, by addresses; device thread
quantized                     rows kept as small integers, and products that read them; device thread
"""

from .layout import BLOCK, LayerLayout, Layout, RowTensor, blocks_for, round_up
from .ledger import Conversation, Grant, Ledger, Shortage, Wanted
from .segments import Lease, Segment

__all__ = [
    "BLOCK",
    "Conversation",
    "Grant",
    "LayerLayout",
    "Layout",
    "Lease",
    "Ledger",
    "RowTensor",
    "Segment",
    "Shortage",
    "Wanted",
    "blocks_for",
    "round_up",
]
