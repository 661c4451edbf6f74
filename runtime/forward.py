"""One forward of a prepared model over strips of conversations. Device thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from .models.layouts import Tree
from .models.replay import tape_of
from .numerics.linear import RoundShape
from .rows.attention import RowTile
from .rows.buffers import Pool
from .rows.caches import RowCache
from .rows.indexed import IndexedCache
from .rows.layout import LayerLayout, Layout
from .rows.plan import RoundRows, Strip
from .rows.states import History, NamedStates, Specs, State, StateCache, state_cache

Array = Any
LayerCache = RowCache | IndexedCache | StateCache


class Forward:
    """Calls the model. Where rows are all there is, every row is a batch entry of its own, whatever strip it is from.

    A recurrent layer needs a strip's rows in sequence: then strips of equal length share a call of `[strips, length]`.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        tree: tuple[Tree, ...],
        states: tuple[Specs, ...],
        shape: RoundShape,
        tap: Callable[[], Array] | None = None,
    ) -> None:
        """tap: what the model's last call showed to a drafter, `[batch, length, …]`."""
        self._model = model
        self._shape = shape
        self._caches = [_cache(i, layer, states[i]) for i, layer in enumerate(layout.layers)]
        self._rows = [c for c in self._caches if not isinstance(c, StateCache)]
        self._states = [c for c in self._caches if isinstance(c, StateCache)]
        self._given = [_grown(part, self._caches) for part in tree]
        self._tape = tape_of(model, len(self._states))
        self._tap = tap
        self._seen: dict[int, Array] = {}
        self._histories: dict[int, dict[int, History]] = {}

    @property
    def recurrent(self) -> bool:
        return bool(self._states)

    @property
    def shows(self) -> bool:
        """Whether a round shows something to a drafter."""
        return self._tap is not None

    def __call__(self, strips: Sequence[Strip], pool: Pool, tile: RowTile) -> Array:
        """Lazy logits `[wanted rows, vocab]`, strips and rows in order (one meaningless row if none is wanted).

        Puts the strips' rows and states into the pool's segments, lazily too.
        """
        self._seen.clear()
        self._histories.clear()
        if not self.recurrent:
            return self._part(list(range(len(strips))), strips, pool, tile, 1)
        groups = _by_length(strips)
        parts = [self._part(g, strips, pool, tile, len(strips[g[0]].tokens)) for g in groups]
        return _in_order(parts, strips, groups)

    def features(self) -> list[Array]:
        """What the last forward showed to a drafter, for each strip `[rows, …]`, lazy. Forgotten here."""
        seen, self._seen = self._seen, {}
        return [seen[i] for i in range(len(seen))]

    def _part(self, group: list[int], strips: Sequence[Strip], pool: Pool, tile: RowTile, length: int) -> Array:
        """The logits of some of the strips, which are computed together."""
        part = [strips[i] for i in group]
        logits = self._call(part, pool, tile, length)
        if self._tap is not None:
            rows, at = _flat(self._tap()), 0
            for i, strip in zip(group, part, strict=True):
                self._seen[i] = rows[at : at + len(strip.tokens)]
                at += len(strip.tokens)
        return logits

    def _call(self, strips: Sequence[Strip], pool: Pool, tile: RowTile, length: int) -> Array:
        now = RoundRows(strips, pool, tile, pool.streams)
        wanted = mx.array(np.array(_wanted_rows(strips), dtype=np.int32))
        return self._run(now, self.tokens(strips, length), wanted, length)

    def tokens(self, strips: Sequence[Strip], length: int = 1) -> Array:
        """The strips' tokens as the model takes them."""
        ids = mx.array(np.array([t for s in strips for t in s.tokens], dtype=np.int32))
        return ids if self._shape.flat else ids.reshape(-1, length)

    def traced(self, now: RoundRows, tokens: Array, wanted: Array) -> list[Array]:
        """Lazy logits of the wanted rows of a round that is part of a graph, and what it shows to a drafter."""
        logits = self._run(now, tokens, wanted, 1)
        return [logits] if self._tap is None else [logits, _flat(self._tap())]

    def show(self, features: Sequence[Array]) -> None:
        """Sets what `features` answers with, after a round that was no call of this."""
        self._seen = dict(enumerate(features))

    def _run(self, now: RoundRows, tokens: Array, wanted: Array, length: int) -> Array:
        verified = any(s.wanted > 1 for s in now.strips)
        self._enter(now, length, verified)
        self._shape.wanted, self._shape.taken = wanted, False
        try:
            with self._tape.listening() if self._tape is not None and verified else nullcontext():
                logits = self._model(tokens, cache=self._given)
        finally:
            self._shape.wanted = None
            for cache in self._rows:
                cache.round = None
        self._leave(now, verified)
        logits = logits.reshape(-1, logits.shape[-1])
        return logits if self._shape.taken else logits[wanted]

    def _enter(self, now: RoundRows, length: int, verified: bool) -> None:
        positions = now.positions()
        starts = positions if length == 1 else now.starts()
        for rows in self._rows:
            rows.round, rows.positions, rows.offset = now, positions, starts
        for state in self._states:
            state.offset, state.length, state.trail = starts, length, verified
            state.load([now.pool.state(s.chain, state.layer) for s in now.strips])

    def _leave(self, now: RoundRows, verified: bool) -> None:
        if self._tape is not None and verified:
            for cache, trails in zip(self._states, self._tape.take(), strict=True):
                self._note(cache, now, [History(trails, len(cache.specs), b) for b in range(len(now.strips))])
        for cache in self._states:
            states = self._remember(cache, now) if isinstance(cache, NamedStates) and cache.trail else cache.unload()
            for s, state in zip(now.strips, states, strict=True):
                now.pool.segments[s.chain.leaf].layers[cache.layer].state = state

    def _remember(self, cache: NamedStates, now: RoundRows) -> list[State]:
        histories = cache.histories()
        self._note(cache, now, histories)
        return [history.after(cache.length) for history in histories]

    def _note(self, cache: StateCache, now: RoundRows, histories: Sequence[History]) -> None:
        for s, history in zip(now.strips, histories, strict=True):
            self._histories.setdefault(s.chain.leaf, {})[cache.layer] = history

    def take_back(self, strip: Strip, kept: int, pool: Pool) -> bool:
        """Puts the states of a strip of the last forward to what they were after its first `kept` rows, lazily.

        False when its layers cannot tell: then they are as before.
        """
        found = self._histories.get(strip.chain.leaf, {})
        if len(found) < len(self._states):
            return False
        for layer, history in found.items():
            pool.segments[strip.chain.leaf].layers[layer].state = history.after(kept)
        return True


def _flat(shown: Array) -> Array:
    """`[batch, length, width]` as `[rows, width]`."""
    return shown.reshape(-1, shown.shape[-1])


def _cache(i: int, layer: LayerLayout, states: Specs) -> LayerCache:
    if layer.kind == "recurrent":
        return state_cache(i, states)
    return IndexedCache(i, layer.ratio) if layer.kind == "qsa" else RowCache(i, layer.window)


def _grown(part: Tree, caches: Sequence[LayerCache]) -> Any:
    return caches[part] if isinstance(part, int) else tuple(_grown(p, caches) for p in part)


def _wanted_rows(strips: Sequence[Strip]) -> list[int]:
    out: list[int] = []
    at = 0
    for s in strips:
        at += len(s.tokens)
        out += range(at - s.wanted, at)
    return out or [0]  # the head is lazy: a row nobody reads is never computed


def _by_length(strips: Sequence[Strip]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, s in enumerate(strips):
        groups.setdefault(len(s.tokens), []).append(i)
    return list(groups.values())


def _in_order(parts: list[Array], strips: Sequence[Strip], groups: list[list[int]]) -> Array:
    """The wanted rows of all groups in the order of the strips."""
    if len(parts) == 1:
        return parts[0]
    rows = [(i, row) for group in groups for i in group for row in range(strips[i].wanted)]
    kept = [part for part, g in zip(parts, groups, strict=True) if any(strips[i].wanted for i in g)] or parts[:1]
    joined = kept[0] if len(kept) == 1 else mx.concatenate(kept)
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return joined if order == list(range(len(rows))) else joined[mx.array(order)]
