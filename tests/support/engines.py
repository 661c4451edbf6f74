"""Conversations played straight on an engine, with their logits, and none of the actors around it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.engine import Engine
from onecopy.runtime.models.loaded import Loaded
from onecopy.runtime.rows.layout import BLOCK, round_up
from onecopy.runtime.rows.ops import Allocate, Chain, CopyRows, Link
from onecopy.runtime.rows.plan import Strip

Logits = NDArray[np.float32]

_ids = itertools.count(1000)


def opened(loaded: Loaded, context: int = 4096, **options: Any) -> Engine:
    return Engine.open(loaded, context=context, stopwatch=lambda: 0.0, **options)


class Talk:
    """One conversation: the tokens of its rows, and the segments they lie in."""

    def __init__(self, engine: Engine, capacity: int = 4 * BLOCK, parent: tuple[Link, ...] = ()) -> None:
        self.engine = engine
        self.position = parent[-1].stop if parent else 0
        self.links = parent
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Rows from here on go to a new segment. Only at a block boundary."""
        self.leaf, self.start = next(_ids), self.position
        self.end = self.start + round_up(capacity)
        self.engine.pool.apply((Allocate(self.leaf, self.start, round_up(capacity)),))

    @property
    def chain(self) -> Chain:
        return Chain((*self.links, Link(self.leaf, self.start, self.position)), self.end)

    def extend(self, capacity: int) -> None:
        """The leaf becomes an ancestor and a new one takes over."""
        self.links = self.chain.links
        self.grow(capacity)

    def strip(self, tokens: Sequence[int], wanted: int | None = None) -> Strip:
        return Strip(self.chain, self.position, tuple(tokens), len(tokens) if wanted is None else wanted)

    def feed(self, tokens: Sequence[int], *chunks: int) -> Logits:
        """Logits of every token, fed in strips of those lengths (the last one repeated), or all at once."""
        out = []
        sizes = itertools.chain(chunks or [len(tokens)], itertools.repeat((chunks or [len(tokens)])[-1]))
        at = 0
        while at < len(tokens):
            n = min(next(sizes), len(tokens) - at, self.end - self.position)
            out += together([(self, tokens[at : at + n])])
            at += n
        return np.concatenate(out)

    def fork(self, capacity: int = BLOCK) -> Talk:
        """A child that shares the whole blocks and copies the rest, as the bank does."""
        cut = self.position // BLOCK * BLOCK
        links = tuple(Link(x.segment, x.start, min(x.stop, cut)) for x in self.chain.links if x.start < cut)
        child = Talk(self.engine, capacity, links)
        source = next(x.segment for x in self.chain.links if x.start <= cut and x.stop >= self.position)
        self.engine.pool.apply((CopyRows(source, child.leaf, cut, self.position),))
        child.position = self.position
        return child


def together(work: Sequence[tuple[Talk, Sequence[int]]]) -> list[Logits]:
    """One round of several conversations: the logits of all their tokens."""
    engine = work[0][0].engine
    strips = [talk.strip(tokens) for talk, tokens in work]
    logits = engine.forward(strips).astype(mx.float32)
    engine.settle(strips, logits)
    for talk, tokens in work:
        talk.position += len(tokens)
    ends = np.cumsum([len(tokens) for _, tokens in work])
    return np.split(np.array(logits), ends[:-1])


class Case:
    """An engine, tokens, and the logits of all of them computed in one go."""

    def __init__(self, engine: Engine, vocab: int, length: int, exact: bool = True) -> None:
        assert (engine.exactness == ("exact", ())) is exact
        self.engine = engine
        self.tokens: list[int] = np.random.default_rng(5).integers(0, vocab, length).tolist()
        self.talk = Talk(engine)
        self.whole: Logits = self.talk.feed(self.tokens)

    def at(self, position: int) -> Talk:
        """A new conversation of the first `position` tokens."""
        talk = Talk(self.engine)
        self.engine.pool.apply((CopyRows(self.talk.leaf, talk.leaf, 0, position),))
        talk.position = position
        return talk
