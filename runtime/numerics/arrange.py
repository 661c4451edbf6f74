"""Ways to lay out `x @ w.T` so that each row's bits are independent of the rows beside it.

A BLAS picks its kernels from the whole shape, so the bits of one row change with the number of rows. Each arrangement
fixes what the kernel may see: a least number of rows, a transposed product with spare rows, or tiles of a fixed height.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Array = Any


@dataclass(frozen=True, slots=True)
class Arrangement:
    """rows are padded to a multiple of `multiple`, then by `spare` rows, at least `least` in all.

    transposed: the product is taken as `(w @ x.T).T`. tile: rows go through in separate products of `multiple` rows.
    """

    multiple: int = 1
    spare: int = 0
    least: int = 1
    transposed: bool = False
    tile: bool = False

    def padded(self, rows: int) -> int:
        """Rows of the product that is really computed for `rows` rows."""
        return max(-(-rows // self.multiple) * self.multiple + self.spare, self.least)

    def __str__(self) -> str:
        form = "tiles of" if self.tile else ("transposed, rows to" if self.transposed else "rows to")
        return f"{form} {self.multiple}, spare {self.spare}, least {self.least}"


PLAIN = Arrangement()
"""The product as it comes: exact only where the machine's kernels make it so."""

CANDIDATES = (
    PLAIN,
    Arrangement(least=8),
    Arrangement(least=16),
    Arrangement(least=8, transposed=True),
    Arrangement(multiple=8, spare=8, transposed=True),
    Arrangement(multiple=16, spare=16, transposed=True),
    Arrangement(multiple=32, tile=True),
    Arrangement(multiple=8, tile=True),
)
"""Arrangements tried, each exact on some kernel family; the probe times the exact ones and takes the cheapest."""


def pad_rows(x: Array, rows: int) -> Array:
    """`x [n, k]` with zero rows appended up to `rows`."""
    short = rows - x.shape[0]
    return x if short <= 0 else mx.concatenate([x, mx.zeros((short, x.shape[1]), x.dtype)])


def product(x: Array, w: Array, how: Arrangement, real: int) -> Array:
    """`x [n, k] @ w[m, k].T` as `[n, m]`, laid out as `how` says. Lazy.

    Only the first `real` rows count: rows past them may already be padding, and come back as anything finite.
    """
    n, need = x.shape[0], how.padded(real)
    if how.tile:
        y = _tiled(pad_rows(x[:need], need), w, how.multiple)
        return pad_rows(y, n) if n > need else y[:n]
    x = pad_rows(x, need)
    y = mx.matmul(w, x.T).T if how.transposed else mx.matmul(x, w.T)
    return y[:n] if y.shape[0] != n else y


def _tiled(x: Array, w: Array, height: int) -> Array:
    # A batch axis on both sides keeps MLX from folding the tiles back into one product.
    return mx.matmul(x.reshape(-1, height, x.shape[1]), w.T[None]).reshape(x.shape[0], -1)
