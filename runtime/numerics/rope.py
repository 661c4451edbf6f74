"""Rotary position embeddings from a table: the angles of a round are looked up once and serve every layer.

The table is built with the same float32 formula as MLX's own kernel, so that both agree to the last bits that matter.
Source: Su et al., RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from .exponential import seen

Array = Any
Host = NDArray[Any]


class RopeTable:
    """cos and sin of every angle up to `length` positions: two arrays `[length, dims / 2]`."""

    def __init__(self, inverse: Array, scale: float, length: int) -> None:
        theta = (mx.arange(length, dtype=mx.float32) * scale)[:, None] * inverse[None]
        self.cos, self.sin = mx.cos(theta), mx.sin(theta)
        mx.eval(self.cos, self.sin)
        self._for: Array | None = None
        self._rows: tuple[Array, Array] | None = None

    def rows(self, starts: Array, length: int) -> tuple[Array, Array]:
        """cos and sin `[n, 1, length, dims / 2]` of the positions from `starts [n]`, kept for the next layer."""
        if self._for is not starts or self._rows is None:
            at = starts[:, None] + mx.arange(length)
            self._for = starts
            self._rows = self.cos[at][:, None], self.sin[at][:, None]
        return self._rows


class HeadTable:
    """Turns queries and keys of all heads at once, and scales the queries on the way.

    A head is turned as `x * cos + swapped(x) * sin` with the sign in `sin`; a value passes by cos 1 and sin 0.
    heads: query heads, key heads, value heads. scale: what queries are multiplied by.
    """

    def __init__(self, table: RopeTable, traditional: bool, heads: tuple[int, int, int], scale: float) -> None:
        self._table = table
        self._axis = 3 if traditional else 2
        self._heads = sum(heads)
        scales = np.repeat(np.array([scale, 1.0, 0.0], np.float32), heads).reshape(1, -1, 1, 1)
        self._scales, self._plain = mx.array(scales), mx.array((scales == 0).astype(np.float32))
        signs = np.array([-1.0, 1.0], np.float32)
        self._signs = mx.array(signs.reshape((1, 1, 1, 2) if traditional else (1, 1, 2, 1)))
        self._for: Array | None = None
        self._rows: tuple[Array, Array] | None = None
        self._seen_for: Array | None = None
        self._seen: tuple[Host, Host] | None = None

    def turn(self, x: Array, positions: Array) -> Array:
        """`x [n, heads * d]` of queries, keys, values, to `[n, heads, d]`."""
        cos, sin = self._at(positions)
        by_half = x.reshape(x.shape[0], self._heads, *cos.shape[2:])
        swapped = by_half[:, :, ::-1] if self._axis == 2 else by_half[:, :, :, ::-1]
        return (by_half * cos + swapped * sin).flatten(2, 3)

    def turned(self, x: Host, positions: Array) -> Host:
        """`turn` of few rows that NumPy has, with the same bits."""
        if self._seen_for is not positions or self._seen is None:
            rows = self._at(positions)
            mx.eval(rows)
            self._seen_for, self._seen = positions, (seen(rows[0]), seen(rows[1]))
        cos, sin = self._seen
        by_half = x.reshape(x.shape[0], self._heads, *cos.shape[2:])
        swapped = by_half[:, :, ::-1] if self._axis == 2 else by_half[:, :, :, ::-1]
        out: Host = by_half * cos + swapped * sin
        return out.reshape(x.shape[0], self._heads, -1)

    def _at(self, positions: Array) -> tuple[Array, Array]:
        if self._for is not positions or self._rows is None:
            self._for = positions
            cos, sin = (mx.expand_dims(t[positions][:, None], self._axis) for t in (self._table.cos, self._table.sin))
            pair = mx.broadcast_to(cos, (*cos.shape[: self._axis], 2, *cos.shape[self._axis + 1 :]))
            self._rows = pair * self._scales + self._plain, sin * self._signs * self._scales
        return self._rows


class TableRope(nn.Module):  # type: ignore[misc]
    """Stands in for a model's rope module when the offset is an array of one position per row."""

    def __init__(self, dims: int, traditional: bool, table: RopeTable, original: nn.Module) -> None:
        super().__init__()
        self._dims = dims
        self._traditional = traditional
        self._table = [table]
        self._original = [original]

    @property
    def dims(self) -> int:
        return self._dims

    @property
    def traditional(self) -> bool:
        return self._traditional

    @property
    def table(self) -> RopeTable:
        return self._table[0]

    def __call__(self, x: Array, offset: Any = 0) -> Array:
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            return self._original[0](x, offset=offset)
        cos, sin = self.table.rows(offset, x.shape[2])
        head = x[..., : self._dims]
        turned = _interleaved(head, cos, sin) if self._traditional else _halves(head, cos, sin)
        return turned if x.shape[-1] == self._dims else mx.concatenate([turned, x[..., self._dims :]], axis=-1)


def _halves(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _interleaved(x: Array, cos: Array, sin: Array) -> Array:
    a, b = x[..., 0::2], x[..., 1::2]
    return mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def inverse_frequencies(rope: nn.Module) -> tuple[Array, float, int, bool] | None:
    """(inverse frequencies, position scale, dims, traditional) of a rope module this table can stand in for."""
    kind = type(rope).__name__
    if kind == "RoPE":
        half = rope.dims // 2
        inverse = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(rope.base) / half))
        return inverse, float(rope.scale), int(rope.dims), bool(rope.traditional)
    if kind == "Llama3RoPE":
        return 1.0 / rope._freqs, 1.0, int(rope.dims), bool(rope.traditional)
    return None
