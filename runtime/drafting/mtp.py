"""Multi-token prediction: a head reads the model's hidden state at a row and the token behind it, and guesses on.

The head keeps one layer of rows of its own (DeepSeek-V3, 2024, section 2.2): its row p stands for the hidden state at
p and the token p + 1. They are written for every row of the model, prompts too, so a resumed conversation drafts as
one that was never away. To look further than one token the head runs on its own output and guess; those rows lie past
the frontier and the next round overwrites them. A row at the edge of a fork may know the parent's next token: that
can cost a draft, never a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
from onecopy.runtime.decode.sampling import pick
from onecopy.runtime.rows.layout import LayerLayout, RowTensor

from .device import After
from .rows import Cache, HeadRows, onward, room

Array = Any

DEEPEST = 5
"""Tokens a head guesses at most: of what it was trained for, one, the rest is its own output fed back."""


class Head(Protocol):
    """A model's own prediction head. layer, dtypes: what it keeps per row."""

    @property
    def layer(self) -> LayerLayout: ...

    @property
    def dtypes(self) -> Mapping[RowTensor, Any]: ...

    def features(self) -> Array:
        """What the head reads of the model's last call, `[batch, length, …]`."""

    def step(self, features: Array, ids: Sequence[Sequence[int]], cache: Cache) -> Array:
        """Features `[batch, length, …]` of rows and the tokens behind them, to features of the same shape.

        Writes the rows of its layer.
        """

    def logits(self, features: Array) -> Array:
        """Features `[n, …]` that `step` answered with, to logits `[n, vocab]` of the token behind the given one."""


class MtpDrafter:
    """Drafts with a model's own head."""

    name = "mtp"
    mark = ""
    deepest = DEEPEST

    def __init__(self, head: Head) -> None:
        self._head = head
        self.layers = (head.layer,)
        self.dtypes = head.dtypes

    def features(self) -> Array:
        return self._head.features()

    def after(self, done: Sequence[After], rows: HeadRows) -> list[tuple[int, ...]]:
        asked = [i for i, one in enumerate(done) if one.asked]
        seen = self._follow(done, rows)
        rows.settle([one.strip for one in done], *(seen[i] for i in asked))
        guesses = self._propose([done[i] for i in asked], [seen[i][done[i].kept - 1] for i in asked], rows)
        out: list[tuple[int, ...]] = [()] * len(done)
        for i, guess in zip(asked, guesses, strict=True):
            out[i] = tuple(guess)
        return out

    def _follow(self, done: Sequence[After], rows: HeadRows) -> dict[int, Array]:
        """Writes the head's rows; its features at the rows of each strip, by the strip's number."""
        groups: dict[int, list[int]] = {}
        for i, one in enumerate(done):
            groups.setdefault(len(one.strip.tokens), []).append(i)
        seen: dict[int, Array] = {}
        for group in groups.values():
            features = mx.stack([done[i].features for i in group])
            with rows.over([done[i].strip for i in group]) as (cache,):
                out = self._head.step(features, [done[i].following for i in group], cache)
            seen.update({i: out[b] for b, i in enumerate(group)})
        return seen

    def _propose(self, asked: Sequence[After], features: list[Array], rows: HeadRows) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in asked]
        live = list(range(len(asked)))
        for depth in range(max((one.asked for one in asked), default=0)):
            logits = self._head.logits(mx.stack([features[i] for i in live])).astype(mx.float32)
            picks = pick(logits, [asked[i].wanted(depth) for i in live]).resolve()
            for i, found in zip(live, picks, strict=True):
                guesses[i].append(found.token)
            live = [i for i in live if depth + 1 < asked[i].asked and room(asked[i].strip, asked[i].end + depth) > 0]
            if not live:
                break
            strips = [onward(asked[i].strip, asked[i].end + depth, (guesses[i][-1],)) for i in live]
            with rows.over(strips) as (cache,):
                out = self._head.step(mx.stack([features[i] for i in live])[:, None], [s.tokens for s in strips], cache)
            rows.settle(strips, out)
            for b, i in enumerate(live):
                features[i] = out[b, 0]
        return guesses
