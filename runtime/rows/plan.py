"""What one round reads and writes: worked out once from its strips, used by every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.blas.gemm import ready
from onecopy.runtime.numerics.exponential import on_host

from .attention import Even, EvenGroup, Group, Product, RowTile, Sheet
from .buffers import LayerBuffers, Pool
from .fused import Whole, mask_of
from .layout import BLOCK, round_up
from .ops import Chain

Array = Any
Host = np.ndarray[Any, Any]

SCORE_BYTES = 4 * 1024 * 1024
"""Most bytes of a piece's scores: query rows go through in pieces below it. Small enough to stay in the caches of a CPU
and in memory that an allocator gives out again, large enough for products to be worth starting."""

DEVICE_SCORE_BYTES = 32 * 1024 * 1024
"""The same elsewhere than on a CPU, where starting costs more."""

SHORT = 16
"""Strips of at most so many tokens are computed together; a longer one fills its products by itself."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Consecutive tokens of one conversation to evaluate: they become rows `[position, position + len(tokens))`.

    chain: its rows so far, `chain.frontier == position`. wanted: how many trailing rows need logits.
    then: the token behind the strip, where it is known. draft: tokens that the device is to propose after the round.
    keep: the anchor under which the recurrent state behind the strip is to be kept.
    """

    chain: Chain
    position: int
    tokens: tuple[int, ...]
    wanted: int = 0
    then: int | None = None
    draft: int = 0
    keep: int | None = None

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
class Unit:
    """Query rows `bounds` of the flat batch, in parts `[start, stop)`, that attend together.

    sheet: what short strips read. whole: what one strip reads at once. spans: what its rows read otherwise.
    """

    bounds: tuple[tuple[int, int], ...]
    sheet: Sheet | Even | None = None
    spans: tuple[Span, ...] = ()
    whole: Whole | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How layers of one kind read: units, `whole` ones first, whose rows follow each other.

    back: the flat order again, or None.
    """

    units: tuple[Unit, ...]
    back: Array | None


class RoundRows:
    """One forward's strips, as positions, writes and readings. The flat batch has every strip's tokens in order.

    lanes: the streams that long strips are spread over. A short strip's work is less than waking another thread.
    together: every row sees all rows of its strip, also later ones (a block that is filled at once).
    hosted: short strips are all there is, and OpenBLAS computes their attention where float32 rows lie.
    laid: what the sheets of a hosted round were laid out as, by the shape of layers.
    """

    def __init__(
        self, strips: Sequence[Strip], pool: Pool, tile: RowTile, lanes: Sequence[Any], together: bool = False
    ) -> None:
        self.pool = pool
        self.tile = tile
        self.strips = tuple(strips)
        self.lanes = tuple(lanes)
        ends = np.cumsum([len(s.tokens) for s in strips]).tolist()
        self.bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
        self.rows = ends[-1]
        self.writes = tuple(self._write(s, *bound) for s, bound in zip(strips, self.bounds, strict=True))
        self.together = together
        self.hosted = tile.hosted and pool.floats and ready() and on_host() and self._are_short()
        self._readings: dict[tuple[int | None, int, int], Reading] = {}
        self.laid: dict[Any, Any] = {}

    def _are_short(self) -> bool:
        return all(len(s.tokens) <= SHORT for s in self.strips)

    def positions(self) -> Array:
        """Absolute positions `[rows]` of the flat batch."""
        return mx.array(np.concatenate([np.arange(s.position, s.end, dtype=np.int32) for s in self.strips]))

    def starts(self) -> Array:
        """The position `[strips]` of each strip's first token."""
        return mx.array(np.array([s.position for s in self.strips], dtype=np.int32))

    def seen_by(self, s: Strip) -> Host:
        """For each row of a strip, the last position that it sees: its own, or where rows see each other the last."""
        return np.full(len(s.tokens), s.end - 1) if self.together else np.arange(s.position, s.end)

    def _write(self, s: Strip, start: int, stop: int) -> Write:
        segment = self.pool.segments[s.chain.leaf]
        if not segment.start <= s.position <= s.end <= segment.start + segment.capacity:
            raise AssertionError(f"rows {s.position}..{s.end} do not fit segment {s.chain.leaf}")
        return Write(start, stop, s.chain.leaf, s.position - segment.start)

    def put(self, buffers: LayerBuffers, name: str, write: Write, rows: Array) -> None:
        """Writes rows `[heads, n, width]` of one strip into a layer of its leaf, in place once evaluated."""
        buffers.write(name, write.at, rows)

    def reading(self, window: int | None, group: int, heads: int) -> Reading:
        """How layers of that window, query group and number of KV heads read; computed once a round."""
        key = (window, group, heads)
        if key not in self._readings:
            self._readings[key] = self._read(window, group, heads)
        return self._readings[key]

    def sheet(self, window: int | None, group: int, heads: int) -> Sheet:
        """What all strips of a hosted round read, in the order of the flat batch."""
        (unit,) = self.reading(window, group, heads).units
        assert isinstance(unit.sheet, Sheet)
        return unit.sheet

    def _read(self, window: int | None, group: int, heads: int) -> Reading:
        whole = {i: found for i in range(len(self.strips)) if (found := self._whole(i, window)) is not None}
        short = [i for i, s in enumerate(self.strips) if len(s.tokens) <= SHORT and i not in whole]
        if len(short) < 2 and not self.hosted:
            short = []
        units = [Unit((self.bounds[i],), whole=found) for i, found in whole.items()]
        units += [self._sheet(short, window, group)] if short else []
        for i in range(len(self.strips)):
            if i not in whole and i not in short:
                units += self._pieces(i, window, group, heads)
        order = [row for unit in units for bound in unit.bounds for row in range(*bound)]
        return Reading(tuple(units), None if order == sorted(order) else mx.array(np.argsort(order)))

    def _whole(self, strip: int, window: int | None) -> Whole | None:
        """What a strip reads, if a fused kernel takes it and its rows lie in one segment."""
        s = self.strips[strip]
        if not self._fuses(s):
            return None
        queries = self.seen_by(s)
        first = 0 if window is None else max(0, int(queries[0]) - window + 1)
        if any(first < link.stop for link in s.chain.links[:-1]):
            return None
        origin = self.pool.segments[s.chain.leaf].start
        return Whole(s.chain.leaf, first - origin, s.end - origin, mask_of(queries, first, s.end, window))

    def _fuses(self, s: Strip) -> bool:
        return not self.hosted and not self.pool.packed and len(s.tokens) <= self.tile.fused

    def _sheet(self, strips: Sequence[int], window: int | None, group: int) -> Unit:
        alike = None if self.hosted else EvenMaker(self, window, group).make([self.strips[i] for i in strips])
        if alike is not None:
            order, even = alike
            return Unit(tuple(self.bounds[strips[i]] for i in order), even)
        sheet = SheetMaker(self, window, group).make([self.strips[i] for i in strips])
        return Unit(tuple(self.bounds[i] for i in strips), sheet)

    def _pieces(self, strip: int, window: int | None, group: int, heads: int) -> Iterable[Unit]:
        s, at = self.strips[strip], self.bounds[strip][0]
        limit = SCORE_BYTES if on_host() else DEVICE_SCORE_BYTES
        most = max(1, limit // (heads * -(-s.end // BLOCK) * BLOCK * 4 * group))
        # Products without a limit of rows use all cores by themselves.
        lanes = len(self.lanes) if self.tile.scores.most and len(s.tokens) > SHORT else 1
        step = min(round_up(-(-len(s.tokens) // lanes), 8), max(8, most // 8 * 8))
        for i in range(0, len(s.tokens), step):
            j = min(i + step, len(s.tokens))
            queries = _positions(self.seen_by(s)[i:j], group, self.tile)
            yield Unit(((at + i, at + j),), spans=tuple(self._spans(s, queries, window, j - i, heads)))

    def _spans(self, s: Strip, queries: Host, window: int | None, rows: int, heads: int) -> Iterable[Span]:
        for segment, a, b in self.tiles(s, int(queries[0]), int(queries[-1]) + 1, window):
            start = self.pool.segments[segment].start // BLOCK
            for first, last in _edges_apart(a, b, queries, window) if rows > SHORT else [(a, b)]:
                bias = hidden_bias(first, last, queries, window)
                spread = None if bias is None else mx.broadcast_to(mx.array(bias), (heads, *bias.shape))
                yield Span(segment, first - start, last - start, spread)

    def tiles(self, s: Strip, first: int, stop: int, window: int | None) -> Iterable[tuple[int, int, int]]:
        """(segment, first tile, last tile) by absolute tile number, that queries `[first, stop)` of the strip read."""
        lowest = 0 if window is None else max(0, first - window + 1)
        for link in s.chain.links:
            end = stop if link.segment == s.chain.leaf else link.stop
            a, b = max(link.start, lowest) // BLOCK, -(-end // BLOCK)
            if a < b:
                yield link.segment, a, b


def _positions(queries: Host, group: int, tile: RowTile) -> Host:
    """Positions of the kept rows of queries: each for its group, the last one again for padding."""
    real = np.repeat(queries, group)
    return np.pad(real, (0, tile.kept(len(real)) - len(real)), mode="edge")


def _edges_apart(a: int, b: int, queries: Host, window: int | None) -> list[tuple[int, int]]:
    """Tiles `[a, b)` as runs: those that some query sees in part, and the run in between that all see whole."""
    low = a if window is None else min(b, max(a, -(-(int(queries[-1]) - window + 1) // BLOCK)))
    high = max(low, min(b, (int(queries[0]) + 1) // BLOCK))
    return [(x, y) for x, y in ((a, low), (low, high), (high, b)) if x < y]


def hidden_bias(a: int, b: int, queries: Host, window: int | None, n: int = BLOCK) -> Host | None:
    """`[b - a, len(queries), n]` of 0 and -inf: hides later keys and those before the window. None if nothing."""
    bias: Host | None = None
    for tile in range(a, b):
        keys = np.arange(tile * BLOCK, tile * BLOCK + n)
        lowest, highest = int(queries.min()), int(queries.max())
        if keys[-1] <= lowest and (window is None or keys[0] > highest - window):
            continue
        hidden = keys > queries[:, None]
        if window is not None:
            hidden |= keys <= queries[:, None] - window
        if bias is None:
            bias = np.zeros((b - a, len(queries), n), dtype=np.float32)
        bias[tile - a][hidden] = -np.inf
    return bias


@dataclass(frozen=True, slots=True)
class _Read:
    """A strip's part of a product: `count` of its rows from row `at` on."""

    key: tuple[int, int, int]
    at: int
    count: int


class EvenMaker:
    """Lays the products of short strips out that have as many rows each, in one segment each that is theirs alone."""

    def __init__(self, round_: RoundRows, window: int | None, group: int) -> None:
        self._round, self._window, self._group = round_, window, group

    def make(self, strips: Sequence[Strip]) -> tuple[list[int], Even] | None:
        """The strips' order and how they are computed in it; None where some are not alike."""
        reads = [list(self._round.tiles(s, int(self._round.seen_by(s)[0]), s.end, self._window)) for s in strips]
        alone = len({segment for read in reads for segment, _, _ in read}) == len(strips)
        if not alone or any(len(read) != 1 for read in reads) or len({len(s.tokens) for s in strips}) != 1:
            return None
        shapes: dict[tuple[int, int], list[int]] = {}
        for i, (s, [(_, a, b)]) in enumerate(zip(strips, reads, strict=True)):
            shapes.setdefault((b - a, keys_read(self._round.tile, a, b, s.end)), []).append(i)
        groups = [self._group_of([(strips[i], reads[i][0]) for i in taken], n) for (_, n), taken in shapes.items()]
        order = [i for taken in shapes.values() for i in taken]
        return order, Even(tuple(groups), len(strips[0].tokens) * self._group)

    def _group_of(self, strips: Sequence[tuple[Strip, tuple[int, int, int]]], n: int) -> EvenGroup:
        products, biases = [], []
        for s, (segment, a, b) in strips:
            origin = self._round.pool.segments[segment].start // BLOCK
            products.append(Product(segment, a - origin, b - origin, n))
            queries = _positions(self._round.seen_by(s), self._group, self._round.tile)
            biases.append((hidden_bias(a, b, queries, self._window, n), (b - a, len(queries), n)))
        bias = _stacked(biases)
        return EvenGroup(tuple(products), None if bias is None else bias.reshape(len(strips), *biases[0][1]))


def keys_read(tile: RowTile, a: int, b: int, end: int) -> int:
    """Keys read of each of the tiles `[a, b)` by queries before `end`: of a single one only what has begun."""
    return min(BLOCK, round_up(end - a * BLOCK, tile.part)) if b - a == 1 else BLOCK


class SheetMaker:
    """Lays the products of short strips out: strips that read the same tiles share one product."""

    def __init__(self, round_: RoundRows, window: int | None, group: int) -> None:
        self._round, self._window, self._group = round_, window, group
        self._rows: dict[tuple[int, int, int], list[int]] = {}
        self._reads: list[list[_Read]] = []
        self._bases: dict[tuple[int, int, int], tuple[int, int]] = {}

    def make(self, strips: Sequence[Strip]) -> Sheet:
        queries = np.concatenate([np.repeat(self._round.seen_by(s), self._group) for s in strips])
        self._collect(strips)
        shapes: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
        for key, rows in self._rows.items():
            shapes.setdefault(self._shape(key, rows, queries), []).append(key)
        groups, base = [], 0
        for (tall, kept, n), keys in shapes.items():
            groups.append(self._make_group(keys, tall, kept, n, queries))
            for key in keys:
                self._bases[key] = base, kept
                base += (key[2] - key[1]) * kept
        return Sheet(tuple(groups), _ints(self._order(len(queries), base)))

    def _collect(self, strips: Sequence[Strip]) -> None:
        at = 0
        for s in strips:
            m = len(s.tokens) * self._group
            reads = []
            for key in self._round.tiles(s, int(self._round.seen_by(s)[0]), s.end, self._window):
                rows = self._rows.setdefault(key, [])
                reads.append(_Read(key, len(rows), m))
                rows += range(at, at + m)
            self._reads.append(reads)
            at += m

    def _shape(self, key: tuple[int, int, int], rows: list[int], queries: Host) -> tuple[int, int, int]:
        """(rows of the product of queries, score rows kept of a tile, keys read of a tile)."""
        tile, (_, a, b) = self._round.tile, key
        return tile.tall(len(rows)), tile.kept(len(rows)), keys_read(tile, a, b, int(queries[rows].max()) + 1)

    def _make_group(self, keys: Sequence[tuple[int, int, int]], tall: int, kept: int, n: int, queries: Host) -> Group:
        products, gather, owner, biases = [], [], [], []
        for key in keys:
            (segment, a, b), rows = key, self._rows[key]
            origin = self._round.pool.segments[segment].start // BLOCK
            products.append(Product(segment, a - origin, b - origin, n))
            gather.append(rows + rows[:1] * (tall - len(rows)))
            owners = rows + rows[:1] * (kept - len(rows))
            owner += [owners] * (b - a)
            biases.append((hidden_bias(a, b, queries[owners], self._window, n), (b - a, kept, n)))
        return Group(tuple(products), _ints(gather), _ints(owner), _stacked(biases))

    def _order(self, queries: int, nothing: int) -> Host:
        tallest = max(sum(read.key[2] - read.key[1] for read in reads) for reads in self._reads)
        order = np.full((tallest, queries), nothing)
        for reads in self._reads:
            t = 0
            for read in reads:
                rows = self._rows[read.key][read.at : read.at + read.count]
                base, kept = self._bases[read.key]
                for tile in range(read.key[2] - read.key[1]):
                    first = base + tile * kept + read.at
                    order[t, rows[0] : rows[-1] + 1] = np.arange(first, first + read.count)
                    t += 1
        return order


def _ints(values: Any) -> Array:
    return mx.array(np.asarray(values, dtype=np.int32))


def _stacked(biases: Sequence[tuple[Host | None, tuple[int, int, int]]]) -> Array | None:
    """The biases of all products by tile, or None when nothing is hidden."""
    if all(bias is None for bias, _ in biases):
        return None
    return mx.array(np.concatenate([np.zeros(s, np.float32) if b is None else b for b, s in biases]))
