"""What staging a save costs at most, before it starts; how many bytes all saves may have in flight. Pure arithmetic.

One helper prices both a cold save and the new part of a warm one, so the second can never cost more than the first.
"""

from __future__ import annotations

from typing import Protocol

from ..rows.layout import BLOCK
from . import manifest, record

GIB = 1 << 30
FLOOR = GIB
"""The least permit: saves of ordinary length go whole, and a layout nobody can price still saves."""

IMAGE_OVERHEAD = 64 * 1024
"""Bytes allowed for one payload's safetensors header and token ids: some 600 tensors at 100 bytes each."""

BOOKKEEPING = 4 * 1024
"""Bytes allowed for what the worker keeps about one record in flight: keys, views, replies."""

RECORD_OVERHEAD = record.HEADER_BYTES + record.ALIGN + IMAGE_OVERHEAD + manifest.ADD_BYTES + BOOKKEEPING


class Layout(Protocol):
    """The sizes this module needs. None means that nobody can price it."""

    @property
    def block_bytes(self) -> int | None:
        """Bytes of 256 rows over all layers."""

    def anchor_bytes(self, at: int) -> int | None:
        """Bytes of the state at `at` that is no whole block: recurrent state and the partial block's rows."""


def charge(saved: int, at: int, layout: Layout, *, anchor: bool = True) -> int | None:
    """Bytes at most that staging a state of `at` tokens costs when its first `saved` tokens' blocks are on disk.

    Every whole block not yet saved, the state's own bytes (anchor and trailer) unless `anchor` is False, record and
    manifest overhead, the worker's bookkeeping. None when the layout cannot be priced.
    """
    block, own = layout.block_bytes, layout.anchor_bytes(at)
    if block is None or own is None:
        return None
    blocks = max(0, at // BLOCK - saved // BLOCK)
    return blocks * (block + RECORD_OVERHEAD) + (own + RECORD_OVERHEAD if anchor else 0)


def cold_charge(at: int, layout: Layout) -> int | None:
    """Bytes at most that saving a state of `at` tokens costs when nothing of it is on disk."""
    return charge(0, at, layout)


def permit(longest: int, layout: Layout, budget: int) -> int:
    """The ceiling on bytes in flight: `max(1 GiB, min(cold_charge(longest), budget))`.

    longest: the served context in tokens, 0 when unknown. budget: the memory budget in bytes.
    An unpriceable layout, or no longest, gets the floor.
    """
    cold = cold_charge(longest, layout) if longest else None
    return FLOOR if cold is None else max(FLOOR, min(cold, budget))
