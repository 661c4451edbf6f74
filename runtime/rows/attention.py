"""Attention over chains, in tiles fixed by absolute position.

A tile is one block of keys. Scores and weighted values are computed per tile and summed in tile order, so neither the
segment a row lives in, nor how many segments a chain has, nor how many rows run beside it can change a bit. Keys and
values are read where they lie; only per-tile partial results are joined.
Source: the running softmax of Milakov and Gimelshein, arXiv:1805.02867, with the maximum taken first.

What attends is a generator: it gives scores, is sent their weights, and returns the result. So several can compute
their scores side by side before the first of them waits for its weights (`attend_all`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.numerics.arrange import PLAIN, Arrangement, constant, pad_rows
from onecopy.runtime.numerics.exponential import seen

from .layout import BLOCK
from .quantized import product
from .weights import Scores, Weights, weigh

Array = Any

AT_ONCE = 4
"""Attentions whose scores are computed while others wait for their weights: two for each of two streams."""

Attending = Generator[Scores, Weights, Array]
"""Gives scores, is sent their weights, returns what was attended to."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """How query rows are laid out in the two products: queries by keys, and weights by values.

    part: of a tile that a strip has only begun, this many keys or a multiple are read instead of all.
    hosted: short strips may be computed as `HostSheet` does, where that is possible. fused: strips of at most so many
    rows whose rows lie in one segment are taken by MLX's fused kernel.
    """

    scores: Arrangement = PLAIN
    mix: Arrangement = PLAIN
    part: int = BLOCK
    hosted: bool = True
    fused: int = 0

    def kept(self, rows: int) -> int:
        """Rows of weights for `rows` query rows. At least 2: a sum over tiles of single numbers has another order."""
        return self.mix.padded(max(rows, 2))

    def tall(self, rows: int) -> int:
        """Rows of queries that make so many rows of weights; never fewer."""
        return self.scores.padded(self.kept(rows))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Some tiles of one segment, read in place: keys `[kvh, tiles, width, n]`, values `[kvh, tiles, n, width]`.

    n: BLOCK, or the begun part of a single tile. bias: `[tiles, rows, n]` of 0 and -inf for the kept rows, of all heads
    or as one, or None when every query sees every key. Keys and values of quantized rows are `PackedTiles`.
    """

    keys: Array
    values: Array
    bias: Array | None = None


def view(
    flat: Array, shape: Sequence[int], head: int, heads: int, tiles: tuple[int, int], n: int, turned: bool
) -> Array:
    """The first `n` keys of some tiles and heads of a buffer `[heads, capacity, width]`, as `Tiles` has values.

    flat: the buffer without its shape. turned: as `Tiles` has keys. One view instead of the slices and reshapes that
    make the same.
    """
    _, capacity, width = shape
    each, strides = (n, width), (width, 1)
    if turned:
        each, strides = each[::-1], strides[::-1]
    start = (head * capacity + tiles[0] * BLOCK) * width
    whole = (heads, tiles[1] - tiles[0], *each)
    return mx.as_strided(flat, whole, (capacity * width, BLOCK * width, *strides), start)


def attend_all(begun: Sequence[tuple[AbstractContextManager[Any], Attending]]) -> list[Array]:
    """What each returns. Each goes on inside its context, which may choose a stream. Lazy but for the scores, of which
    no more than `AT_ONCE` are there at any moment."""
    waves = [begun[i : i + AT_ONCE] for i in range(0, len(begun), AT_ONCE)]
    return list(itertools.chain.from_iterable(map(_attend_wave, waves)))


def _attend_wave(begun: Sequence[tuple[AbstractContextManager[Any], Attending]]) -> list[Array]:
    given = []
    for where, attending in begun:
        with where:
            given.append(next(attending))
    if len(begun) > 1:
        mx.async_eval([scores.all() for scores in given])  # type: ignore[no-untyped-call]
    out = []
    for (where, attending), scores in zip(begun, given, strict=True):
        with where:
            out.append(_ended(attending, scores))
        if len(begun) > 1:
            mx.async_eval(out[-1])  # type: ignore[no-untyped-call]
    return out


def attended(attending: Attending) -> Array:
    """What one attention returns."""
    return attend_all([(nullcontext(), attending)])[0]


def _ended(attending: Attending, scores: Scores) -> Array:
    try:
        while True:
            scores = attending.send(weigh(scores))
    except StopIteration as end:
        return end.value


def attend(queries: Array, spans: Sequence[Tiles], tile: RowTile, sinks: Array | None) -> Attending:
    """Softmax attention of `queries [kvh, 1, m, d]` over the spans in order; returns `[kvh, 1, m, dv]`.

    queries come scaled by the model's scale. sinks: `[kvh, m]` extra logits without a value, or None. Nothing that is
    given is mutated.
    """
    m = queries.shape[2]
    kept = tile.kept(m)
    padded = pad_rows(queries, tile.tall(m))
    scores = [_scores(padded, span, tile, kept) for span in spans]
    if sinks is not None:
        sinks = mx.pad(sinks, [(0, 0), (0, kept - m)])[:, None, :, None]
    weights = yield Scores(scores, sinks, _one_top)
    total = _with(_in_order(weights.sums), weights.extra)
    mixed = _in_order([_mix(w, span.values, tile) for w, span in zip(weights.parts, spans, strict=True)])
    out = mixed / total
    return out if kept == m else out[:, :, :m]


def _one_top(xp: Any, parts: Sequence[Any], sinks: Any) -> tuple[Sequence[Any], Any]:
    """Scores `[kvh, tiles, rows, n]` in parts: the maximum of a row over all of them."""
    tops = [s.max(axis=(1, 3), keepdims=True) for s in parts]
    top = tops[0] if len(tops) == 1 else xp.concatenate(tops, axis=1).max(axis=1, keepdims=True)
    top = top if sinks is None else xp.maximum(top, sinks)
    return [top] * len(parts), top


def _with(total: Array, extra: Array | None) -> Array:
    return total if extra is None else total + extra


def _scores(queries: Array, span: Tiles, tile: RowTile, kept: int) -> Array:
    scores = product(tile.scores, queries, span.keys)
    if scores.shape[2] != kept:
        scores = scores[:, :, :kept]
    if scores.dtype != mx.float32:
        scores = scores.astype(mx.float32)
    return scores if span.bias is None else scores + span.bias


def _mix(weights: Array, values: Array, tile: RowTile) -> Array:
    if values.dtype != mx.float32:
        return product(tile.mix, weights.astype(values.dtype), values).astype(mx.float32)
    return product(tile.mix, weights, values)


def _in_order(by_tile: list[Array]) -> Array:
    """Sums `[kvh, tiles, rows, …]` parts over all tiles, in tile order, as one tile."""
    joined = _joined(by_tile)
    return joined if joined.shape[1] == 1 else joined.sum(axis=1, keepdims=True)


@dataclass(frozen=True, slots=True)
class Product:
    """Query rows of one or several strips over the same tiles of one segment, as one product; `n` keys of each."""

    segment: int
    first: int
    last: int
    n: int = BLOCK


@dataclass(frozen=True, slots=True)
class Group:
    """Products of one shape. gather: `[products, tall]`, the query row of each of their rows.

    owner: `[tiles, kept]`, the query row of each score row of all products, tile by tile. bias: `[tiles, kept, n]`.
    """

    products: tuple[Product, ...]
    gather: Array
    owner: Array
    bias: Array | None


@dataclass(frozen=True, slots=True)
class Sheet:
    """All that a round's short strips read, computed together. Score rows are numbered through all groups, tile-major.

    order: `[tiles, rows]`, the score rows of each query row in tile order; a row with fewer tiles is filled up with
    the number after the last, which stands for nothing.
    """

    groups: tuple[Group, ...]
    order: Array

    def tops(self, xp: Any, parts: Sequence[Any], sinks: Any) -> tuple[Sequence[Any], Any]:
        """Scores `[kvh, tiles, kept, n]` of each group: the maximum of a query row over all tiles that it reads."""
        order, owners = self.order, [g.owner for g in self.groups]
        if xp is np:
            order, *owners = (seen(x) for x in (order, *owners))
        nothing = xp.full((parts[0].shape[0], 1), -math.inf, dtype=xp.float32)
        by_row = xp.concatenate([*(s.max(axis=-1).reshape(s.shape[0], -1) for s in parts), nothing], axis=1)
        top = xp.take(by_row, order, axis=1).max(axis=1)
        top = top if sinks is None else xp.maximum(top, sinks)
        return [xp.take(top, owner, axis=1)[..., None] for owner in owners], top


@dataclass(frozen=True, slots=True)
class EvenGroup:
    """Products of as many tiles each, one of a single segment for each strip. bias: `[products, tiles, kept, n]`."""

    products: tuple[Product, ...]
    bias: Array | None


@dataclass(frozen=True, slots=True)
class Even:
    """Short strips of `rows` query rows each that share nothing: no row has to be looked up, as in a `Sheet`.

    Query rows come in the order of the groups' products.
    """

    groups: tuple[EvenGroup, ...]
    rows: int


def attend_even(
    queries: Array, tiles: Sequence[Sequence[Tiles]], even: Even, tile: RowTile, sinks: Array | None
) -> Attending:
    """`attend` for many such strips at once, with the same bits. queries `[kvh, 1, R, d]`, and so the result."""
    kvh, _, _, width = queries.shape
    by_strip = queries.reshape(kvh, -1, even.rows, width)
    extra = None if sinks is None else sinks.reshape(kvh, -1, 1, even.rows, 1)
    out, at = [], 0
    for own, group in zip(tiles, even.groups, strict=True):
        part = slice(at, at + len(own))
        whole = len(even.groups) == 1
        q, e = (x if x is None or whole else x[:, part] for x in (by_strip, extra))
        out.append((yield from _attend_group(q, own, group, tile, e)))
        at += len(own)
    return _joined(out).reshape(kvh, 1, -1, tiles[0][0].values.shape[-1])


def _attend_group(
    queries: Array, tiles: Sequence[Tiles], group: EvenGroup, tile: RowTile, sinks: Array | None
) -> Attending:
    """`[kvh, strips, rows, dv]` of `queries [kvh, strips, rows, d]`; sinks `[kvh, strips, 1, rows, 1]`."""
    kvh, strips, m, _ = queries.shape
    kept, each = tile.kept(m), tiles[0].keys.shape[1]
    parts = mx.split(pad_rows(queries, tile.tall(m)), strips, axis=1)
    scores = _joined([_scores(q, t, tile, kept) for q, t in zip(parts, tiles, strict=True)])
    scores = scores.reshape(kvh, strips, each, kept, -1)
    if group.bias is not None:
        scores = scores + group.bias
    if sinks is not None:
        sinks = mx.pad(sinks, [(0, 0), (0, 0), (0, 0), (0, kept - m), (0, 0)])
    weights = yield Scores([scores], sinks, _top_of_each)
    by_tile = mx.split(weights.parts[0].reshape(kvh, strips * each, kept, -1), strips, axis=1)
    mixed = _joined([_mix(w, t.values, tile) for w, t in zip(by_tile, tiles, strict=True)])
    mixed, total = mixed.reshape(kvh, strips, each, kept, -1), weights.sums[0]
    if each > 1:
        mixed, total = mixed.sum(axis=2, keepdims=True), total.sum(axis=2, keepdims=True)
    out = (mixed / _with(total, weights.extra)).reshape(kvh, strips, kept, -1)
    return out if kept == m else out[:, :, :m]


def _top_of_each(xp: Any, parts: Sequence[Any], sinks: Any) -> tuple[Sequence[Any], Any]:
    """Scores `[kvh, strips, tiles, rows, n]`: the maximum of each strip's rows."""
    top = parts[0].max(axis=(2, 4), keepdims=True)
    top = top if sinks is None else xp.maximum(top, sinks)
    return [top], top


def attend_sheet(
    queries: Array, tiles: Sequence[Sequence[Tiles]], sheet: Sheet, tile: RowTile, sinks: Array | None
) -> Attending:
    """`attend` for many strips at once, with the same bits. queries `[kvh, R, d]`; tiles: for each group's products."""
    kvh, width = queries.shape[0], tiles[0][0].values.shape[-1]
    scores = [_group_scores(queries, own, group, tile) for own, group in zip(tiles, sheet.groups, strict=True)]
    weights = yield Scores(scores, sinks, sheet.tops)
    by_group = zip(weights.parts, weights.sums, tiles, strict=True)
    mixed = [_group_mix(w, sums, own, tile) for w, sums, own in by_group]
    parts = _joined([*mixed, constant((kvh, 1, width + 1))])
    total = mx.take(parts, sheet.order, axis=1)
    total = total[:, 0] if total.shape[1] == 1 else total.sum(axis=1)
    over = total[..., width:]
    over = over if weights.extra is None else over + weights.extra[..., None]
    return total[..., :width] / over


def _joined(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _group_scores(queries: Array, tiles: Sequence[Tiles], group: Group, tile: RowTile) -> Array:
    """`[kvh, tiles, kept, n]`."""
    kept = group.owner.shape[1]
    parts = mx.split(mx.take(queries, group.gather, axis=1), len(tiles), axis=1)
    scores = _joined([_scores(q, t, tile, kept) for q, t in zip(parts, tiles, strict=True)])
    return scores if group.bias is None else scores + group.bias


def _group_mix(weights: Array, sums: Array, tiles: Sequence[Tiles], tile: RowTile) -> Array:
    """`[kvh, score rows, dv + 1]`: weighted values of each score row, and the sum of its weights."""
    ends = list(itertools.accumulate(t.values.shape[1] for t in tiles))
    parts = mx.split(weights, ends[:-1], axis=1) if len(ends) > 1 else [weights]
    mixed = _joined([_mix(w, t.values, tile) for w, t in zip(parts, tiles, strict=True)])
    return mx.concatenate([mixed, sums], axis=-1).flatten(1, 2)
