"""Rows between segments and the disk.

Views are made on the device thread and may be used on any thread: they show the buffers' memory itself. Reading is
right for rows under a hold, writing for rows past a frontier that no round touches yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.store.safetensors import BF16

from .buffers import Pool

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]

STATE = "state"
"""What the arrays of a recurrent state are called, beside the row tensors of attention."""


def read_rows(pool: Pool, segment: int, start: int, stop: int) -> dict[str, Array]:
    """Rows `[start, stop)` as `[heads, rows, width]`, keyed `layer.name`. The rows must be under a hold.

    Views of the buffers, valid until they are written anew or dropped; bfloat16, which NumPy lacks, comes as a copy.
    """
    found = pool.segments[segment]
    a, b = start - found.start, stop - found.start
    return {key: _rows(array, a, b) for key, array in _named(pool, segment)}


def row_slots(pool: Pool, segment: int) -> dict[str, Array] | None:
    """Writable views `[heads, capacity, width]` of a segment's buffers, keyed `layer.name`.

    None when NumPy lacks a dtype. Whoever writes through them owns the rows: no round may touch the segment meanwhile.
    """
    named = _named(pool, segment)
    if any(array.dtype == mx.bfloat16 for _, array in named):
        return None
    return {key: np.array(array, copy=False) for key, array in named}


def fill(slots: Tensors, at: int, rows: Tensors) -> None:
    """Copies rows into slots at buffer row `at`. Any thread. ValueError when they are not the slots' rows."""
    if rows.keys() != slots.keys():
        raise ValueError("other tensors than the segment's")
    for key, array in rows.items():
        into = slots[key][:, at : at + array.shape[1]]
        if into.shape != array.shape or into.dtype != array.dtype:
            raise ValueError(f"tensor {key} has another shape or dtype than the segment's")
        np.copyto(into, array)


def write_rows(pool: Pool, segment: int, start: int, tensors: Tensors) -> None:
    """Copies rows into a segment at absolute position `start`, which must not lie before its frontier."""
    into = pool.segments[segment]
    for key, rows in tensors.items():
        layer, _, name = key.partition(".")
        into.layers[int(layer)].write(name, start - into.start, _array(rows))
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


def _named(pool: Pool, segment: int) -> list[tuple[str, Any]]:
    layers = pool.segments[segment].layers
    return [(f"{i}.{name}", array) for i, layer in enumerate(layers) for name, array in layer.arrays.items()]


def _rows(array: Any, a: int, b: int) -> Array:
    if array.dtype == mx.bfloat16:
        return np.array(array[:, a:b].view(mx.uint16)).view(BF16)
    return np.array(array, copy=False)[:, a:b]


def _array(rows: Array) -> Any:
    if rows.dtype.metadata == BF16.metadata:
        return mx.array(rows.view("<u2")).view(mx.bfloat16)
    return mx.array(rows)
