"""Rows between segments and the disk.

Views are made on the device thread and may be used on any thread: they show the buffers' memory itself. Reading is
right for rows under a hold, writing for rows past a frontier that no round touches yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.store.placed import Place, pieces_of
from onecopy.runtime.store.safetensors import BF16

from .buffers import Pool, put
from .layout import BLOCK, Layout
from .pricing import clamp_pooled

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]

STATE = "state"
"""What the arrays of a recurrent state are called, beside the row tensors of attention."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Writable views of a segment's buffers, keyed `layer.name`, and how many rows make an entry of each.

    start: the segment's first row. An entry of `ratio` rows is counted with the row that completes it. heads: the bytes
    of each head of an array.
    """

    start: int
    arrays: Tensors
    ratios: Mapping[str, int]
    heads: Mapping[str, Sequence[memoryview]] = field(default_factory=dict)


def read_rows(pool: Pool, segment: int, start: int, stop: int) -> dict[str, Array]:
    """Rows `[start, stop)` as `[heads, rows, width]`, keyed `layer.name`, and the pooled entries that they complete.

    The rows must be under a hold. Views of the buffers, valid until they are written anew or dropped; bfloat16, which
    NumPy lacks, comes as a copy.
    """
    origin = pool.segments[segment].start
    return {
        key: _rows(array, start // ratio - origin // ratio, stop // ratio - origin // ratio)
        for key, array, ratio in _named(pool, segment)
    }


def row_slots(pool: Pool, segment: int) -> Slots | None:
    """Writable views `[heads, capacity, width]` of a segment's buffers.

    None when NumPy lacks a dtype. Whoever writes through them owns the rows: no round may touch the segment meanwhile.
    """
    named = list(_named(pool, segment))
    if any(array.dtype == mx.bfloat16 for _, array, _ in named):
        return None
    arrays = {key: np.array(array, copy=False) for key, array, _ in named}
    heads = {key: pieces_of(array) for key, array in arrays.items()}
    return Slots(pool.segments[segment].start, arrays, row_ratios(pool.layout), heads)


def row_ratios(layout: Layout) -> dict[str, int]:
    """How many rows make an entry of each tensor of a record, keyed `layer.name`."""
    return {f"{i}.{t.name}": 1 for i, layer in enumerate(layout.layers) for t in layer.rows} | {
        f"{i}.{t.name}": layer.ratio for i, layer in enumerate(layout.layers) for t in layer.pooled
    }


def believed(tensors: Tensors, ratios: Mapping[str, int], start: int, frontier: int) -> Tensors:
    """Of a record whose rows begin at `start`: the rows from `frontier` on, and the entries that those complete.

    What is claimed beyond that is cut off here, so no later reader sees it. ValueError when entries are missing or the
    tensors are not those of `ratios`.
    """
    if tensors.keys() != ratios.keys():
        raise ValueError("other tensors than the segment's")
    counts = {array.shape[1] for key, array in tensors.items() if ratios[key] == 1}
    if len(counts) > 1:
        raise ValueError("tensors of different numbers of rows")
    stop = start + max(counts, default=0)
    return {key: _believed(key, array, ratios[key], start, frontier, stop) for key, array in tensors.items()}


def fill(slots: Slots, at: int, rows: Tensors) -> None:
    """Copies rows into slots at buffer row `at`. Any thread. ValueError when they are not the slots' rows."""
    start = slots.start + at
    for key, array in believed(rows, slots.ratios, start, start).items():
        first = start // slots.ratios[key] - slots.start // slots.ratios[key]
        into = slots.arrays[key][:, first : first + array.shape[1]]
        if into.shape != array.shape or into.dtype != array.dtype:
            raise ValueError(f"tensor {key} has another shape or dtype than the segment's")
        np.copyto(into, array)


def place_of(slots: Slots, block: int) -> Place:
    """The slots' own memory of a whole block, by the names that its record's tensors have."""
    arrays, pieces = dict[str, Array](), dict[str, list[memoryview]]()
    begin, end = block * BLOCK, (block + 1) * BLOCK
    for key, array in slots.arrays.items():
        ratio, size = slots.ratios[key], array.strides[1]
        origin = slots.start // ratio
        first, last = begin // ratio - origin, end // ratio - origin
        arrays[key] = array[:, first:last]
        pieces[key] = [head[first * size : last * size] for head in slots.heads[key]]
    return Place(arrays, pieces)


def write_rows(pool: Pool, segment: int, start: int, tensors: Tensors) -> None:
    """Copies rows into a segment at absolute position `start`, which must not lie before its frontier.

    ValueError when they are not the segment's.
    """
    into = pool.segments[segment]
    buffers = {key: array for key, array, _ in _named(pool, segment)}
    ratios = row_ratios(pool.layout)
    for key, rows in believed(tensors, ratios, start, start).items():
        put(buffers[key], start // ratios[key] - into.start // ratios[key], _array(rows))
    mx.eval(into.flat())


def read_state(pool: Pool, anchor: int) -> dict[str, Array]:
    """The arrays of an anchor, keyed `layer.state.slot`."""
    return {
        f"{i}.{STATE}.{slot}": _whole(array)
        for i, layer in enumerate(pool.anchors[anchor])
        for slot, array in enumerate(layer or ())
        if array is not None
    }


def write_state(pool: Pool, segment: int, tensors: Tensors) -> None:
    """A segment's recurrent state becomes these arrays: each layer's in the order of their slots. Device thread."""
    found: dict[int, dict[int, Any]] = {}
    for key, array in tensors.items():
        layer, _, slot = key.split(".")
        found.setdefault(int(layer), {})[int(slot)] = _array(array)
    for i, slots in found.items():
        state = tuple(slots.get(n) for n in range(pool.slots(i)))
        mx.eval([a for a in state if a is not None])
        pool.segments[segment].layers[i].state = state


def split_state(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """An anchor's rows, and its recurrent state."""
    state = {key: array for key, array in tensors.items() if f".{STATE}." in key}
    return {key: array for key, array in tensors.items() if key not in state}, state


def _whole(array: Any) -> Array:
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(BF16)
    return np.array(array, copy=False)


def _believed(key: str, array: Array, ratio: int, start: int, frontier: int, stop: int) -> Array:
    first = start // ratio
    kept = clamp_pooled(first + array.shape[1], stop, ratio) - first
    if kept < stop // ratio - first:
        raise ValueError(f"tensor {key} has fewer entries than its rows complete")
    return array[:, frontier // ratio - first : kept]


def _named(pool: Pool, segment: int) -> Iterator[tuple[str, Any, int]]:
    """Each buffer of a segment: its key, itself, and how many rows make an entry."""
    for i, (kept, layer) in enumerate(zip(pool.layout.layers, pool.segments[segment].layers, strict=True)):
        yield from ((f"{i}.{name}", array, 1) for name, array in layer.arrays.items())
        yield from ((f"{i}.{name}", array, kept.ratio) for name, array in layer.pooled.items())


def _rows(array: Any, a: int, b: int) -> Array:
    if array.dtype == mx.bfloat16:
        return np.array(array[:, a:b].view(mx.uint16)).view(BF16)
    return np.array(array, copy=False)[:, a:b]


def _array(rows: Array) -> Any:
    if rows.dtype.metadata == BF16.metadata:
        return mx.array(rows.view("<u2")).view(mx.bfloat16)
    return mx.array(rows)
