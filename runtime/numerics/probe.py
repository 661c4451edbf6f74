"""The start-up self-check: which arrangements are exact here, for the shapes of this model, and what each costs.

A candidate is exact when a row's bits are the same alone, in a batch of any height tried, and at any place in it.
Nothing is assumed of the BLAS: a machine where no candidate passes is reported as not exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.rows.attention import LOG2_E, RowTile, TileSpan, attend
from onecopy.runtime.rows.layout import BLOCK

from .arrange import CANDIDATES, PLAIN, Arrangement, product

Array = Any
Stopwatch = Callable[[], float]

HEIGHTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 32, 33, 56, 64, 100, 128, 200, 256)
"""Rows run together in the check: every small batch a decode or verify round can have, and prefill chunks."""

TILES = (RowTile(0, 8, 1), RowTile(0, 8, 8), RowTile(0, 16, 16), RowTile(24), RowTile(16), RowTile(8))
"""Groupings of attention rows tried, cheapest for a prefill first; a tile of one query group is the last resort."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """What the self-check chose. exact: every product the model runs has bits of its own. reasons: what is not."""

    linears: dict[tuple[int, int, bool], Arrangement]
    tile: RowTile
    exact: bool
    reasons: tuple[str, ...]

    @property
    def mode(self) -> str:
        """Names the arithmetic: rows computed in one mode are not mixed with rows of another."""
        chosen = (f"{m}x{k}{' head' if head else ''}: {how}" for (m, k, head), how in sorted(self.linears.items()))
        return "; ".join((*chosen, str(self.tile)))

    def choose(self, outputs: int, inputs: int, head: bool) -> Arrangement:
        return self.linears.get((outputs, inputs, head), PLAIN)

    def pad(self, rows: int) -> int:
        """Rows of the flat batch for `rows` real rows, so that body linears need no padding of their own."""
        return max([rows, *(a.padded(rows) for (_, _, head), a in self.linears.items() if not head)])


def plain(reason: str) -> Numerics:
    """Everything as the machine does it by itself, with nothing promised."""
    return Numerics({}, RowTile(0, 1), False, (reason,))


def probe(
    body: Iterable[tuple[int, int]],
    heads: Iterable[tuple[int, int]],
    attention: Iterable[tuple[int, int, int, int]],
    stopwatch: Stopwatch,
) -> Numerics:
    """Checks linears of `(outputs, inputs)` and attention of `(kv heads, query group, key width, value width)`."""
    linears: dict[tuple[int, int, bool], Arrangement] = {}
    reasons: list[str] = []
    for shapes, head in ((sorted(body), False), (sorted(heads), True)):
        for outputs, inputs in shapes:
            found = _cheapest(outputs, inputs, head, stopwatch)
            if found is None:
                reasons.append(f"linear {outputs}x{inputs}: no arrangement is exact")
            linears[outputs, inputs, head] = found or PLAIN
    tile = next((t for t in TILES if all(attention_is_exact(*shape, t) for shape in attention)), None)
    if tile is None:
        reasons.append("attention: no row tile is exact")
    return Numerics(linears, tile or RowTile(0, 1), not reasons, tuple(reasons))


def linear_is_exact(outputs: int, inputs: int, how: Arrangement, heights: Iterable[int] = HEIGHTS) -> bool:
    """Whether `how` gives each row the same bits in every batch tried."""
    draw = np.random.default_rng(outputs * 31 + inputs)
    w = mx.array(draw.standard_normal((outputs, inputs), dtype=np.float32))
    x = mx.array(draw.standard_normal((256, inputs), dtype=np.float32))
    whole = np.array(product(x, w, how, 256))
    for n in heights:
        for start in {0, (37 * n) % (257 - n)}:
            if not np.array_equal(np.array(product(x[start : start + n], w, how, n)), whole[start : start + n]):
                return False
    return True


def attention_is_exact(kvh: int, group: int, width: int, value_width: int, tile: RowTile) -> bool:
    """Whether attention gives a query the same bits alone, beside others, and over one segment or two."""
    draw = np.random.default_rng(kvh * 131 + width)
    keys, values = (mx.array(draw.standard_normal((kvh, 3 * BLOCK, d), dtype=np.float32)) for d in (width, value_width))
    queries = mx.array(draw.standard_normal((kvh, 64 * group, width), dtype=np.float32)) * (LOG2_E / math.sqrt(width))

    def run(rows: slice, *cuts: int) -> Any:
        q = queries[:, rows.start * group : rows.stop * group]
        edges = [0, *cuts, 3]
        spans = [TileSpan(0, a, b, None) for a, b in itertools.pairwise(edges)]
        return np.array(attend(q, [keys] * len(spans), [values] * len(spans), spans, tile, None))

    whole = run(slice(0, 64))
    for n in (1, 2, 3, 4, 8, 17, 64):
        for start in {0, (13 * n) % (65 - n)}:
            want = whole[:, start * group : (start + n) * group]
            for cuts in ((), (1,), (1, 2)):
                if not np.array_equal(run(slice(start, start + n), *cuts), want):
                    return False
    return True


def _cheapest(outputs: int, inputs: int, head: bool, stopwatch: Stopwatch) -> Arrangement | None:
    heights = tuple(n for n in HEIGHTS if n <= 64) if head else HEIGHTS
    exact = [how for how in CANDIDATES if linear_is_exact(min(outputs, _HEAD_ROWS), inputs, how, heights)]
    exact = [how for how in exact if outputs <= _HEAD_ROWS or linear_is_exact(outputs, inputs, how, (1, 8))]
    if not exact:
        return None
    return min(exact, key=lambda how: _cost(outputs, inputs, how, head, stopwatch))


_HEAD_ROWS = 8192
"""Outputs checked at every height; a wider head is checked whole at two heights, to keep start-up short."""


def _cost(outputs: int, inputs: int, how: Arrangement, head: bool, stopwatch: Stopwatch) -> float:
    """Seconds of one decode row plus a share of a prefill chunk: rounds of both kinds matter."""
    w = mx.zeros((outputs, inputs))
    cost = 0.0
    for n, weight in ((1, 1.0), (8, 0.5)) if head else ((1, 1.0), (8, 0.5), (256, 0.25)):
        x = mx.zeros((n, inputs))
        mx.eval(w, x, product(x, w, how, n))
        best = math.inf
        for _ in range(3):
            begin = stopwatch()
            mx.eval(product(x, w, how, n))
            best = min(best, stopwatch() - begin)
        cost += weight * best
    return cost
