"""A round of one short strip over buffers of a fixed size, whose numbers are arrays: one graph serves every position.

The leaf is read whole; what lies past the strip is hidden. A hidden tile weighs nothing, so the numbers are those of
`RoundRows`, which reads only what has begun; a self-check compares the bits (`compiled_trial`).
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from .attention import RowTile
from .buffers import LayerBuffers, Pool
from .fused import Whole
from .layout import BLOCK, blocks_for
from .ops import Chain, Link
from .plan import Reading, RoundRows, Span, Strip, Unit, Write

Array = Any


def links_read(chain: Chain) -> list[Link]:
    """A chain's links that have rows, and its leaf."""
    *before, leaf = chain.links
    return [*(link for link in before if link.start < link.stop), leaf]


class FixedRound(RoundRows):
    """positions: `[rows]`, absolute. at: `[1]`, the leaf's buffer row of the first. Both may stand for any numbers."""

    def __init__(self, strip: Strip, pool: Pool, tile: RowTile, positions: Array, at: Array) -> None:
        super().__init__([strip], pool, tile, (mx.default_stream(mx.default_device()),))
        self._positions, self._at = positions, at

    def positions(self) -> Array:
        return self._positions

    def starts(self) -> Array:
        return self._positions[:1]

    def put(self, buffers: LayerBuffers, name: str, _: Write, rows: Array) -> None:
        buffers.arrays[name] = mx.slice_update(buffers.arrays[name], rows, self._at, axes=[1])

    def _read(self, window: int | None, group: int, heads: int) -> Reading:
        if window is not None:
            raise AssertionError("what a window reads begins at another row each time")
        (strip,), (bound,) = self.strips, self.bounds
        *before, leaf = links_read(strip.chain)
        keys = mx.arange(self.pool.segments[leaf.segment].capacity)
        if not before and self._fuses(strip):
            whole = Whole(leaf.segment, 0, keys.size, keys <= self._last_seen(self.rows, 1))
            return Reading((Unit((bound,), whole=whole),), None)
        spans = [Span(link.segment, *self._tiles_of(link)) for link in before]
        sees = keys.reshape(-1, 1, BLOCK) <= self._last_seen(self.tile.kept(self.rows * group), group)
        hidden = mx.where(sees, 0.0, -math.inf).astype(mx.float32)
        spans.append(Span(leaf.segment, 0, len(hidden), mx.broadcast_to(hidden, (heads, *hidden.shape))))
        return Reading((Unit((bound,), spans=tuple(spans)),), None)

    def _last_seen(self, kept: int, group: int) -> Array:
        """`[kept, 1]`: the leaf's buffer row of the last key that each kept row of queries sees."""
        return (mx.minimum(mx.arange(kept) // group, self.rows - 1) + self._at)[:, None]

    def _tiles_of(self, link: Link) -> tuple[int, int]:
        first = self.pool.segments[link.segment].start
        return (link.start - first) // BLOCK, blocks_for(link.stop - first)
