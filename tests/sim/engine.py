"""The engine of a simulation: the surface of `onecopy.runtime.engine.Engine` over buffers of hashes.

Buffers behave as MLX's do: written in place by a sole owner, copied whole when a view of them is still alive. Every
rule of the one copy that can be seen here is checked here: `broken` gets a sentence for each one that is not kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from onecopy.runtime.decode import Pick, Want
from onecopy.runtime.rows.caches import Strip
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout
from onecopy.runtime.rows.ops import (
    Allocate,
    Chain,
    CopyRows,
    Drop,
    DropAnchor,
    LoadAnchor,
    ResizeLayer,
    RowOp,
    SaveAnchor,
    Trim,
)

from tests.sim import model
from tests.sim.device import DeviceFault
from tests.sim.model import RATIO, WINDOW, Words

Broken = Callable[[str], None]
State = tuple[Words, ...]
"""A recurrent layer's: one array of the sum so far and the number of rows."""

GARBAGE = 0xDEADDEADDEADDEAD
_NONE = np.zeros(0, np.uint64)
_GIVES_BACK = Drop | Trim | DropAnchor
_OWNERS = 2
"""References to a buffer while it is written and nobody looks at it: its place, and the argument of getrefcount."""


@dataclass(slots=True, eq=False)
class Layer:
    """One layer of one segment, shaped as the real buffers are: `arrays["k"]` is `[1, capacity, 1]`."""

    arrays: dict[str, Words]
    pooled: dict[str, Words]
    state: State | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.arrays.values(), *self.pooled.values()))

    @property
    def entries(self) -> Words:
        """A view of the pooled entries, not to be kept; empty where the layer has none."""
        return self.pooled["pooled"][0, :, 0] if self.pooled else _NONE

    def write(self, name: str, at: int, rows: Words) -> None:
        rows = np.asarray(rows)
        self.arrays[name][:, at : at + rows.shape[1]] = rows


@dataclass(slots=True, eq=False)
class Segment:
    """One segment's buffers."""

    start: int
    capacity: int
    layers: list[Layer]

    @property
    def end(self) -> int:
        return self.start + self.capacity

    def rows(self, layer: int) -> Words:
        """A view of one layer's rows, not to be kept."""
        return self.layers[layer].arrays["k"][0, :, 0]

    def flat(self) -> list[Words]:
        return []

    def row_views(self, start: int, stop: int) -> dict[str, Words]:
        a, b = start - self.start, stop - self.start
        return {f"{i}.k": layer.arrays["k"][:, a:b] for i, layer in enumerate(self.layers) if layer.arrays}


class SimPool:
    """Segments by id. budget: bytes at most at any instant. copied: bytes moved by orders. forced: by live views.

    strict: views are looked for; not where a stager may read rows under a hold. fail_orders: numbers of the orders that
    fail; those that only give back never do. failed: one has.
    """

    def __init__(self, layout: Layout, budget: int, broken: Broken) -> None:
        self.layout = layout
        self.budget = budget
        self.segments: dict[int, Segment] = {}
        self.anchors: dict[int, tuple[State | None, ...]] = {}
        self.strict = True
        self.orders = 0
        self.failed = False
        self.fail_orders: frozenset[int] = frozenset()
        self.peak = self.held = self.copied = self.forced = 0
        self._broken = broken
        self._do = {
            Allocate: self._allocate,
            CopyRows: self._copy,
            ResizeLayer: self._resize,
            Drop: self._drop,
            Trim: lambda op: None,
            SaveAnchor: self._save_anchor,
            LoadAnchor: self._load_anchor,
            DropAnchor: self._drop_anchor,
        }

    def apply(self, ops: tuple[RowOp, ...]) -> None:
        for op in ops:
            self.orders += not isinstance(op, _GIVES_BACK)
            if self.orders in self.fail_orders and not isinstance(op, _GIVES_BACK):
                self.failed = True
                raise DeviceFault(f"order {self.orders} failed")
            self._do[type(op)](op)

    def bytes_held(self) -> int:
        """Counted from the buffers themselves."""
        states = (len(self.segments) + len(self.anchors)) * self.layout.state_bytes
        return states + sum(layer.nbytes for s in self.segments.values() for layer in s.layers)

    def state(self, chain: Chain) -> State:
        """The state where a chain ends: its leaf's, or that of the segment before a new leaf."""
        for link in reversed(chain.links[-2:]):
            found = self.segments[link.segment].layers[0].state
            if found is not None:
                return found
        return (np.zeros(2, np.uint64),)

    def slots(self, layer: int) -> int:
        """How many arrays the state of a layer has."""
        return 1

    def written(self, s: Segment, layer: int) -> Words:
        """The rows of a layer, to be written in place: whoever still looks at them makes that a copy."""
        arrays = s.layers[layer].arrays
        if self.strict and sys.getrefcount(arrays["k"]) > _OWNERS:
            self.forced += arrays["k"].nbytes
            arrays["k"] = arrays["k"].copy()
        return s.rows(layer)

    def pool(self, s: Segment, a: int, b: int) -> None:
        """Makes the pooled entries whose last row lies in `[a, b)`, from the rows in the buffers."""
        low, high = a // RATIO * RATIO, b // RATIO * RATIO
        for i, layer in enumerate(s.layers):
            if layer.pooled and low < high:
                rows = s.rows(i)[low - s.start : high - s.start]
                layer.entries[(low - s.start) // RATIO : (high - s.start) // RATIO] = model.pooled(rows, low)

    def _allocate(self, op: Allocate) -> None:
        if op.segment in self.segments:
            self._broken(f"segment {op.segment} is allocated twice")
        if op.start % BLOCK or op.capacity % BLOCK or op.capacity < BLOCK:
            self._broken(f"{op} is no whole number of blocks")
        layers = [_made(kind, op.capacity) for kind in self.layout.layers]
        self.segments[op.segment] = Segment(op.start, op.capacity, layers)
        self._took(self.layout.capacity_bytes(op.capacity) + self.layout.state_bytes)

    def _copy(self, op: CopyRows) -> None:
        source, target = self.segments[op.source], self.segments[op.target]
        inside = source.start <= op.start < op.stop <= source.end
        if not inside or not target.start <= op.start or not op.stop <= target.end:
            self._broken(f"{op} leaves its segments")
            return
        for layer in _with_rows(source):
            rows = source.rows(layer)[op.start - source.start : op.stop - source.start]
            self.written(target, layer)[op.start - target.start : op.stop - target.start] = rows
        self.pool(target, op.start, op.stop)
        self.copied += (op.stop - op.start) * self.layout.row_bytes

    def _resize(self, op: ResizeLayer) -> None:
        s, kind = self.segments[op.segment], self.layout.layers[op.layer]
        keep = op.keep - s.start
        if not 0 <= keep <= op.capacity:
            self._broken(f"{op} cuts rows that are kept")
            keep = min(max(keep, 0), op.capacity)
        old, new = s.layers[op.layer], _made(kind, op.capacity)
        for mine, theirs in ((old.arrays, new.arrays), (old.pooled, new.pooled)):  # one buffer after the other
            self._took(sum(array.nbytes for array in theirs.values()))
            self.held -= sum(array.nbytes for array in mine.values())
        if kind.rows:
            new.arrays["k"][0, :keep, 0] = s.rows(op.layer)[:keep]
        new.entries[: keep // RATIO] = old.entries[: keep // RATIO]
        new.state = old.state
        s.layers[op.layer] = new
        self.copied += keep * kind.row_bytes
        if op.layer == len(s.layers) - 1:
            s.capacity = op.capacity

    def _drop(self, op: Drop) -> None:
        gone = self.segments.pop(op.segment, None)
        if gone is None and self.failed:
            return  # it was never made
        if gone is None:
            self._broken(f"segment {op.segment} is dropped twice")
        else:
            self.held -= sum(layer.nbytes for layer in gone.layers) + self.layout.state_bytes

    def _save_anchor(self, op: SaveAnchor) -> None:
        self.anchors[op.anchor] = tuple(layer.state for layer in self.segments[op.segment].layers)
        self._took(self.layout.state_bytes)

    def _load_anchor(self, op: LoadAnchor) -> None:
        for layer, state in zip(self.segments[op.segment].layers, self.anchors[op.anchor], strict=True):
            layer.state = state

    def _drop_anchor(self, op: DropAnchor) -> None:
        if self.anchors.pop(op.anchor, None) is not None:
            self.held -= self.layout.state_bytes

    def _took(self, n: int) -> None:
        self.held += n
        self.peak = max(self.peak, self.held)
        if self.held > self.budget:
            self._broken(f"{self.held} bytes are held, the budget is {self.budget}")


def _garbage(*shape: int) -> Words:
    return np.full(shape, GARBAGE, np.uint64)


def _made(kind: LayerLayout, capacity: int) -> Layer:
    """A layer's buffers, full of what nobody may read."""
    arrays = {"k": _garbage(1, capacity, 1)} if kind.rows else {}
    return Layer(arrays, {"pooled": _garbage(1, capacity // kind.ratio, 1)} if kind.pooled else {})


def _with_rows(s: Segment) -> list[int]:
    return [i for i, layer in enumerate(s.layers) if layer.arrays]


def _state(total: int, rows: int) -> State:
    return (np.array([total & (1 << 64) - 1, rows], np.uint64),)


@dataclass(frozen=True, slots=True)
class SimResult:
    picks: tuple[tuple[Pick, ...], ...]
    drafts: tuple[tuple[int, ...], ...] = ()
    compiled: bool = False


class SimEngine:
    """Runs rounds over a `SimPool`. may_write(strip): called before rows are written, to see whether they may be."""

    exactness = ("exact", ())
    numerics_mode = "hash"
    fidelity = None
    fixed_rows = 0
    eager = "a simulation keeps no graphs"

    def __init__(self, kind: str, budget: int, broken: Broken, weights: int = 0) -> None:
        self.kind = kind
        self.weights = weights
        self.pool = SimPool(model.LAYOUTS[kind], budget, broken)
        self._before: dict[int, State] = {}
        self.may_write: Callable[[Strip], None] = lambda strip: None
        self.rows = 0
        self._broken = broken

    @property
    def layout(self) -> Layout:
        return self.pool.layout

    def run(self, strips: Sequence[Strip], wants: Sequence[Want] = ()) -> SimResult:
        """Evaluates every strip and picks at the wanted rows."""
        if sum(s.wanted for s in strips) != len(wants):
            raise AssertionError("one want for each wanted row")
        out, given = [], iter(wants)
        for strip in strips:
            out.append(self._strip(strip, [next(given) for _ in range(strip.wanted)]))
        self.pool.apply(tuple(SaveAnchor(s.chain.leaf, s.keep) for s in strips if s.keep is not None))
        return SimResult(tuple(out))

    def accept(self, kept: Sequence[tuple[Strip, int]]) -> None:
        """The states of these strips become what they are after so many of their tokens."""
        for strip, n in kept:
            if not self.layout.recurrent or not 0 < n <= len(strip.tokens):
                raise AssertionError(f"{n} of {len(strip.tokens)} tokens cannot be kept")
            first = model.first_rows(strip.tokens[:n], strip.position, self.weights)
            total = int(self._before[strip.chain.leaf][0][0]) + model.weighed(first, strip.position)
            self.pool.segments[strip.chain.leaf].layers[0].state = _state(total, strip.position + n)

    def _strip(self, strip: Strip, wants: list[Want]) -> tuple[Pick, ...]:
        leaf = self._check(strip)
        self.may_write(strip)
        a, b = strip.position, strip.end
        first = model.first_rows(strip.tokens, a, self.weights)
        second, sums = model.second_rows(first, self._so_far(strip), a)
        for layer in _with_rows(leaf):
            self.pool.written(leaf, layer)[a - leaf.start : b - leaf.start] = (first, second)[layer]
        if self.layout.recurrent:
            leaf.layers[0].state = _state(int(sums[-1]), b)
        self.pool.pool(leaf, a, b)
        self.rows += b - a
        return tuple(
            self._pick(strip, int(sums[end - a - 1]), end, want)
            for end, want in zip(range(b - strip.wanted + 1, b + 1), wants, strict=True)
        )

    def _so_far(self, strip: Strip) -> int:
        """The sum over the first layer's rows before a strip: from the rows, or from the state."""
        if not self.layout.recurrent:
            return self._sum(strip, 0, 0)
        state = self._before[strip.chain.leaf] = self.pool.state(strip.chain)
        total, rows = (int(x) for x in np.asarray(state[0]))
        if rows != strip.position:
            self._broken(f"a state of {rows} rows is gone on with at row {strip.position}")
        return total

    def _check(self, strip: Strip) -> Segment:
        """The chain is whole and ends where the strip begins, and the leaf has room."""
        at = 0
        for link in strip.chain.links:
            s = self.pool.segments[link.segment]
            if link.start != at or not s.start <= link.start <= link.stop <= s.end:
                self._broken(f"the chain {strip.chain} has a gap at row {at}")
            at = link.stop
        leaf = self.pool.segments[strip.chain.leaf]
        if not at == strip.position or not leaf.start <= strip.position <= strip.end <= leaf.end:
            raise AssertionError(f"rows {strip.position}..{strip.end} do not fit segment {strip.chain.leaf}")
        return leaf

    def _pick(self, strip: Strip, first: int, end: int, want: Want) -> Pick:
        if want.position != end:
            self._broken(f"a pick for position {want.position} was asked at row {end}")
        seen = self._seen(strip, end)
        return Pick(model.pick(first, seen, want.sampling, end, model.counts_of(want.counts)))

    def _seen(self, strip: Strip, end: int) -> int:
        """The sum over the second layer's rows that a query at `end - 1` sees, read from the buffers."""
        if self.kind == "sliding":
            return self._sum(strip, 1, max(0, end - WINDOW), end)
        if self.kind == "qsa":
            whole = end // RATIO * RATIO
            return (self._entries(strip, whole) + self._sum(strip, 1, whole, end)) & (1 << 64) - 1
        return self._sum(strip, 1, 0, end)

    def _sum(self, strip: Strip, layer: int, low: int, high: int | None = None) -> int:
        total = 0
        for start, stop, s in self._spans(strip, low, strip.position if high is None else high):
            total += model.weighed(s.rows(layer)[start - s.start : stop - s.start], start)
        return total & (1 << 64) - 1

    def _entries(self, strip: Strip, whole: int) -> int:
        total = 0
        for start, stop, s in self._spans(strip, 0, whole):
            total += int(
                s.layers[1].entries[(start - s.start) // RATIO : (stop - s.start) // RATIO].sum(dtype=np.uint64)
            )
        return total

    def _spans(self, strip: Strip, low: int, high: int) -> list[tuple[int, int, Segment]]:
        spans = []
        for link in strip.chain.links:
            stop = high if link.segment == strip.chain.leaf else min(link.stop, high)
            start = max(low, link.start)
            if start < stop:
                spans.append((start, stop, self.pool.segments[link.segment]))
        return spans
