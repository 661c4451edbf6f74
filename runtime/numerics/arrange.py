"""Ways to lay out a matrix product so that each row's bits are independent of the rows beside it.

A BLAS picks its kernels from the whole shape, so the bits of one row change with the number of rows. A way allows only
products in which the machine's kernels give a row the same bits, at whatever place it stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.blas.gemm import multiply, ready

from .exponential import seen
from .few import FEW, Few

Array = Any
Host = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A product takes `least` to `most` rows, a whole multiple of `multiple`. most 0 is no limit.

    More rows go through in tiles of `most`, and the rest of them in one smaller product. single: one row goes alone.
    """

    least: int = 1
    multiple: int = 1
    most: int = 0
    single: bool = False

    def padded(self, rows: int) -> int:
        """Rows that are really computed for `rows` rows."""
        if self.single and rows == 1:
            return 1
        tiles = (rows - 1) // self.most * self.most if self.most else 0
        return tiles + max(self.least, -(-(rows - tiles) // self.multiple) * self.multiple)

    def hold(self, w: Array) -> Array:
        """What `product` makes of the weights `w [m, k]` each time, to be kept. Lazy."""
        return w.T

    def product(self, x: Array, w: Array, held: Array | None = None) -> Array:
        """`x [n, k] @ w[m, k].T` as `[n, m]`. Lazy. held: `hold(w)`, where it is kept."""
        n = x.shape[0]
        y = _tiled(pad_rows(x, self.padded(n)), self.hold(w) if held is None else held, self.most)
        return y if y.shape[0] == n else y[:n]

    def rows(self, x: Host, w: Host) -> Host:
        """`product` of rows that NumPy has, at once: with the same calls, hence the same bits."""
        n, height = len(x), self.padded(len(x))
        padded = np.ascontiguousarray(x) if n == height else np.zeros((height, x.shape[1]), np.float32)
        if n < height:
            padded[:n] = x
        out = np.empty((height, len(w)), np.float32)
        for at in range(0, height, self.most or height):
            part = slice(at, at + (self.most or height))
            multiply(padded[part], w, out[part], turned=True)
        return out[:n]

    def batched(self, x: Array, b: Array) -> Array:
        """`x [h, t, n, k] @ b[h, t, k, m]`, where `n` is a height that `padded` gave. An axis of `x` may be 1. Lazy."""
        n = x.shape[2]
        if not self.most or n <= self.most:
            return mx.matmul(x, b)
        parts = [
            mx.matmul(mx.unflatten(x[:, :, a:z], 2, (-1, self.most)), b[:, :, None]).flatten(2, 3)
            for a, z in _whole_tiles(n, self.most, b.size)
        ]
        full = n // self.most * self.most
        parts += [] if full == n else [mx.matmul(x[:, :, full:], b)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def __str__(self) -> str:
        most = f", at most {self.most}" if self.most else ""
        single = "1 or " if self.single else ""
        return f"rows {single}at least {self.least}, times {self.multiple}{most}"


@dataclass(frozen=True, slots=True)
class Turned:
    """Up to `flat` rows go through as they come, others as `(w @ x.T).T`: up to `most` at a time while they are few.

    Many rows, up to `tall`, are one product, between `edge` spare rows on either side: of such a product, on kernels
    that suit this way, only the rows at the edges have other bits.
    """

    flat: int = 6
    most: int = 8
    edge: int = 8
    tall: int = 256

    def hold(self, w: Array) -> Array:
        """As `Arrangement.hold`."""
        return w.T

    def product(self, x: Array, w: Array, held: Array | None = None) -> Array:
        """`x [n, k] @ w[m, k].T` as `[n, m]`. Lazy. held: `hold(w)`, where it is kept."""
        if x.shape[0] <= self.flat:
            return mx.matmul(x, self.hold(w) if held is None else held)
        return self.by_columns(x, lambda columns: mx.matmul(w, columns))

    def rows(self, x: Host, w: Host) -> Host | None:
        """`product` of rows that NumPy has, at once, with the same bits; None for more than it has a call for."""
        n, x = len(x), np.ascontiguousarray(x)
        if n <= self.flat:
            out = np.empty((n, len(w)), np.float32)
            multiply(x, w, out, turned=True)
            return out
        if n > 2 * self.most:
            return None
        columns = [np.empty((len(w), len(part)), np.float32) for part in np.split(x, range(self.most, n, self.most))]
        for at, part in enumerate(columns):
            multiply(w, x[at * self.most : at * self.most + part.shape[1]], part, turned=True)
        return np.concatenate([part.T for part in columns])

    def by_columns(self, x: Array, compute: Callable[[Array], Array]) -> Array:
        """`compute` of the rows of `x [n, k]` as columns `[k, rows]`, answering with `[m, rows]`; joined to `[n, m]`.

        Several products with nothing between them but work on single elements need no turning back on the way.
        """
        done = [compute(part.T)[:, before : before + rows].T for part, before, rows in self._parts(x)]
        return done[0] if len(done) == 1 else mx.concatenate(done)

    def _parts(self, x: Array) -> Iterator[tuple[Array, int, int]]:
        """(rows with spare ones, spare rows before, rows) of each product."""
        n, k = x.shape
        if n <= 2 * self.most:
            for at in range(0, n, self.most):
                yield x[at : at + self.most], 0, min(self.most, n - at)
            return
        for at in range(0, n, self.tall):
            part = x[at : at + self.tall]
            rows = part.shape[0]
            before, after = (constant((spare, k), 0.0, x.dtype) for spare in (self.edge, self.edge + -rows % 16))
            yield mx.concatenate([before, part, after]), self.edge, rows

    def __str__(self) -> str:
        return f"rows to {self.flat}, turned to {self.most}, more between {self.edge}"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Weights `[k, m]` in one piece of memory, and views of it: for each run of equal pieces of `k`, all of them.

    few: the same for few rows, where OpenBLAS takes them in one call.
    """

    whole: Array
    runs: tuple[Array, ...]
    few: Few | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """Few rows are multiplied in the pieces of the inputs in which a BLAS sums a large product, and those are added.

    A small product is not copied together before it is computed, and so reads its weights at the speed of memory; one
    of many rows is, `depth` inputs at a time. In these pieces both give a row the same bits, where the small one goes
    along rows of outputs: weights are held as `[k, m]`. More rows go as `rest` has them; so do all but a single one
    where OpenBLAS does not take many products in one call.
    Source: the loop over inputs of OpenBLAS, driver/level3 (`GEMM_Q`, `GEMM_UNROLL_M`).
    """

    depth: int
    rest: Arrangement = Arrangement(least=8)
    unit: int = 16

    def hold(self, w: Array) -> Pieces:
        """What `product` makes of the weights `w [m, k]` each time, to be kept."""
        whole = mx.contiguous(w.T)
        mx.eval(whole)
        runs, at = [], 0
        for depth, count in self.runs(w.shape[1]):
            runs.append(mx.unflatten(whole[at : at + depth * count], 0, (count, depth)))
            at += depth * count
        mx.eval(runs)
        few = Few(seen(whole), self.runs(w.shape[1])) if ready() and whole.dtype == mx.float32 else None
        return Pieces(whole, tuple(runs), few)

    def product(self, x: Array, w: Array, held: Pieces | None = None) -> Array:
        """`x [n, k] @ w[m, k].T` as `[n, m]`. Lazy, but few rows are computed at once. held: `hold(w)`, where kept."""
        held = self.hold(w) if held is None else held
        if held.few is not None and x.shape[0] <= FEW:
            mx.eval(x)
            return mx.array(held.few(seen(x)))
        if x.shape[0] > 1:
            return self.rest.product(x, w, held.whole)
        ends = list(itertools.accumulate(run.shape[0] * run.shape[1] for run in held.runs))
        parts = mx.split(x, ends[:-1], axis=1) if len(ends) > 1 else [x]
        sums = [mx.matmul(part.reshape(run.shape[0], 1, -1), run) for part, run in zip(parts, held.runs, strict=True)]
        joined = sums[0] if len(sums) == 1 else mx.concatenate(sums)
        return joined.sum(axis=0)

    def rows(self, x: Host, held: Pieces) -> Host | None:
        """`product` of few rows that NumPy has, at once; None where they have no call of their own."""
        return held.few(x) if held.few is not None and len(x) <= FEW else None

    def runs(self, inputs: int) -> list[tuple[int, int]]:
        """Pieces as (inputs, how many of them): whole depths, and of less than two the half, in whole units."""
        pieces, left = [], inputs
        while left:
            half = -(-(left // 2) // self.unit) * self.unit
            pieces.append(self.depth if left >= 2 * self.depth else half if left > self.depth else left)
            left -= pieces[-1]
        return [(depth, len(list(same))) for depth, same in itertools.groupby(pieces)]

    def __str__(self) -> str:
        return f"few rows in pieces of {self.depth}, or {self.rest}"


Way = Arrangement | Turned | Cut

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

EIGHT = (Arrangement(least=8, single=True), Arrangement(least=8))
"""On a CPU eight rows cost less than two: its kernels are made for them. One row reads the weights as they lie."""

CUTS = (Cut(448), Cut(384), Cut(320), Cut(512), Cut(256))
"""The depth of OpenBLAS for float32 on x86-64 with AVX-512, and such as other kernels may have."""

BODY: tuple[Way, ...] = (*CUTS, *EIGHT, *CANDIDATES[:7], Turned(), *CANDIDATES[7:])
"""For layers that prompts go through."""

HEAD: tuple[Way, ...] = (*CUTS, *EIGHT, *CANDIDATES)
"""A head sees few rows: what pays for hundreds does not for it."""


REACH = 2**31 - 1
"""Numbers that MLX reaches in a batch of products on a CPU: their offsets are 32 bits, and wrap around behind them."""


@cache
def constant(shape: tuple[int, ...], value: float = 0.0, dtype: Any = mx.float32) -> Array:
    """An evaluated array full of `value`, made once: never written to."""
    made = mx.full(shape, value, dtype)
    mx.eval(made)
    return made


@lru_cache(4096)
def spread(value: float, shape: tuple[int, ...]) -> Array:
    """An evaluated array of one number that reads as `shape`: what an operation would make of the number each time."""
    made = mx.broadcast_to(mx.array(value, mx.float32), shape)
    mx.eval(made)
    return made


def pad_rows(x: Array, rows: int) -> Array:
    """`x [..., n, k]` with zero rows appended up to `rows`."""
    *lead, n, k = x.shape
    return x if n >= rows else mx.concatenate([x, constant((*lead, rows - n, k), 0.0, x.dtype)], axis=-2)


def _tiled(x: Array, turned: Array, most: int) -> Array:
    n = x.shape[0]
    if not most or n <= most:
        return mx.matmul(x, turned)
    # A batch axis on both sides keeps MLX from folding the tiles back into one product.
    parts = [
        mx.matmul(mx.unflatten(x[a:z], 0, (-1, most)), turned[None]).flatten(0, 1)
        for a, z in _whole_tiles(n, most, turned.size)
    ]
    full = n // most * most
    parts += [] if full == n else [mx.matmul(x[full:], turned)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _whole_tiles(n: int, most: int, size: int) -> Iterator[tuple[int, int]]:
    """The rows `[a, z)` of `n` that make whole tiles of `most`, as many at once as MLX can count.

    size: numbers of the other factor, which all tiles share. MLX finds a tile's by an offset as if each had its own.
    """
    step = max(1, REACH // size) * most
    full = n // most * most
    yield from ((a, min(a + step, full)) for a in range(0, full, step))
