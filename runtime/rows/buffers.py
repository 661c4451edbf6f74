"""The MLX buffers of segments. Everything here runs on the device thread.

A buffer is `[heads, capacity, width]` and is written in place. MLX does that only while the buffer has one owner, so no
slice of a live buffer may survive a round: attention takes its views inside the round's graph and drops them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.numerics.exponential import on_host

from .layout import ATTENDED, LayerLayout, Layout, RowTensor
from .ops import Allocate, Chain, CopyRows, Drop, DropAnchor, LoadAnchor, ResizeLayer, RowOp, SaveAnchor, Trim
from .states import Specs, State, fresh

Array = Any


def put(buffer: Array, at: int, rows: Array) -> None:
    """Writes rows `[heads, n, width]` at buffer row `at`, in place once evaluated.

    A whole buffer goes in two parts: assigned at once, it would share the memory of `rows` instead.
    """
    n = rows.shape[1]
    if not n:
        return
    if n == buffer.shape[1] > 1:
        put(buffer, 0, rows[:, : n // 2])
        at, rows = n // 2, rows[:, n // 2 :]
    elif n == buffer.shape[1]:
        rows = mx.array(rows)
    buffer[:, at : at + rows.shape[1]] = rows


def zeros(heads: int, rows: int, width: int, dtype: Any) -> Array:
    """A new array of zeros. On a CPU a sum over nothing is them at the speed of memory, `mx.zeros` at half of it."""
    if not on_host() or dtype != mx.float32:
        return mx.zeros((heads, rows, width), dtype)
    return mx.zeros((heads, rows, 0), dtype) @ mx.zeros((heads, 0, width), dtype)


class LayerBuffers:
    """One layer of one segment: per-row buffers by name, and the layer's recurrent state once it has one.

    pooled: buffers with one entry per `ratio` rows (QSA). Entry `i` of a layer belongs to the segment that holds its
    last row, so a segment's first is number `start // ratio`. How many are valid is derived from a frontier.
    """

    __slots__ = ("arrays", "pooled", "state")

    def __init__(self, layer: LayerLayout, capacity: int, dtype: Callable[[RowTensor], Any]) -> None:
        self.arrays: dict[str, Array] = {t.name: zeros(t.heads, capacity, t.width, dtype(t)) for t in layer.rows}
        entries = layer.entries(capacity)
        self.pooled: dict[str, Array] = {t.name: zeros(t.heads, entries, t.width, dtype(t)) for t in layer.pooled}
        self.state: State | None = None

    def write(self, name: str, at: int, rows: Array) -> None:
        """Writes rows `[heads, n, width]` at buffer row `at`, in place once evaluated."""
        put(self.arrays[name], at, rows)

    def flat(self) -> list[Array]:
        return [*self.arrays.values(), *self.pooled.values(), *(a for a in self.state or () if a is not None)]


class SegmentBuffers:
    """All layers of one segment, for the absolute rows `[start, start + capacity)`."""

    __slots__ = ("capacity", "layers", "start")

    def __init__(
        self,
        layout: Layout,
        start: int,
        capacity: int,
        dtype: Callable[[RowTensor], Any],
        streams: Sequence[Any],
    ) -> None:
        """streams: that make the layers by turns."""
        self.start = start
        self.capacity = capacity
        self.layers: list[LayerBuffers] = []
        for layer, stream in zip(layout.layers, itertools.cycle(streams), strict=False):
            with mx.stream(stream):  # new pages take a thread longer than writing them
                self.layers.append(LayerBuffers(layer, capacity, dtype))

    def flat(self) -> list[Array]:
        return [array for layer in self.layers for array in layer.flat()]

    def row_views(self, start: int, stop: int) -> dict[str, np.ndarray[Any, Any]]:
        """NumPy views of rows `[start, stop)` under a hold, keyed `layer.name`; valid until the segment drops."""
        a, b = start - self.start, stop - self.start
        return {
            f"{i}.{name}": np.array(array, copy=False)[:, a:b]
            for i, layer in enumerate(self.layers)
            for name, array in layer.arrays.items()
        }


class Pool:
    """Segment buffers and anchors by id, and the orders that change them. Device thread only.

    states: per layer, the specs of its recurrent arrays; empty when no layer has any.
    floats: rows that are attended to as they are kept are float32. packed: some rows are quantized.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: Callable[[RowTensor], Any] = lambda _: mx.float32,
        states: Sequence[Specs] = (),
    ) -> None:
        self.layout = layout
        self.segments: dict[int, SegmentBuffers] = {}
        self.anchors: dict[int, tuple[State | None, ...]] = {}
        self.floats = all(
            dtype(t) == mx.float32 for layer in layout.layers if layer.kind in ATTENDED for t in layer.rows
        )
        self.packed = any(layer.bits is not None for layer in layout.layers)
        self._dtype = dtype
        self._states = tuple(states)

    @cached_property
    def streams(self) -> tuple[Any, ...]:
        """What work of many operations is spread over: a CPU stream is one thread, so there a second one takes part."""
        here = mx.default_stream(mx.default_device())
        return (here, mx.new_stream(mx.cpu)) if on_host() else (here,)

    def apply(self, ops: tuple[RowOp, ...]) -> None:
        """Runs orders in sequence; each leaves only evaluated buffers behind."""
        for op in ops:
            self._table[type(op)](self, op)

    def state(self, chain: Chain, layer: int) -> State:
        """The recurrent state of a layer where a chain ends: its leaf's, or that of the segment before a new leaf."""
        for link in reversed(chain.links[-2:]):
            found = self.segments[link.segment].layers[layer].state
            if found is not None:
                return found
        return fresh(self._states[layer])

    def slots(self, layer: int) -> int:
        """How many arrays the recurrent state of a layer has room for."""
        return len(self._states[layer])

    def _allocate(self, op: Allocate) -> None:
        made = SegmentBuffers(self.layout, op.start, op.capacity, self._dtype, self.streams)
        mx.eval(made.flat())
        self.segments[op.segment] = made

    def _copy(self, op: CopyRows) -> None:
        source, target = self.segments[op.source], self.segments[op.target]
        a, b = op.start - source.start, op.stop - source.start
        for kept, from_layer, to_layer in zip(self.layout.layers, source.layers, target.layers, strict=True):
            for name, array in from_layer.arrays.items():
                to_layer.write(name, op.start - target.start, array[:, a:b])
            first, last = kept.completed(op.start, op.stop)
            there, here = source.start // kept.ratio, target.start // kept.ratio
            for name, array in from_layer.pooled.items():
                put(to_layer.pooled[name], first - here, array[:, first - there : last - there])
            mx.eval([*to_layer.arrays.values(), *to_layer.pooled.values()])

    def _resize(self, op: ResizeLayer) -> None:
        segment = self.segments[op.segment]
        layer, kept = segment.layers[op.layer], self.layout.layers[op.layer]
        _move(layer.arrays, op.capacity, op.keep - segment.start)
        _move(layer.pooled, kept.entries(op.capacity), op.keep // kept.ratio - segment.start // kept.ratio)
        if op.layer == len(segment.layers) - 1:
            segment.capacity = op.capacity

    def _drop(self, op: Drop) -> None:
        self.segments.pop(op.segment, None)

    def _trim(self, op: Trim) -> None:
        mx.clear_cache()

    def _save_anchor(self, op: SaveAnchor) -> None:
        self.anchors[op.anchor] = tuple(layer.state for layer in self.segments[op.segment].layers)

    def _load_anchor(self, op: LoadAnchor) -> None:
        for layer, state in zip(self.segments[op.segment].layers, self.anchors[op.anchor], strict=True):
            layer.state = state

    def _drop_anchor(self, op: DropAnchor) -> None:
        self.anchors.pop(op.anchor, None)

    _table: dict[type, Callable[[Pool, Any], None]] = {  # noqa: RUF012
        Allocate: _allocate,
        CopyRows: _copy,
        ResizeLayer: _resize,
        Drop: _drop,
        Trim: _trim,
        SaveAnchor: _save_anchor,
        LoadAnchor: _load_anchor,
        DropAnchor: _drop_anchor,
    }


def _move(buffers: dict[str, Array], size: int, keep: int) -> None:
    """Exchanges buffers for zeroed ones of `size` that begin with the first `keep` of the old ones; one at a time."""
    for name, array in buffers.items():
        fresh = zeros(array.shape[0], size, array.shape[2], array.dtype)
        put(fresh, 0, array[:, :keep])
        mx.eval(fresh)
        buffers[name] = fresh
