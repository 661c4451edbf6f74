"""The start-up self-check: which arrangements are exact here, for the shapes of this model.

A candidate is exact when a row's bits are the same alone, in a batch of any height tried, and at any place in it.
Nothing is assumed of the BLAS: a machine where no candidate passes is reported as not exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.blas.gemm import ready
from onecopy.runtime.rows.attention import RowTile, Tiles, attend, attended, view
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.caches import RowCache
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ops import Allocate, Chain, Link
from onecopy.runtime.rows.plan import SHORT, RoundRows, Strip

from .arrange import BODY, CANDIDATES, CUTS, HEAD, PLAIN, Arrangement, Turned, Way, pad_rows
from .exponential import on_host, seen
from .few import FEW
from .linear import host_rows

Array = Any

_FIRST = (1, 2, 8, 3, 16, 4, 24, 7, 9, 5, 12, 6, 14, 17, 33, 48)
HEIGHTS = (*_FIRST, *(n for n in range(1, 65) if n not in _FIRST), 77, 100, 127, 128, 200, 255, 256, 600)
"""Rows run together in the check: every small batch a decode or verify round can have, with all that may be left over
behind whole vectors of rows, and prefill chunks. Those that tell kernels apart come first, so that a candidate that is
not exact is left early."""

TALL = 64
"""A head sees at most about so many rows."""

PARTS = (64, 128, BLOCK)
"""Keys that may be read of a tile only begun, fewest first."""

LONG = 3 * SHORT
"""Rows of a strip that goes by tiles: no arrangement takes so many in the way it takes few."""

WIDE = 8192
"""Outputs checked at every height; a wider head is checked whole at two heights, to keep start-up short."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """What the self-check chose. exact: every product the model runs has bits of its own. reasons: what is not.

    otherwise: the way of linears that were not checked. fast: nothing was.
    """

    linears: dict[tuple[int, int, bool], Way]
    tile: RowTile
    exact: bool
    reasons: tuple[str, ...]
    otherwise: Way = PLAIN
    fast: bool = False

    @property
    def mode(self) -> str:
        """Names the arithmetic: rows computed in one mode are not mixed with rows of another."""
        chosen = (f"{m}x{k}{' head' if head else ''}: {how}" for (m, k, head), how in sorted(self.linears.items()))
        ways = (*chosen, *([] if self.linears else [str(self.otherwise)]), str(self.tile))
        return "; ".join(("fast", *ways) if self.fast else ways)

    def choose(self, outputs: int, inputs: int, head: bool) -> Way:
        return self.linears.get((outputs, inputs, head), self.otherwise)


def plain(reason: str, fused: int = 0) -> Numerics:
    """What is fastest, with nothing promised: few rows in pieces where OpenBLAS takes those, others as they come.

    fused: rows of a strip that a fused kernel takes at most (`fused_rows`).
    """
    tile, otherwise = RowTile(fused=fused), CUTS[0] if ready() and on_host() else PLAIN
    return Numerics({}, tile, False, (reason,), otherwise, fast=True)


def probe(
    body: Iterable[tuple[int, int]],
    heads: Iterable[tuple[int, int]],
    attention: Iterable[tuple[int, int, int, int]],
    fused: int = 0,
) -> Numerics:
    """Checks linears of `(outputs, inputs)` and attention of `(kv heads, query group, key width, value width)`.

    fused: rows of a strip that a fused kernel takes at most; it is used where it gives the bits of tiles.
    """
    linears: dict[tuple[int, int, bool], Way] = {}
    reasons: list[str] = []
    for shapes, head in ((sorted(body), False), (sorted(heads), True)):
        for outputs, inputs in shapes:
            found = exact_linear(outputs, inputs, head)
            if found is None:
                reasons.append(f"linear {outputs}x{inputs}: no arrangement is exact")
            linears[outputs, inputs, head] = found or PLAIN
    kept = tuple(sorted(attention))
    tile = exact_tile(kept)
    if tile is not None and fused_is_exact(kept, tile, fused):
        tile = replace(tile, fused=fused)
    if tile is None:
        reasons.append("attention: no row tile is exact")
    return Numerics(linears, tile or RowTile(), not reasons, tuple(reasons))


@cache
def exact_linear(outputs: int, inputs: int, head: bool) -> Way | None:
    """The first candidate with which each row of `x @ w[outputs, inputs].T` has bits of its own, or None."""
    heights = [n for n in HEIGHTS if n <= TALL] if head else HEIGHTS
    w, x = _values(min(outputs, WIDE), inputs), _values(max(HEIGHTS), inputs)
    for how in _candidates(head):
        if not linear_is_exact(x, w, how, heights):
            continue
        if outputs <= WIDE or linear_is_exact(x, _values(outputs, inputs), how, (1, 9)):
            return how
    return None


def _candidates(head: bool) -> tuple[Way, ...]:
    cpu = on_host()
    return (HEAD if head else BODY) if cpu else CANDIDATES


def linear_is_exact(x: Array, w: Array, how: Way, heights: Iterable[int]) -> bool:
    """Whether `how` gives each row of `x @ w.T` the same bits at every height, wherever it stands."""
    tallest, held = max(heights), how.hold(w)
    whole = np.array(how.product(x[:tallest], w, held))
    for n in heights:
        start = (37 * n) % (tallest + 1 - n)
        if not np.array_equal(np.array(how.product(x[start : start + n], w, held)), whole[start : start + n]):
            return False
        if n <= FEW and ready() and on_host():
            found = host_rows(how, seen(x)[start : start + n], w, held)
            if not np.array_equal(found, whole[start : start + n]):
                return False
    return not isinstance(how, Turned) or _columns_are_exact(x, w, how, whole)


def _columns_are_exact(x: Array, w: Array, how: Turned, whole: Any) -> bool:
    """Whether columns that come out of a product give the bits that turned rows give."""
    return all(
        np.array_equal(np.array(how.by_columns(x[:n], lambda c: mx.matmul(w, mx.contiguous(c)))), whole[:n])
        for n in (7, 16, 33, 256)
    )


@cache
def exact_tile(shapes: tuple[tuple[int, int, int, int], ...]) -> RowTile | None:
    """The first grouping of query rows that is exact for every shape, in its two products and over any segments."""
    first = {(kvh, group, width, BLOCK, True) for kvh, group, width, _ in shapes}
    second = {(kvh, group, BLOCK, width, False) for kvh, group, _, width in shapes}
    scores, mix = (
        next((how for how in CANDIDATES if all(_batch_is_exact(*s, how) for s in sorted(sides))), None)
        for sides in (first, second)
    )
    if scores is None or mix is None:
        return None
    for part in PARTS:
        tile = RowTile(scores, mix, part)
        if all(attention_is_exact(*shape, tile) for shape in shapes):
            return replace(tile, hosted=hosted_is_exact(shapes, tile))
    return None


def _batch_is_exact(kvh: int, group: int, inputs: int, outputs: int, turned: bool, how: Arrangement) -> bool:
    """Whether `how` gives each row of `[kvh, 1, rows, inputs] @ [kvh, 1, inputs, outputs]` the same bits at any height.

    turned: the second factor is kept as `[outputs, inputs]`, as keys are.
    """
    x, b = _values(kvh * 96, inputs).reshape(kvh, 1, 96, inputs), _values(kvh * inputs, outputs)
    b = b.reshape(kvh, 1, outputs, inputs).swapaxes(-1, -2) if turned else b.reshape(kvh, 1, inputs, outputs)

    def run(start: int, n: int) -> Any:
        rows = pad_rows(x[:, :, start : start + n], how.padded(n))
        return np.array(how.batched(rows, b)[:, :, :n])

    whole = run(0, 96)
    for n in (*range(1, 65), 77, 96):
        start = (13 * n) % (97 - n)
        if not np.array_equal(run(start, n), whole[:, :, start : start + n]):
            return False
    return True


def attention_is_exact(kvh: int, group: int, width: int, value_width: int, tile: RowTile) -> bool:
    """Whether attention gives a query the same bits alone, beside others, and over one segment or two."""
    keys, values = (_values(3 * BLOCK, kvh * d).reshape(kvh, 3 * BLOCK, d) for d in (width, value_width))
    queries = _values(64 * group, kvh * width).reshape(kvh, 1, -1, width) / math.sqrt(width)

    def tiles(span: tuple[int, int], n: int, bias: Array | None = None) -> Tiles:
        k, v = (view(a.reshape(-1), a.shape, 0, kvh, span, n, turned) for a, turned in ((keys, True), (values, False)))
        return Tiles(k, v, bias)

    def run(start: int, rows: int, *cuts: int) -> Any:
        q = queries[:, :, start * group : (start + rows) * group]
        edges = itertools.pairwise([0, *cuts, 3])
        return np.array(attended(attend(q, [tiles(e, BLOCK) for e in edges], tile, None)))

    def begun(rows: int, n: int) -> Any:
        hidden = np.where(np.arange(n) < tile.part - 5, np.float32(0), np.float32(-np.inf))
        bias = mx.array(np.broadcast_to(hidden, (1, tile.kept(rows * group), n)))
        return np.array(attended(attend(queries[:, :, : rows * group], [tiles((1, 2), n, bias)], tile, None)))

    for n in range(tile.part, BLOCK, tile.part):
        if any(not np.array_equal(begun(rows, n), begun(rows, BLOCK)) for rows in (1, 2, 5, 16)):
            return False
    whole = run(0, 64)
    for n in (1, 2, 8, 3, 4, 5, 17, 64):
        start = (13 * n) % (65 - n)
        want = whole[:, :, start * group : (start + n) * group]
        for cuts in ((), (1,), (1, 2)) if n in (1, 17) else ((),):
            if not np.array_equal(run(start, n, *cuts), want):
                return False
    return True


def hosted_is_exact(shapes: Iterable[tuple[int, int, int, int]], tile: RowTile) -> bool:
    """Whether short strips, computed where their rows lie, get the bits of a long one; False where they cannot be."""
    return ready() and on_host() and all(_short_as_long(*shape, tile) for shape in shapes)


def fused_is_exact(shapes: Iterable[tuple[int, int, int, int]], tile: RowTile, fused: int) -> bool:
    """Whether strips of so many rows get from a fused kernel the bits of tiles, short ones and long; False for 0."""
    taken = replace(tile, hosted=False, fused=fused)
    return fused > 0 and all(_short_as_long(*shape, taken) for shape in shapes)


def _short_as_long(kvh: int, group: int, width: int, value_width: int, tile: RowTile) -> bool:
    """Whether strips that `tile` computes, and one of many rows too, get the bits of one that goes by tiles."""
    layer = LayerLayout("attention", (RowTensor("k", kvh, width), RowTensor("v", kvh, value_width)))
    pool, cache, at = Pool(Layout((layer,))), RowCache(0, None), BLOCK + 90
    pool.apply((Allocate(1, 0, 2 * BLOCK),))
    for tensor in layer.rows:
        rows = _values(2 * BLOCK, kvh * tensor.width).reshape(kvh, 2 * BLOCK, tensor.width)
        pool.segments[1].layers[0].write(tensor.name, 0, rows)
    mx.eval(pool.segments[1].flat())
    queries = _values(LONG, kvh * group * width).reshape(LONG, kvh * group, width) / math.sqrt(width)

    def run(tile: RowTile, *strips: tuple[int, int]) -> Any:
        made = [Strip(Chain((Link(1, 0, at + a),), 2 * BLOCK), at + a, (0,) * (b - a)) for a, b in strips]
        cache.round = RoundRows(made, pool, tile, (mx.default_stream(mx.default_device()),))
        return np.array(cache.attend(mx.concatenate([queries[a:b] for a, b in strips])))

    whole = run(replace(tile, fused=0), (0, LONG))
    tried = [
        ((0, 1),),
        ((5, 5 + SHORT),),
        ((1, 2), (3, 6), (20, 30)),
        tuple((i, i + 1) for i in range(9)),
        ((0, LONG),),
    ]
    return all(np.array_equal(run(tile, *strips), np.concatenate([whole[a:b] for a, b in strips])) for strips in tried)


def _values(rows: int, width: int) -> Array:
    """Fixed values `[rows, width]` in [-1, 1] with no pattern that a kernel's strides would repeat."""
    base = np.sin(np.arange(1.0, 65522.0) ** 2).astype(np.float32)
    return mx.array(np.resize(base, rows * width).reshape(rows, width))
