"""Multi-token prediction: a head reads the model's hidden state at a row and the token behind it, and guesses on.

A head has one layer or several, one per token that it looks ahead (DeepSeek-V3, 2024, section 2.2). As in the public
serving engines, norms, projection and output are shared, the guess at depth d is made by layer d modulo their count,
and each layer keeps rows of its own. Row p of the first stands for the hidden state at p and the token p + 1; row p of
any other for the output of the layer before it at row p - 1 and the token p + 1. So no row waits for a token that is
not known. (The paper counts rows by the hidden state they go back to, one further back for each layer; distances within
a layer are the same.) Row 0 has no output before it and reads zeros.

Rows are written for every row of the model, prompts too, and with them the outputs that another layer reads, since the
next round begins with those of the last row: a resumed conversation drafts as one that was never away. To look further
than one token layers run on outputs at guesses; those rows lie past the frontier and the next round overwrites them.
At the edge of a fork the last row of a layer, and one more for each layer before it, may come of the parent's next
token: that can cost a draft, never a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
from onecopy.runtime.decode.sampling import pick
from onecopy.runtime.rows.layout import LayerLayout, RowTensor
from onecopy.runtime.rows.plan import Strip

from .device import After
from .rows import Cache, HeadRows, onward, room

Array = Any
Outputs = dict[int, Array]
"""What layers answered at one row, or at those of a strip, by number."""

DEEPEST = 5
"""Tokens a head guesses at most: it was trained for one a layer, the rest is its own output fed back."""


class Head(Protocol):
    """A model's own prediction head.

    depth: its layers. layer: what each of them keeps per row. output: what it answers per row. dtypes: of all these.
    """

    @property
    def depth(self) -> int: ...

    @property
    def layer(self) -> LayerLayout: ...

    @property
    def output(self) -> RowTensor: ...

    @property
    def dtypes(self) -> Mapping[RowTensor, Any]: ...

    def features(self) -> Array:
        """What the head reads of the model's last call, `[batch, length, …]`."""

    def step(self, layer: int, features: Array, ids: Sequence[Sequence[int]], cache: Cache) -> Array:
        """Features `[batch, length, …]` of rows and the tokens behind them, to features of the same shape.

        Writes the rows of that layer.
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
        self._depth = min(head.depth, DEEPEST)
        read = replace(head.layer, rows=(*head.layer.rows, head.output))
        self.layers = (*(read,) * (self._depth - 1), head.layer)
        self.dtypes = head.dtypes

    def features(self) -> Array:
        return self._head.features()

    def after(self, done: Sequence[After], rows: HeadRows) -> list[tuple[int, ...]]:
        asked = [i for i, one in enumerate(done) if one.asked]
        deepest = max((one.asked for one in done), default=0)
        seen = self._follow(done, rows, self._read(0, deepest))
        rows.settle([one.strip for one in done], *(out for i in asked for out in seen[i].values()))
        newest = [{layer: out[done[i].kept - 1] for layer, out in seen[i].items()} for i in asked]
        guesses = self._propose([done[i] for i in asked], newest, deepest, rows)
        out: list[tuple[int, ...]] = [()] * len(done)
        for i, guess in zip(asked, guesses, strict=True):
            out[i] = tuple(guess)
        return out

    def _follow(self, done: Sequence[After], rows: HeadRows, read: Sequence[int]) -> dict[int, Outputs]:
        """Writes the head's rows; the outputs of layers `read` at the rows of each strip, by the strip's number.

        The others are let go: what is never evaluated would hold on to the rows that it reads.
        """
        groups: dict[int, list[int]] = {}
        for i, one in enumerate(done):
            groups.setdefault(len(one.strip.tokens), []).append(i)
        seen: dict[int, Outputs] = {}
        for group in groups.values():
            outputs = self._write([done[i] for i in group], rows)
            seen.update({i: {layer: outputs[layer][b] for layer in read} for b, i in enumerate(group)})
        return seen

    def _write(self, done: Sequence[After], rows: HeadRows) -> list[Array]:
        """Outputs `[strips, length, …]` of every layer at the rows of strips of one length, all written."""
        strips, ids = [one.strip for one in done], [one.following for one in done]
        features, outputs = mx.stack([one.features for one in done]), list[Array]()
        before = rows.before(strips)
        with rows.over(strips) as caches:
            for layer, cache in enumerate(caches):
                outputs.append(self._head.step(layer, features, ids, cache))
                if layer + 1 < len(caches):
                    rows.keep(layer, outputs[-1])
                    kept = outputs[-1].astype(before[layer].dtype)
                    features = mx.concatenate([before[layer], kept[:, :-1]], axis=1)
        return outputs

    def _propose(self, asked: Sequence[After], outputs: list[Outputs], deepest: int, rows: HeadRows) -> list[list[int]]:
        """Guesses for each conversation. outputs: of its newest row; exchanged for those of the guesses."""
        guesses: list[list[int]] = [[] for _ in asked]
        live = list(range(len(asked)))
        for depth in range(deepest):
            found = [outputs[i][depth % self._depth] for i in live]
            logits = self._head.logits(mx.stack(found)).astype(mx.float32)
            picks = pick(logits, [asked[i].wanted(depth) for i in live]).resolve()
            for i, picked in zip(live, picks, strict=True):
                guesses[i].append(picked.token)
            live = [i for i in live if depth + 1 < asked[i].asked and room(asked[i].strip, asked[i].end + depth) > 0]
            if not live:
                break
            strips = [onward(asked[i].strip, asked[i].end + depth, (guesses[i][-1],)) for i in live]
            made = self._further(strips, [outputs[i] for i in live], depth, deepest, rows)
            for i, one in zip(live, made, strict=True):
                outputs[i] = one
        return guesses

    def _further(
        self, strips: Sequence[Strip], outputs: Sequence[Outputs], depth: int, deepest: int, rows: HeadRows
    ) -> list[Outputs]:
        """The row of the guess at `depth`: its layers' outputs, from those at the row before, as far as they are read.

        The first layer has no state of the model there and reads the output that the guess was made from.
        """
        made: Outputs = {}
        with rows.over(strips) as caches:
            for layer in self._read(depth + 1, deepest):
                source = layer - 1 if layer else depth % self._depth
                features = mx.stack([one[source] for one in outputs])[:, None]
                made[layer] = self._head.step(layer, features, [s.tokens for s in strips], caches[layer])
        rows.settle(strips, *made.values())
        return [{layer: out[b, 0] for layer, out in made.items()} for b in range(len(strips))]

    def _read(self, depth: int, deepest: int) -> list[int]:
        """Layers whose turn comes at `depth` or later, but before `deepest`: then they read all rows of guesses."""
        return [layer for layer in range(self._depth) if depth + (layer - depth) % self._depth < deepest]
