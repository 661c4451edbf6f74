"""Rotary position embeddings from a table: the angles of a round are looked up once and serve every layer.

The table is built with the same float32 formula as MLX's own kernel, so that both agree to the last bits that matter.
Source: Su et al., RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Array = Any


class RopeTable:
    """cos and sin of every angle up to `length` positions: two arrays `[length, dims / 2]`."""

    def __init__(self, inverse: Array, scale: float, length: int) -> None:
        theta = (mx.arange(length, dtype=mx.float32) * scale)[:, None] * inverse[None]
        self.cos, self.sin = mx.cos(theta), mx.sin(theta)
        mx.eval(self.cos, self.sin)
        self._for: Array | None = None
        self._rows: tuple[Array, Array] | None = None

    def rows(self, positions: Array) -> tuple[Array, Array]:
        """cos and sin `[n, 1, 1, dims / 2]` of `positions [n]`; kept while the same array is asked for."""
        if self._for is not positions or self._rows is None:
            self._for = positions
            self._rows = self.cos[positions][:, None, None, :], self.sin[positions][:, None, None, :]
        return self._rows


class TableRope(nn.Module):  # type: ignore[misc]
    """Stands in for a model's rope module when the offset is an array of one position per row."""

    def __init__(self, dims: int, traditional: bool, table: RopeTable, original: nn.Module) -> None:
        super().__init__()
        self._dims = dims
        self._traditional = traditional
        self._table = table
        self._original = [original]

    def __call__(self, x: Array, offset: Any = 0) -> Array:
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            return self._original[0](x, offset=offset)
        cos, sin = self._table.rows(offset)
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
