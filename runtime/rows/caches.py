"""The cache objects that mlx-lm models see: one per layer for the whole batch.

A round is a flat batch of rows, `[rows, 1]` tokens with one position each. A model calls `update_and_fetch` and then
attention for each layer, as it would for its own cache; here the first writes every strip's rows into its leaf and the
second reads every strip's chain. Device thread only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .attention import LOG2_E, RowTile, TileSpan, attend
from .buffers import Pool
from .layout import BLOCK
from .ops import Chain

Array = Any

SCORE_BYTES = 32 * 1024 * 1024
"""Most bytes of scores at once: query rows go through in pieces below it. Small enough to stay near the last cache
level of a CPU, large enough that pieces of a 256-row chunk appear only past about 40 blocks of context."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Consecutive tokens of one conversation to evaluate: they become rows `[position, position + len(tokens))`.

    chain: its rows so far, `chain.frontier == position`. wanted: how many trailing rows need logits.
    """

    chain: Chain
    position: int
    tokens: tuple[int, ...]
    wanted: int = 0

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """Query rows `[start, stop)` of the flat batch that attend to the same spans."""

    start: int
    stop: int
    spans: tuple[TileSpan, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Rows `[start, stop)` of the flat batch go to buffer row `at` of `segment`."""

    start: int
    stop: int
    segment: int
    at: int


class RoundRows:
    """What all layers of one forward share: positions, where rows are written, what each piece reads."""

    def __init__(self, strips: Sequence[Strip], pool: Pool, rows: int, tile: RowTile) -> None:
        self.pool = pool
        self.tile = tile
        self.rows = rows
        flat = [p for s in strips for p in range(s.position, s.end)]
        self.real = len(flat)
        self.positions = mx.array(np.array(flat + [0] * (rows - self.real), dtype=np.int32))
        self.writes = tuple(self._writes(strips))
        self._strips = strips
        self._pieces: dict[tuple[int | None, int, int], tuple[Piece, ...]] = {}

    def _writes(self, strips: Sequence[Strip]) -> list[Write]:
        out, at = [], 0
        for s in strips:
            segment = self.pool.segments[s.chain.leaf]
            if not segment.start <= s.position <= s.end <= segment.start + segment.capacity:
                raise AssertionError(f"rows {s.position}..{s.end} do not fit segment {s.chain.leaf}")
            out.append(Write(at, at + len(s.tokens), s.chain.leaf, s.position - segment.start))
            at += len(s.tokens)
        return out

    def pieces(self, window: int | None, group: int, heads: int) -> tuple[Piece, ...]:
        """Pieces for layers of that window, query group and KV heads; computed once a round."""
        key = (window, group, heads)
        if key not in self._pieces:
            out: list[Piece] = []
            at = 0
            for s in self._strips:
                out += self._strip_pieces(s, at, window, group, heads)
                at += len(s.tokens)
            self._pieces[key] = tuple(out)
        return self._pieces[key]

    def _strip_pieces(self, s: Strip, at: int, window: int | None, group: int, heads: int) -> list[Piece]:
        tiles = -(-s.end // BLOCK)
        most = max(1, SCORE_BYTES // (heads * tiles * BLOCK * 4 * group))
        step = min(len(s.tokens), max(8, most // 8 * 8))
        return [
            Piece(at + i, at + j, self._spans(s, s.position + i, s.position + j, window, group))
            for i in range(0, len(s.tokens), step)
            for j in (min(i + step, len(s.tokens)),)
        ]

    def _spans(self, s: Strip, first: int, stop: int, window: int | None, group: int) -> tuple[TileSpan, ...]:
        lowest = 0 if window is None else max(0, first - window + 1)
        spans = []
        for link in s.chain.links:
            start = self.pool.segments[link.segment].start
            end = stop if link.segment == s.chain.leaf else link.stop
            a, b = max(link.start, lowest) // BLOCK, -(-end // BLOCK)
            if a < b:
                bias = self._bias(a, b, first, stop, window, group)
                spans.append(TileSpan(link.segment, a - start // BLOCK, b - start // BLOCK, bias))
        return tuple(spans)

    def _bias(self, a: int, b: int, first: int, stop: int, window: int | None, group: int) -> Array | None:
        keys = np.arange(a * BLOCK, b * BLOCK, dtype=np.int64).reshape(b - a, 1, BLOCK)
        queries = np.repeat(np.arange(first, stop), group)
        queries = queries[None, :, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        if not hidden.any():
            return None
        return mx.array(np.where(hidden, np.float32(-np.inf), np.float32(0)))


class RowCache:
    """One layer's view of the round. `offset` is the array of row positions; masks are the rows' own business."""

    def __init__(self, layer: int, window: int | None) -> None:
        self.layer = layer
        self.window = window
        self.round: RoundRows | None = None

    @property
    def offset(self) -> Array:
        return self._now.positions

    @property
    def _now(self) -> RoundRows:
        if self.round is None:
            raise AssertionError("a row cache is used outside a round")
        return self.round

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Any, Any]:
        """Writes keys and values `[rows, kvh, 1, d]` into the leaves and answers with itself for attention to read."""
        now = self._now
        for name, rows in (("k", keys), ("v", values)):
            by_head = rows[:, :, 0, :].transpose(1, 0, 2)
            for w in now.writes:
                now.pool.segments[w.segment].layers[self.layer].write(name, w.at, by_head[:, w.start : w.stop])
        return self, self

    def attention(self, queries: Array, scale: float, sinks: Array | None) -> Array:
        """`queries [rows, heads, 1, d]` to `[rows, heads, 1, dv]`; padding rows come back as zeros."""
        now = self._now
        segments = now.pool.segments
        buffers = segments[now.writes[0].segment].layers[self.layer].arrays
        kvh, width = buffers["k"].shape[0], buffers["v"].shape[2]
        heads = queries.shape[1]
        group = heads // kvh
        q = (queries * (scale * LOG2_E)).reshape(now.rows, kvh, group, -1).transpose(1, 0, 2, 3)
        out = []
        for piece in now.pieces(self.window, group, kvh):
            m = (piece.stop - piece.start) * group
            rows = q[:, piece.start : piece.stop].reshape(kvh, m, -1)
            keys = [segments[s.segment].layers[self.layer].arrays["k"] for s in piece.spans]
            values = [segments[s.segment].layers[self.layer].arrays["v"] for s in piece.spans]
            extra = None if sinks is None else _sink_rows(sinks * LOG2_E, kvh, group, m)
            out.append(attend(rows, keys, values, piece.spans, now.tile, extra).reshape(kvh, -1, group, width))
        if now.rows > now.real:
            out.append(mx.zeros((kvh, now.rows - now.real, group, width), queries.dtype))
        joined = out[0] if len(out) == 1 else mx.concatenate(out, axis=1)
        return joined.transpose(1, 0, 2, 3).reshape(now.rows, heads, 1, width)


def _sink_rows(sinks: Array, kvh: int, group: int, m: int) -> Array:
    per_head = sinks.reshape(kvh, 1, group)
    return mx.broadcast_to(per_head, (kvh, -(-m // group), group)).reshape(kvh, -1)[:, :m]


def install_attention() -> None:
    """Puts a dispatching attention into every loaded mlx-lm model module: ours for `RowCache`, theirs otherwise."""
    from mlx_lm.models import base

    original = getattr(base.scaled_dot_product_attention, "_original", base.scaled_dot_product_attention)

    def attention(
        queries: Array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Array:
        rows = keys if isinstance(keys, RowCache) else cache
        if isinstance(rows, RowCache):
            return rows.attention(queries, scale, sinks)
        seen = getattr(cache, "queries_seen", None)
        if seen is not None:
            seen.append(queries.shape[1])
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    attention._original = original  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention"):
            module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
