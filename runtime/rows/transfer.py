"""Rows between segments and the disk. Runs on the device thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from .buffers import Pool

Tensors = Mapping[str, np.ndarray[Any, Any]]


def read_rows(pool: Pool, segment: int, start: int, stop: int) -> dict[str, np.ndarray[Any, Any]]:
    """Views `[heads, rows, width]` of rows `[start, stop)`, keyed `layer.name`. The rows must be under a hold."""
    return pool.segments[segment].row_views(start, stop)


def write_rows(pool: Pool, segment: int, start: int, tensors: Tensors) -> None:
    """Copies rows into a segment at absolute position `start`, which must not lie before its frontier."""
    into = pool.segments[segment]
    for key, rows in tensors.items():
        layer, _, name = key.partition(".")
        into.layers[int(layer)].write(name, start - into.start, mx.array(rows))
    mx.eval(into.flat())
