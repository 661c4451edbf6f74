"""Attention over a chain, in tiles fixed by absolute position.

A tile is one block of keys. Scores and weighted values are computed per tile and reduced in tile order, so neither the
segment a row lives in, nor how many segments a chain has, nor how many rows run beside it can change a bit. Keys and
values are read where they lie; only the per-tile partial results of several segments are joined.
Source: the running softmax of Milakov and Gimelshein, arXiv:1805.02867, with the maximum taken first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .layout import BLOCK

Array = Any


@dataclass(frozen=True, slots=True)
class TileSpan:
    """Tiles `[first, last)` of one segment's buffers, and the mask to add to their scores.

    bias: `[tiles, rows, BLOCK]` of 0 and -inf, or None when every query sees every key of the span.
    """

    segment: int
    first: int
    last: int
    bias: Array | None


@dataclass(frozen=True, slots=True)
class RowTile:
    """How query rows are grouped into products: `height` rows each, or all in one of at least so many rows (height 0).

    least: for scores; least_mix: for weighted values, whose products can be exact at fewer rows.
    """

    height: int = 0
    least: int = 8
    least_mix: int = 1

    def padded(self, rows: int, mix: bool = False) -> int:
        if self.height:
            return -(-rows // self.height) * self.height
        return max(rows, self.least_mix if mix else self.least)


LOG2_E = 1.4426950408889634
"""Scores are kept in units of log2(e), because powers of two are several times cheaper than exponentials on a CPU."""


def attend(
    queries: Array, keys: Sequence[Array], values: Array, spans: Sequence[TileSpan], tile: RowTile, sinks: Array | None
) -> Array:
    """Softmax attention of `queries [kvh, m, d]` over the spans' keys and values; returns `[kvh, m, dv]`.

    queries come scaled by the model's scale times `LOG2_E`. keys, values: one buffer `[kvh, capacity, d]` a span.
    sinks: `[kvh, m]` extra logits without a value, scaled by `LOG2_E`, or None. Lazy; nothing is mutated.
    """
    m = queries.shape[1]
    padded = _pad(queries, tile.padded(m))
    scores = [_scores(padded, k, span, tile, m) for k, span in zip(keys, spans, strict=True)]
    top = _maximum(scores, sinks)
    weights = [mx.power(2.0, s - top[:, None, :, None]) for s in scores]
    total = _in_order([w.sum(axis=-1) for w in weights])
    if sinks is not None:
        total = total + mx.power(2.0, sinks - top)
    mixed = _in_order([_mix(w, v, span, tile) for w, v, span in zip(weights, values, spans, strict=True)])
    return mixed / total[..., None]


def _pad(x: Array, rows: int) -> Array:
    short = rows - x.shape[-2]
    return x if short <= 0 else mx.concatenate([x, mx.zeros((*x.shape[:-2], short, x.shape[-1]), x.dtype)], axis=-2)


def _tiles(buffer: Array, span: TileSpan) -> Array:
    heads, capacity, width = buffer.shape
    return buffer.reshape(heads, capacity // BLOCK, BLOCK, width)[:, span.first : span.last]


def _scores(queries: Array, keys: Array, span: TileSpan, tile: RowTile, m: int) -> Array:
    by_tile = _tiles(keys, span).swapaxes(-1, -2)
    heads, rows, width = queries.shape
    if tile.height:
        grouped = queries.reshape(heads, 1, -1, tile.height, width)
        scores = mx.matmul(grouped, by_tile[:, :, None]).reshape(heads, -1, rows, BLOCK)
    else:
        scores = mx.matmul(queries[:, None], by_tile)
    scores = scores[:, :, :m] if rows != m else scores
    return scores if span.bias is None else scores + span.bias


def _mix(weights: Array, values: Array, span: TileSpan, tile: RowTile) -> Array:
    by_tile = _tiles(values, span)
    m = weights.shape[2]
    weights = _pad(weights, tile.padded(m, mix=True))
    if tile.height:
        heads, tiles, rows, _ = weights.shape
        grouped = weights.reshape(heads, tiles, -1, tile.height, BLOCK)
        mixed = mx.matmul(grouped, by_tile[:, :, None]).reshape(heads, tiles, rows, -1)
    else:
        mixed = mx.matmul(weights, by_tile)
    return mixed[:, :, :m] if mixed.shape[2] != m else mixed


def _maximum(scores: list[Array], sinks: Array | None) -> Array:
    top = scores[0].max(axis=(1, 3))
    for more in scores[1:]:
        top = mx.maximum(top, more.max(axis=(1, 3)))
    return top if sinks is None else mx.maximum(top, sinks)


def _in_order(partial: list[Array]) -> Array:
    """Sums `[kvh, tiles, …]` parts over all tiles, in tile order."""
    joined = partial[0] if len(partial) == 1 else mx.concatenate(partial, axis=1)
    return joined.sum(axis=1)
