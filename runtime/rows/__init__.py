"""Rows: what one token leaves in each layer, kept once.

layout.py     what a layer keeps per row, per `ratio` rows and per anchor; pure arithmetic
pricing.py    what an allocation, a resize or a copy will cost before it is made; pure arithmetic
ledger.py     segments, chains, holds, leases and the budget, as pure state (the bank actor owns one)
buffers.py    the MLX buffers of segments, written in place on the device thread
attention.py  attention over a chain in tiles fixed by absolute position
caches.py     the cache objects that mlx-lm models see
"""

from .layout import BLOCK, LayerLayout, Layout, RowTensor, blocks_for, round_up

__all__ = ["BLOCK", "LayerLayout", "Layout", "RowTensor", "blocks_for", "round_up"]
