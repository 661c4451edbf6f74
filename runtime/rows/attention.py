"""Attention over chains, in tiles fixed by absolute position.

A tile is one block of keys. Scores and weighted values are computed per tile and summed in tile order, so neither the
segment a row lives in, nor how many segments a chain has, nor how many rows run beside it can change a bit. Keys and
values are read where they lie; only per-tile partial results are joined.
Source: the running softmax of Milakov and Gimelshein, arXiv:1805.02867, with the maximum taken first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from onecopy.runtime.numerics.arrange import PLAIN, Arrangement, batched, pad_rows, zero_rows

from .layout import BLOCK

Array = Any

LOG2_E = 1.4426950408889634
"""Scores are kept in units of log2(e), because powers of two are several times cheaper than exponentials on a CPU."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """How query rows are laid out in the two products: queries by keys, and weights by values."""

    scores: Arrangement = PLAIN
    mix: Arrangement = PLAIN

    def kept(self, rows: int) -> int:
        """Rows of weights for `rows` query rows. At least 2: a sum over tiles of single numbers has another order."""
        return self.mix.padded(max(rows, 2))

    def tall(self, rows: int) -> int:
        """Rows of queries that make so many rows of weights; never fewer."""
        return self.scores.padded(self.kept(rows))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Some tiles of one segment: keys and values `[kvh, tiles, BLOCK, width]`, read in place.

    bias: `[tiles, rows, BLOCK]` of 0 and -inf for the kept rows, or None when every query sees every key.
    """

    keys: Array
    values: Array
    bias: Array | None = None


def cut(buffer: Array, heads: slice, first: int, last: int) -> Array:
    """Tiles `[first, last)` of some heads of a buffer `[heads, capacity, width]`, as a view by tile."""
    by_tile = mx.unflatten(buffer, 1, (-1, BLOCK))
    if heads == slice(None) and (first, last) == (0, by_tile.shape[1]):
        return by_tile
    return by_tile[heads, first:last]


def attend(queries: Array, spans: Sequence[Tiles], tile: RowTile, sinks: Array | None) -> Array:
    """Softmax attention of `queries [kvh, m, d]` over the spans in order; returns `[kvh, m, dv]`.

    queries come scaled by the model's scale times `LOG2_E`. sinks: `[kvh, m]` extra logits without a value, scaled by
    `LOG2_E`, or None. Lazy; nothing is mutated.
    """
    m = queries.shape[1]
    kept = tile.kept(m)
    padded = pad_rows(queries, tile.tall(m))[:, None]
    scores = [_scores(padded, span, tile, kept) for span in spans]
    top = _largest([s.max(axis=-1) for s in scores])
    if sinks is not None:
        sinks = mx.pad(sinks, [(0, 0), (0, kept - m)])
        top = mx.maximum(top, sinks)
    weights = [mx.power(2.0, s - top[:, None, :, None]) for s in scores]
    total = _in_order([w.sum(axis=-1, keepdims=True) for w in weights])
    if sinks is not None:
        total = total + mx.power(2.0, sinks - top)[..., None]
    mixed = _in_order([_mix(w, span.values, tile) for w, span in zip(weights, spans, strict=True)])
    out = mixed / total
    return out if kept == m else out[:, :m]


def _scores(queries: Array, span: Tiles, tile: RowTile, kept: int) -> Array:
    scores = batched(queries, span.keys.swapaxes(-1, -2), tile.scores)
    if scores.shape[2] != kept:
        scores = scores[:, :, :kept]
    if scores.dtype != mx.float32:
        scores = scores.astype(mx.float32)
    return scores if span.bias is None else scores + span.bias


def _mix(weights: Array, values: Array, tile: RowTile) -> Array:
    if values.dtype != mx.float32:
        return batched(weights.astype(values.dtype), values, tile.mix).astype(mx.float32)
    return batched(weights, values, tile.mix)


def _largest(by_tile: list[Array]) -> Array:
    """The maximum of `[kvh, tiles, rows]` parts over all tiles."""
    joined = by_tile[0] if len(by_tile) == 1 else mx.concatenate(by_tile, axis=1)
    return joined[:, 0] if joined.shape[1] == 1 else joined.max(axis=1)


def _in_order(by_tile: list[Array]) -> Array:
    """Sums `[kvh, tiles, rows, …]` parts over all tiles, in tile order."""
    joined = by_tile[0] if len(by_tile) == 1 else mx.concatenate(by_tile, axis=1)
    return joined[:, 0] if joined.shape[1] == 1 else joined.sum(axis=1)


@dataclass(frozen=True, slots=True)
class Product:
    """Query rows of one or several strips over the same tiles of one segment, as one product.

    start: the first of its `tall` rows among the gathered queries. base: the first of its `tiles * kept` score rows.
    """

    segment: int
    first: int
    last: int
    start: int
    tall: int
    base: int
    kept: int


@dataclass(frozen=True, slots=True)
class Sheet:
    """All that a round's short strips read, computed together. Score rows are numbered product by product, tile-major.

    gather: query row of each padded row of each product. owner: query row of each score row. order: `[tiles, rows]`,
    the score rows of each query row in tile order; a strip with fewer tiles is filled up with `rows`, which stands for
    nothing. bias: `[score rows, BLOCK]` or None. rows: score rows in all.
    """

    products: tuple[Product, ...]
    gather: Array
    owner: Array
    order: Array
    bias: Array | None
    rows: int


def attend_sheet(queries: Array, tiles: Sequence[Tiles], sheet: Sheet, tile: RowTile, sinks: Array | None) -> Array:
    """`attend` for many strips at once, with the same bits. queries `[kvh, R, d]`; tiles: one for each product."""
    kvh, width = queries.shape[0], tiles[0].values.shape[-1]
    padded = mx.take(queries, sheet.gather, axis=1)
    scores = _joined([_sheet_scores(padded, t, p, tile) for t, p in zip(tiles, sheet.products, strict=True)])
    if sheet.bias is not None:
        scores = scores + sheet.bias
    nothing = mx.full((kvh, 1), -mx.inf)
    top = mx.take(mx.concatenate([scores.max(axis=-1), nothing], axis=1), sheet.order, axis=1).max(axis=1)
    if sinks is not None:
        top = mx.maximum(top, sinks)
    weights = mx.power(2.0, scores - mx.take(top, sheet.owner, axis=1)[..., None])
    mixed = _joined([_sheet_mix(weights, t, p, tile) for t, p in zip(tiles, sheet.products, strict=True)])
    mixed = mx.concatenate([mixed, weights.sum(axis=-1, keepdims=True)], axis=-1)
    mixed = mx.concatenate([mixed, zero_rows((kvh, 1, width + 1), mx.float32)], axis=1)
    mixed = mx.take(mixed, sheet.order, axis=1)
    mixed = mixed[:, 0] if mixed.shape[1] == 1 else mixed.sum(axis=1)
    total = mixed[..., width:]
    if sinks is not None:
        total = total + mx.power(2.0, sinks - top)[..., None]
    return mixed[..., :width] / total


def _joined(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _sheet_scores(padded: Array, tiles: Tiles, p: Product, tile: RowTile) -> Array:
    return _scores(padded[:, None, p.start : p.start + p.tall], tiles, tile, p.kept).flatten(1, 2)


def _sheet_mix(weights: Array, tiles: Tiles, p: Product, tile: RowTile) -> Array:
    rows = weights[:, p.base : p.base + (p.last - p.first) * p.kept]
    return _mix(mx.unflatten(rows, 1, (-1, p.kept)), tiles.values, tile).flatten(1, 2)
