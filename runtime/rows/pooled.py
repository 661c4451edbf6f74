"""Pooled entries beside the rows: what a QSA layer keeps once per `ratio` rows. Device thread only.

How many entries are valid is derived from a frontier at every reading. Nothing stores a pooled length, so nothing can
claim more than the rows support, and an image that does is cut down where it enters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from .buffers import Pool
from .layout import LayerLayout, Layout, RowTensor
from .ops import Allocate, CopyRows, Drop, ResizeLayer, RowOp
from .pricing import clamp_pooled

Array = Any


class QsaPool(Pool):
    """A `Pool` whose segments also have `[heads, capacity // ratio, width]` buffers for their layers' pooled entries.

    Entries of a segment are counted from its start, which is a multiple of every ratio.
    """

    def __init__(self, layout: Layout, dtype: Callable[[RowTensor], Any] = lambda _: mx.float32) -> None:
        super().__init__(layout, dtype)
        self._entries: dict[int, list[dict[str, Array]]] = {}

    def apply(self, ops: tuple[RowOp, ...]) -> None:
        for op in ops:
            super().apply((op,))
            follow = self._follow.get(type(op))
            if follow is not None:
                follow(self, op)

    def enter(self, segment: int, layer: int, entries: dict[str, Array], frontier: int) -> int:
        """Takes a foreign state's entries `[heads, claimed, width]`: how many are kept, which its rows decide.

        frontier: rows the state has in this segment, counted from its start.
        """
        kept = 0
        for name, claimed in entries.items():
            kept = clamp_pooled(claimed.shape[1], frontier, self.layout.layers[layer].ratio)
            self.write_pooled(segment, layer, name, 0, claimed[:, :kept])
        return kept

    def write_pooled(self, segment: int, layer: int, name: str, first: int, entries: Array) -> None:
        """Writes entries `[heads, n, width]` from entry `first` on, in place."""
        kept = self._entries[segment][layer]
        kept[name] = _placed(kept[name], first, entries)
        mx.eval(kept[name])

    def pooled_views(self, segment: int, start: int, stop: int) -> dict[str, np.ndarray[Any, Any]]:
        """NumPy views of the entries whose rows all lie in `[start, stop)`, keyed `layer.name`; under a hold only."""
        origin = self.segments[segment].start
        return {
            f"{i}.{name}": np.array(buffer, copy=False)[:, -(-(start - origin) // ratio) : (stop - origin) // ratio]
            for i, entries in enumerate(self._entries[segment])
            for ratio in (self.layout.layers[i].ratio,)
            for name, buffer in entries.items()
        }

    def _made(self, op: Allocate) -> None:
        self._entries[op.segment] = [self._empty(layer, op.capacity) for layer in self.layout.layers]
        mx.eval([b for entries in self._entries[op.segment] for b in entries.values()])

    def _empty(self, layer: LayerLayout, capacity: int) -> dict[str, Array]:
        return {t.name: mx.zeros((t.heads, capacity // layer.ratio, t.width), self._dtype(t)) for t in layer.pooled}

    def _copied(self, op: CopyRows) -> None:
        source, target = self.segments[op.source].start, self.segments[op.target].start
        for i, entries in enumerate(self._entries[op.source]):
            ratio = self.layout.layers[i].ratio
            first, last = -(-op.start // ratio), op.stop // ratio
            for name, buffer in entries.items():
                moved = buffer[:, first - source // ratio : last - source // ratio]
                self.write_pooled(op.target, i, name, first - target // ratio, moved)

    def _resized(self, op: ResizeLayer) -> None:
        layer, entries = self.layout.layers[op.layer], self._entries[op.segment][op.layer]
        keep = layer.pooled_length(op.keep - self.segments[op.segment].start)
        for name, buffer in entries.items():
            fresh = mx.zeros((buffer.shape[0], op.capacity // layer.ratio, buffer.shape[2]), buffer.dtype)
            entries[name] = _placed(fresh, 0, buffer[:, :keep])
            mx.eval(entries[name])

    def _dropped(self, op: Drop) -> None:
        self._entries.pop(op.segment, None)

    _follow: dict[type, Callable[[QsaPool, Any], None]] = {  # noqa: RUF012
        Allocate: _made,
        CopyRows: _copied,
        ResizeLayer: _resized,
        Drop: _dropped,
    }


def _placed(buffer: Array, first: int, entries: Array) -> Array:
    """`buffer` with `entries` from entry `first` on, in place. Assigning a whole buffer would share the source's memory
    instead of copying it, so that case is a copy by name."""
    if entries.shape == buffer.shape:
        return mx.array(entries)
    buffer[:, first : first + entries.shape[1]] = entries
    return buffer
