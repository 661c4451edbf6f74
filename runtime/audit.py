"""The exactness contract as checks on an engine: the same rows, reached in every way a server reaches them.

Each check computes logits of the same conversation in two ways and compares them bit for bit. Device thread only; uses
segments of its own and leaves none behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from .rows.caches import Strip
from .rows.layout import BLOCK, Layout, round_up
from .rows.ops import Allocate, Chain, CopyRows, Drop, Link

Logits = np.ndarray[Any, Any]


class Rounds(Protocol):
    """The part of an engine that is audited."""

    pool: Any
    fixed_rows: int

    @property
    def layout(self) -> Layout: ...
    def forward(self, strips: Sequence[Strip]) -> Any: ...
    def settle(self, strips: Sequence[Strip], *outputs: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check's outcome. rows: logits rows compared. differ: of these, rows with another bit. flips: other argmax."""

    name: str
    rows: int
    differ: int
    flips: int

    @property
    def exact(self) -> bool:
        return self.differ == 0


FIRST = 1 << 40
"""First segment id of an audit: far from any a bank hands out."""


class Bench:
    """Conversations of an audit: each a list of segments that together hold its rows."""

    def __init__(self, engine: Rounds) -> None:
        self._engine = engine
        self._ids = count(FIRST)
        self._live: list[int] = []

    def room(self, rows: int, *cuts: int) -> tuple[tuple[int, int, int], ...]:
        """Segments (id, start, end) for `rows` rows, cut at the given block-aligned positions."""
        edges = [0, *cuts, round_up(rows)]
        made = tuple((next(self._ids), a, b) for a, b in pairwise(edges))
        self._engine.pool.apply(tuple(Allocate(i, a, b - a) for i, a, b in made))
        self._live += [i for i, _, _ in made]
        return made

    def fork(self, parent: tuple[tuple[int, int, int], ...], at: int, rows: int) -> tuple[tuple[int, int, int], ...]:
        """A child of `parent` (one segment) from position `at`: whole blocks shared, the rest copied."""
        (source, _, _) = parent[0]
        start = at // BLOCK * BLOCK
        child = next(self._ids)
        self._live.append(child)
        self._engine.pool.apply((Allocate(child, start, round_up(rows) - start),))
        if at > start:
            self._engine.pool.apply((CopyRows(source, child, start, at),))
        return ((source, 0, start), (child, start, round_up(rows))) if start else ((child, 0, round_up(rows)),)

    def strip(self, segments: Sequence[tuple[int, int, int]], at: int, tokens: Sequence[int], wanted: int) -> Strip:
        links = tuple(Link(i, a, min(b, at)) for i, a, b in segments if a <= at and (a < at or a == 0 or b > at))
        leaf = next(k for k, (_, a, b) in enumerate(segments) if a <= at < b)
        return Strip(Chain(links[: leaf + 1], segments[leaf][2]), at, tuple(tokens), wanted)

    def run(self, strips: Sequence[Strip]) -> Logits:
        """Logits `[wanted rows, vocab]` of the strips, in order."""
        logits = self._engine.forward(strips)
        self._engine.settle(strips, logits)
        return np.array(logits.astype(mx.float32))

    def feed(self, segments: Any, tokens: Sequence[int], start: int, ends: Sequence[int], wanted: bool) -> Logits:
        """Evaluates `tokens[start:]` in strips that end at `ends` (and where a segment ends); all their logits."""
        out, at = [], start
        stops = sorted(x for x in {*ends, *(b for _, _, b in segments), len(tokens)} if x <= len(tokens))
        for end in stops:
            if end > at:
                rows = tokens[at:end]
                got = self.run([self.strip(segments, at, rows, len(rows) if wanted else 1)])
                out.append(got if wanted else got[:0])
                at = end
        return np.concatenate(out)

    def drop(self) -> None:
        self._engine.pool.apply(tuple(Drop(i) for i in self._live))
        self._live.clear()


def checks(engine: Rounds, vocab: int, tokens: int, widths: Sequence[int] = (2, 3, 4, 8, 16)) -> Iterator[Verdict]:
    """Runs the contract over a random conversation of `tokens` decoded tokens behind a prompt of 300.

    The reference is a reply decoded token by token, alone, in one segment, by rounds that are not compiled.
    """
    draw = np.random.default_rng(20)
    prompt = 300
    text = [int(t) for t in draw.integers(0, vocab, prompt + tokens)]
    chunks = list(range(BLOCK, prompt, BLOCK))
    bench = Bench(engine)
    fixed = engine.fixed_rows
    alone = bench.room(len(text) + (BLOCK if fixed and round_up(len(text)) % fixed == 0 else 0))
    bench.feed(alone, text[:prompt], 0, chunks, False)
    reference = bench.feed(alone, text, prompt, range(prompt, len(text)), True)

    def check(name: str, got: Logits, want: Logits = reference) -> Verdict:
        return verdict(name, got, want)

    for w in widths:
        own = bench.room(len(text))
        bench.feed(own, text[:prompt], 0, chunks, False)
        yield check(f"verify width {w}", bench.feed(own, text, prompt, range(prompt, len(text), w), True))
    for size in (64, 100, BLOCK, 2 * BLOCK):
        own = bench.room(len(text))
        got = bench.feed(own, text, 0, range(size, len(text), size), True)[prompt:]
        yield check(f"prefill in chunks of {size}", got)
    own = bench.room(len(text), BLOCK, 2 * BLOCK)
    yield check("many segments", bench.feed(own, text, 0, chunks, True)[prompt:])
    for w in (1, 4) if fixed else ():
        own = bench.room(round_up(len(text), fixed))
        bench.feed(own, text[:prompt], 0, chunks, False)
        yield check(f"compiled rounds of {w}", bench.feed(own, text, prompt, range(prompt, len(text), w), True))
    for at in (1, BLOCK, prompt):
        child = bench.fork(alone, at, len(text))
        yield check(
            f"forked at {at}", bench.feed(child, text, at, range(at, len(text), 32), True)[max(0, prompt - at) :]
        )
    for size in (2, 5, 16):
        yield check(f"batch of {size}", _crowd(bench, text, prompt, chunks, size))
    bench.drop()


def _crowd(bench: Bench, text: list[int], prompt: int, chunks: list[int], size: int) -> Logits:
    """The reply decoded beside `size - 1` other conversations at other positions."""
    own = bench.room(len(text))
    bench.feed(own, text[:prompt], 0, chunks, False)
    others = []
    for k in range(1, size):
        seat = bench.room(len(text))
        start = 17 * k % prompt + 1
        bench.feed(seat, text[:start], 0, chunks, False)
        others.append((seat, start))
    out = []
    for i in range(prompt, len(text)):
        beside = [bench.strip(s, p + i - prompt, [text[p + i - prompt]], 1) for s, p in others]
        out.append(bench.run([bench.strip(own, i, [text[i]], 1), *beside])[:1])
    return np.concatenate(out)


def verdict(name: str, got: Logits, want: Logits) -> Verdict:
    """Compares two runs' logits row by row."""
    differ = (got != want).any(axis=1)
    flips = got.argmax(axis=1) != want.argmax(axis=1)
    return Verdict(name, len(want), int(differ.sum()), int(flips.sum()))
