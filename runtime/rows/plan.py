"""What one round reads and writes: worked out once from its strips, used by every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .attention import Product, RowTile, Sheet
from .buffers import Pool
from .layout import BLOCK
from .ops import Chain

Array = Any
Host = np.ndarray[Any, Any]

SCORE_BYTES = 32 * 1024 * 1024
"""Most bytes of scores at once: query rows go through in pieces below it. Small enough to stay near the last cache
level of a CPU, large enough that pieces of a 256-row chunk appear only past about 40 blocks of context."""

SHORT = 16
"""Strips of at most so many tokens are computed together; a longer one fills its products by itself."""


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
class Write:
    """Rows `[start, stop)` of the flat batch go to buffer row `at` of `segment`."""

    start: int
    stop: int
    segment: int
    at: int


@dataclass(frozen=True, slots=True)
class Span:
    """Tiles `[first, last)` of a segment's buffers, and what to add to their scores (see `Tiles`)."""

    segment: int
    first: int
    last: int
    bias: Array | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Query rows `[start, stop)` of the flat batch that attend to the same spans."""

    start: int
    stop: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """How layers of one kind read: short strips in one sheet, the others piece by piece.

    sheet_rows: rows `[start, stop)` of the flat batch the sheet covers, by strip. back: the flat order again, or None.
    """

    sheet: Sheet | None
    sheet_rows: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    back: Array | None


class RoundRows:
    """One forward's strips, as positions, writes and readings. The flat batch has every strip's tokens in order."""

    def __init__(self, strips: Sequence[Strip], pool: Pool, tile: RowTile) -> None:
        self.pool = pool
        self.tile = tile
        self.strips = tuple(strips)
        ends = np.cumsum([len(s.tokens) for s in strips]).tolist()
        self.bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
        self.rows = ends[-1]
        self.writes = tuple(self._write(s, *bound) for s, bound in zip(strips, self.bounds, strict=True))
        self._readings: dict[tuple[int | None, int, int], Reading] = {}

    def positions(self) -> Array:
        """Absolute positions `[rows]` of the flat batch."""
        return mx.array(np.concatenate([np.arange(s.position, s.end, dtype=np.int32) for s in self.strips]))

    def starts(self) -> Array:
        """The position `[strips]` of each strip's first token."""
        return mx.array(np.array([s.position for s in self.strips], dtype=np.int32))

    def _write(self, s: Strip, start: int, stop: int) -> Write:
        segment = self.pool.segments[s.chain.leaf]
        if not segment.start <= s.position <= s.end <= segment.start + segment.capacity:
            raise AssertionError(f"rows {s.position}..{s.end} do not fit segment {s.chain.leaf}")
        return Write(start, stop, s.chain.leaf, s.position - segment.start)

    def reading(self, window: int | None, group: int, heads: int) -> Reading:
        """How layers of that window, query group and number of KV heads read; computed once a round."""
        key = (window, group, heads)
        if key not in self._readings:
            self._readings[key] = self._read(window, group, heads)
        return self._readings[key]

    def _read(self, window: int | None, group: int, heads: int) -> Reading:
        short = [i for i, s in enumerate(self.strips) if len(s.tokens) <= SHORT]
        if len(short) < 2:
            short = []
        alone = [i for i in range(len(self.strips)) if i not in short]
        pieces = [p for i in alone for p in self._pieces(self.strips[i], self.bounds[i][0], window, group, heads)]
        order = [row for i in (*short, *alone) for row in range(*self.bounds[i])]
        back = None if order == sorted(order) else mx.array(np.argsort(order))
        sheet = _SheetMaker(self, window, group).make([self.strips[i] for i in short]) if short else None
        return Reading(sheet, tuple(self.bounds[i] for i in short), tuple(pieces), back)

    def _pieces(self, s: Strip, at: int, window: int | None, group: int, heads: int) -> Iterable[Piece]:
        most = max(1, SCORE_BYTES // (heads * -(-s.end // BLOCK) * BLOCK * 4 * group))
        step = min(len(s.tokens), max(8, most // 8 * 8))
        for i in range(0, len(s.tokens), step):
            j = min(i + step, len(s.tokens))
            queries = _positions(s.position + i, s.position + j, group, self.tile)
            yield Piece(at + i, at + j, tuple(self._spans(s, queries, window, j - i)))

    def _spans(self, s: Strip, queries: Host, window: int | None, rows: int) -> Iterable[Span]:
        for segment, a, b in self.tiles(s, int(queries[0]), int(queries[-1]) + 1, window):
            start = self.pool.segments[segment].start // BLOCK
            for first, last in _edges_apart(a, b, queries, window) if rows > SHORT else [(a, b)]:
                bias = hidden_bias(first, last, queries, window)
                yield Span(segment, first - start, last - start, None if bias is None else mx.array(bias))

    def tiles(self, s: Strip, first: int, stop: int, window: int | None) -> Iterable[tuple[int, int, int]]:
        """(segment, first tile, last tile) by absolute tile number, that queries `[first, stop)` of the strip read."""
        lowest = 0 if window is None else max(0, first - window + 1)
        for link in s.chain.links:
            end = stop if link.segment == s.chain.leaf else link.stop
            a, b = max(link.start, lowest) // BLOCK, -(-end // BLOCK)
            if a < b:
                yield link.segment, a, b


def _positions(first: int, stop: int, group: int, tile: RowTile) -> Host:
    """Positions of the kept rows of queries `[first, stop)`: each for its group, the last one again for padding."""
    real = np.repeat(np.arange(first, stop), group)
    return np.pad(real, (0, tile.kept(len(real)) - len(real)), mode="edge")


def _edges_apart(a: int, b: int, queries: Host, window: int | None) -> list[tuple[int, int]]:
    """Tiles `[a, b)` as runs: those that some query sees in part, and the run in between that all see whole."""
    low = a if window is None else min(b, max(a, -(-(int(queries[-1]) - window + 1) // BLOCK)))
    high = max(low, min(b, (int(queries[0]) + 1) // BLOCK))
    return [(x, y) for x, y in ((a, low), (low, high), (high, b)) if x < y]


def hidden_bias(a: int, b: int, queries: Host, window: int | None) -> Host | None:
    """`[b - a, len(queries), BLOCK]` of 0 and -inf: hides later keys and those before the window. None if nothing."""
    bias: Host | None = None
    for tile in range(a, b):
        keys = np.arange(tile * BLOCK, (tile + 1) * BLOCK)
        lowest, highest = int(queries.min()), int(queries.max())
        if keys[-1] <= lowest and (window is None or keys[0] > highest - window):
            continue
        hidden = keys > queries[:, None]
        if window is not None:
            hidden |= keys <= queries[:, None] - window
        if bias is None:
            bias = np.zeros((b - a, len(queries), BLOCK), dtype=np.float32)
        bias[tile - a][hidden] = -np.inf
    return bias


class _SheetMaker:
    """Lays the products of short strips out: strips that read the same tiles share one product."""

    def __init__(self, round_: RoundRows, window: int | None, group: int) -> None:
        self._round, self._window, self._group = round_, window, group
        self._rows: dict[tuple[int, int, int], list[int]] = {}
        self._reads: list[list[tuple[tuple[int, int, int], int]]] = []

    def make(self, strips: Sequence[Strip]) -> Sheet:
        queries = np.concatenate([np.repeat(np.arange(s.position, s.end), self._group) for s in strips])
        self._collect(strips)
        products, gather, owner, biases = [], [], [], []
        start = base = 0
        tile = self._round.tile
        for (segment, a, b), rows in self._rows.items():
            kept, tall = tile.kept(len(rows)), tile.tall(len(rows))
            origin = self._round.pool.segments[segment].start // BLOCK
            products.append(Product(segment, a - origin, b - origin, start, tall, base, kept))
            gather += rows + rows[:1] * (tall - len(rows))
            owners = rows + rows[:1] * (kept - len(rows))
            owner += owners * (b - a)
            biases.append(hidden_bias(a, b, queries[owners], self._window))
            start, base = start + tall, base + (b - a) * kept
        order = self._order(products, len(queries), base)
        return Sheet(tuple(products), _ints(gather), _ints(owner), _ints(order), _stacked(biases, products), base)

    def _collect(self, strips: Sequence[Strip]) -> None:
        at = 0
        for s in strips:
            m = len(s.tokens) * self._group
            reads = []
            for key in self._round.tiles(s, s.position, s.end, self._window):
                rows = self._rows.setdefault(key, [])
                reads.append((key, len(rows)))
                rows += range(at, at + m)
            self._reads.append(reads)
            at += m

    def _order(self, products: Sequence[Product], queries: int, nothing: int) -> Host:
        by_key = dict(zip(self._rows, products, strict=True))
        tallest = max(sum(b - a for (_, a, b), _ in reads) for reads in self._reads)
        order = np.full((tallest, queries), nothing)
        for reads in self._reads:
            t = 0
            for key, j in reads:
                p, rows = by_key[key], self._rows[key]
                m = self._count(key, j)
                for tile in range(p.last - p.first):
                    first = p.base + tile * p.kept + j
                    order[t, rows[j] : rows[j] + m] = np.arange(first, first + m)
                    t += 1
        return order

    def _count(self, key: tuple[int, int, int], j: int) -> int:
        """How many rows of a product, from its row `j` on, are one strip's."""
        starts = [at for reads in self._reads for k, at in reads if k == key and at > j]
        return min(starts, default=len(self._rows[key])) - j


def _ints(values: Any) -> Array:
    return mx.array(np.asarray(values, dtype=np.int32))


def _stacked(biases: Sequence[Host | None], products: Sequence[Product]) -> Array | None:
    """The biases of all products, one below the other, or None when nothing is hidden."""
    if all(b is None for b in biases):
        return None
    shapes = [((p.last - p.first) * p.kept, BLOCK) for p in products]
    whole = [np.zeros(s, np.float32) if b is None else b.reshape(s) for b, s in zip(biases, shapes, strict=True)]
    return mx.array(np.concatenate(whole))
