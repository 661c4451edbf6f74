"""A trial of compiled rounds: do they have the bits of rounds whose graph is built anew? Device thread only.

Whole rounds are compared, logits and the rows they write, over one segment and over two; and attention alone over a
leaf so long that sums over its tiles may go another way than sums over the tiles that have begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from .compiled import BUCKET, CompiledRounds
from .forward import Forward
from .models.layouts import PROBE_TOKENS, ModelRows
from .rows.attention import RowTile
from .rows.buffers import Pool
from .rows.caches import RowCache
from .rows.fixed import FixedRound
from .rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from .rows.ops import Allocate, Chain, CopyRows, Drop, Link
from .rows.plan import SHORT, RoundRows, Strip

Array = Any

WIDTHS = (1, 2, 4, SHORT)
"""Rows of the strips compared."""

LONG = 16 * BUCKET
"""Rows of the long leaf, which has one layer."""

SCRATCH = (-101, -102, -103)
"""Segments of the trial; the bank's ids begin at 1."""

FAILS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""What MLX and a model's code say of what they cannot do."""


def tried(rounds: CompiledRounds, forward: Forward, pool: Pool, tile: RowTile, rows: ModelRows) -> str | None:
    """Why compiled rounds are not to be used, or None. Leaves no segment and no graph behind.

    rows: the model's own, also where the pool keeps them quantized.
    """
    try:
        same = _rounds_alike(rounds, forward, pool, tile) and all(_read_alike(*shape) for shape in _shapes(tile, rows))
    except FAILS as error:
        return f"its rounds do not compile here: {' '.join(str(error).split())[:200]}"
    finally:
        pool.apply(tuple(Drop(s) for s in SCRATCH))
        rounds.forget()
    return None if same else "compiled rounds have other bits than others"


def _rounds_alike(rounds: CompiledRounds, forward: Forward, pool: Pool, tile: RowTile) -> bool:
    one, before, after = SCRATCH
    tokens = PROBE_TOKENS * (BLOCK // len(PROBE_TOKENS) + 2)
    end = len(tokens)
    pool.apply((Allocate(one, 0, BUCKET), Allocate(before, 0, BLOCK), Allocate(after, BLOCK, BUCKET)))
    prompt = Strip(Chain((Link(one, 0, 0),), BUCKET), 0, tokens, 1)

    def bits(strip: Strip, logits: Array) -> list[Any]:
        """What a round computed, as bytes: its logits and the rows that it wrote."""
        leaf = pool.segments[strip.chain.leaf]
        at = slice(strip.position - leaf.start, strip.end - leaf.start)
        mx.eval(logits, leaf.flat())
        forward.features()
        written = [array[:, at] for layer in rounds.of(leaf.layers) for array in layer.arrays.values()]
        return [np.array(x.flatten().view(mx.uint8)) for x in (logits, *written)]

    def alike(strip: Strip) -> bool:
        plain = bits(strip, forward([strip], pool, tile))
        again = [bits(strip, rounds(strip)) for _ in range(2)]
        return all(np.array_equal(a, b) for found in again for a, b in zip(plain, found, strict=True))

    bits(prompt, forward([prompt], pool, tile))
    pool.apply((CopyRows(one, before, 0, BLOCK), CopyRows(one, after, BLOCK, end)))
    chains = (
        Chain((Link(one, 0, end),), BUCKET),
        Chain((Link(before, 0, BLOCK), Link(after, BLOCK, end)), BLOCK + BUCKET),
    )
    drafts = PROBE_TOKENS * (SHORT // len(PROBE_TOKENS))
    return all(alike(Strip(c, end, drafts[:n], n)) for c in chains for n in WIDTHS)


def _shapes(tile: RowTile, rows: ModelRows) -> Iterator[tuple[RowTile, Any, tuple[int, int, int, int]]]:
    return ((tile, dtype, shape) for dtype in rows.attended for shape in rows.attention)


def _read_alike(tile: RowTile, dtype: Any, shape: tuple[int, int, int, int]) -> bool:
    """Whether attention does not see how many hidden tiles a leaf has. shape: as of `ModelRows.attention`."""
    kvh, group, width, value_width = shape
    layer = LayerLayout("attention", (RowTensor("k", kvh, width), RowTensor("v", kvh, value_width)))
    pool, cache = Pool(Layout((layer,)), lambda _: dtype), RowCache(0, None)
    pool.apply((Allocate(1, 0, LONG),))
    lanes = (mx.default_stream(mx.default_device()),)
    for tensor in layer.rows:
        numbers = mx.random.normal((tensor.heads, LONG, tensor.width), key=mx.random.key(tensor.width))
        pool.segments[1].layers[0].write(tensor.name, 0, numbers.astype(dtype))
    mx.eval(pool.segments[1].flat())

    def read(now: RoundRows, queries: Array) -> Any:
        cache.round = now
        return np.array(cache.attend(queries))

    def alike(at: int, n: int) -> bool:
        strip = Strip(Chain((Link(1, 0, at),), LONG), at, (0,) * n, n)
        queries = mx.random.normal((n, kvh * group, width), key=mx.random.key(n)) / width**0.5
        positions = mx.arange(at, at + n, dtype=mx.int32)
        fixed = FixedRound(strip, pool, tile, positions, positions[:1])
        return np.array_equal(read(fixed, queries), read(RoundRows([strip], pool, tile, lanes), queries))

    return all(alike(at, n) for at in (BLOCK - 3, 3 * BUCKET, LONG - SHORT) for n in WIDTHS)
