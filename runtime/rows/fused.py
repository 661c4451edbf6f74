"""Attention of one strip over one segment by MLX's fused kernel, which keeps no scores.

What it sums in which order is the kernel's affair: it is used where a self-check shows that it gives the bits of tiles,
or where nothing is promised (`RowTile.fused`). A chain of several segments goes by tiles: keys are never concatenated.
Source: online softmax in one pass, Dao et al., arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

Array = Any
Host = np.ndarray[Any, Any]
Mask = Array | Literal["causal"] | None

TRIED = (1, 2, 4, 8, 16, 64)
"""Rows of a strip that kernels are looked for with: they have one for few rows and one for many."""
ANY = 1 << 30
"""Rows of any strip."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Rows `[first, last)` of a segment's buffers, all that one strip reads. mask: as MLX takes it for the strip."""

    segment: int
    first: int
    last: int
    mask: Mask = None


def mask_of(queries: Host, first: int, last: int, window: int | None) -> Mask:
    """What queries that see up to positions `queries` may not see of keys at `[first, last)`."""
    if (queries == queries[0]).all():
        return None
    if window is None or last - window <= first:
        return "causal"
    keys = np.arange(first, last)
    return mx.array((keys <= queries[:, None]) & (keys > queries[:, None] - window))


def attend_whole(
    queries: Array, keys: Array, values: Array, mask: Mask, sinks: Array | None, only: bool = False
) -> Array:
    """`queries [rows, heads, d]`, scaled, over `keys, values [kvh, n, d]` to `[kvh, 1, rows * group, dv]`, lazy.

    sinks: `[heads]` or None. only: ValueError rather than another way where there is no such kernel.
    """
    rows, heads, _ = queries.shape
    kvh = keys.shape[0]
    q = queries.swapaxes(0, 1)[None].astype(keys.dtype)
    extra = None if sinks is None else sinks.astype(keys.dtype)
    out = mx.fast.scaled_dot_product_attention(
        q, keys[None], values[None], scale=1.0, mask=mask, sinks=extra, force_fused=only
    )
    by_group = out[0].astype(mx.float32).reshape(kvh, heads // kvh, rows, -1)
    return by_group.swapaxes(1, 2).reshape(kvh, 1, rows * (heads // kvh), -1)


def fused_rows(shapes: Iterable[tuple[int, int, int, int]], dtypes: Iterable[Any], windows: bool) -> int:
    """Rows that a strip may have at most for a fused kernel to take it here: 0 where there is none, or `ANY`.

    shapes: `(kv heads, query group, key width, value width)`. dtypes: of rows. windows: some layers have one.
    """
    layers, found = [(shape, dtype) for shape in shapes for dtype in dtypes], 0
    for rows in TRIED if layers else ():
        if not all(_runs(rows, *layer, windows) for layer in layers):
            return found
        found = rows
    return ANY if found else 0


def _runs(rows: int, shape: tuple[int, int, int, int], dtype: Any, windows: bool) -> bool:
    kvh, group, width, value_width = shape
    keys, values = (mx.ones((kvh, 2 * TRIED[-1], d), dtype) for d in (width, value_width))
    queries, seen = mx.ones((rows, kvh * group, width)), np.arange(rows) + TRIED[-1]
    masks = {window: mask_of(seen, 0, int(seen[-1]) + 1, window) for window in ((None, 7) if windows else (None,))}
    try:
        mx.eval(
            [
                attend_whole(queries, keys[:, : seen[-1] + 1], values[:, : seen[-1] + 1], m, None, True)
                for m in masks.values()
            ]
        )
    except (RuntimeError, ValueError):  # what MLX says of kernels that it does not have
        return False
    return True
