"""Rows on disk: content-addressed, append-only, verified. No trio, no MLX; all file access through the `Disk` seam.

keys.py           content addresses of blocks and anchors
safetensors.py    payloads as safetensors images
record.py         one record's bytes        content.py  records as tokens and tensors
manifest.py       the log's bytes           index.py    the log applied: what exists, and where
packs.py          pack files                journal.py  the manifest file
reader.py         records read, placed.py: into the rows' own memory
shelf.py          the write order: data durable, manifest durable, acknowledged     recovery.py  the way back
room.py           quota, floor, sweep       conversations.py, portable.py  what the command line shows and moves
permit.py         what a save costs         rows_on_disk.py  the engine that the rows store actor owns
"""

from .content import Found, Record, Stored, Verified
from .conversations import Conversation
from .keys import KEY_BYTES, ROOT, anchor_key, block_key, block_keys, fingerprint
from .permit import charge, cold_charge, permit
from .placed import Place
from .reader import read_run
from .record import Kind
from .room import StoreFull, Swept
from .rows_on_disk import DEFAULT_QUOTA, ReadOnly, RowsOnDisk
from .safetensors import BF16, F8_E4M3, F8_E5M2, Tensors

__all__ = [
    "BF16",
    "DEFAULT_QUOTA",
    "F8_E4M3",
    "F8_E5M2",
    "KEY_BYTES",
    "ROOT",
    "Conversation",
    "Found",
    "Kind",
    "Place",
    "ReadOnly",
    "Record",
    "RowsOnDisk",
    "StoreFull",
    "Stored",
    "Swept",
    "Tensors",
    "Verified",
    "anchor_key",
    "block_key",
    "block_keys",
    "charge",
    "cold_charge",
    "fingerprint",
    "permit",
    "read_run",
]
