"""Ways to lay out a matrix product so that each row's bits are independent of the rows beside it.

A BLAS picks its kernels from the whole shape, so the bits of one row change with the number of rows. An arrangement
allows only heights at which the machine's kernels give a row the same bits: at least so many rows, whole multiples, at
most so many in one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Array = Any


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A product takes `least` to `most` rows, a whole multiple of `multiple`. most 0 is no limit.

    More rows go through in tiles of `most`, and the rest of them in one smaller product.
    """

    least: int = 1
    multiple: int = 1
    most: int = 0

    def padded(self, rows: int) -> int:
        """Rows that are really computed for `rows` rows."""
        tiles = (rows - 1) // self.most * self.most if self.most else 0
        return tiles + max(self.least, -(-(rows - tiles) // self.multiple) * self.multiple)

    def __str__(self) -> str:
        most = f", at most {self.most}" if self.most else ""
        return f"rows at least {self.least}, times {self.multiple}{most}"


PLAIN = Arrangement()
"""The product as it comes: exact only where the machine's kernels make it so."""

CANDIDATES = (
    PLAIN,
    Arrangement(least=2),
    Arrangement(least=3),
    Arrangement(least=4),
    Arrangement(least=6),
    Arrangement(least=8),
    Arrangement(least=16),
    Arrangement(least=8, multiple=8, most=16),
    Arrangement(least=4, multiple=4, most=8),
    Arrangement(least=32, multiple=32, most=32),
    Arrangement(least=16, multiple=16, most=16),
    Arrangement(least=8, multiple=8, most=8),
    Arrangement(least=4, multiple=4, most=4),
    Arrangement(most=1),
)
"""Arrangements in order of cost, each exact on some kernel family. The first exact one is taken: a choice by measured
time could differ from one start to the next, and rows kept on disk with it."""

_zeros: dict[tuple[tuple[int, ...], Any], Array] = {}


def zero_rows(shape: tuple[int, ...], dtype: Any) -> Array:
    """Evaluated zeros, made once for each shape."""
    key = (shape, dtype)
    if key not in _zeros:
        _zeros[key] = mx.zeros(shape, dtype)
        mx.eval(_zeros[key])
    return _zeros[key]


def pad_rows(x: Array, rows: int) -> Array:
    """`x [..., n, k]` with zero rows appended up to `rows`."""
    *lead, n, k = x.shape
    return x if n >= rows else mx.concatenate([x, zero_rows((*lead, rows - n, k), x.dtype)], axis=-2)


def product(x: Array, w: Array, how: Arrangement) -> Array:
    """`x [n, k] @ w[m, k].T` as `[n, m]`, laid out as `how` says. Lazy."""
    n = x.shape[0]
    y = _cut(pad_rows(x, how.padded(n)), w.T, how.most)
    return y if y.shape[0] == n else y[:n]


def batched(x: Array, b: Array, how: Arrangement) -> Array:
    """`x [h, t, n, k] @ b[h, t, k, m]`, where `n` is a height that `how` padded. An axis of `x` may be 1. Lazy."""
    n = x.shape[2]
    if not how.most or n <= how.most:
        return mx.matmul(x, b)
    full = n // how.most * how.most
    tiles = mx.matmul(mx.unflatten(x[:, :, :full], 2, (-1, how.most)), b[:, :, None]).flatten(2, 3)
    return tiles if full == n else mx.concatenate([tiles, mx.matmul(x[:, :, full:], b)], axis=2)


def _cut(x: Array, b: Array, most: int) -> Array:
    n = x.shape[0]
    if not most or n <= most:
        return mx.matmul(x, b)
    full = n // most * most
    # A batch axis on both sides keeps MLX from folding the tiles back into one product.
    tiles = mx.matmul(mx.unflatten(x[:full], 0, (-1, most)), b[None]).flatten(0, 1)
    return tiles if full == n else mx.concatenate([tiles, mx.matmul(x[full:], b)])
