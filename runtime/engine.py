"""The engine: a prepared model, its pool of rows, and one forward over strips of conversations. Device thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from .decode.sampling import pick
from .decode.want import Pick, Want
from .models.layouts import ModelRows, model_rows
from .models.loaded import Loaded
from .numerics.blocks import install_swiglu
from .numerics.prepare import linear_shapes, prepare
from .numerics.probe import Numerics, plain, probe
from .rows.buffers import Pool
from .rows.caches import RoundRows, RowCache, Strip, install_attention
from .rows.layout import Layout

Array = Any
Exactness = tuple[Literal["exact", "not exact"], tuple[str, ...]]

KICK = 4
"""Layers between two hand-overs of a round's graph to the device: building it then runs beside computing it."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round found: for each strip the picks of its wanted rows, in order."""

    picks: tuple[tuple[Pick, ...], ...]


class Engine:
    """Runs rounds. `pool` is changed by the bank's orders; rounds write rows past the leaves' frontiers only."""

    def __init__(self, model: Any, rows: ModelRows, numerics: Numerics, context: int) -> None:
        self.model = model
        self.pool = Pool(rows.layout, rows.dtype)
        self._caches = [RowCache(i, layer.window, i % KICK == 0) for i, layer in enumerate(rows.layout.layers)]
        self._numerics = numerics
        self._shape = prepare(model, numerics.choose, context).shape

    @classmethod
    def open(cls, loaded: Loaded, *, context: int, stopwatch: Callable[[], float], fast: bool = False) -> Engine:
        """Prepares a loaded model in place and answers with its engine. Blocks for about a second.

        context: positions served at most. stopwatch: seconds of any monotonic clock, to choose among exact ways.
        fast: skip the search for exact arithmetic. ModelLoadError when the model's layers cannot be kept as rows.
        """
        install_attention()
        install_swiglu()
        rows = model_rows(loaded.model, loaded.id)
        body, heads = linear_shapes(loaded.model)
        numerics = plain("chosen by --fast") if fast else probe(body, heads, rows.attention)
        return cls(loaded.model, rows, numerics, context)

    @property
    def layout(self) -> Layout:
        return self.pool.layout

    @property
    def exactness(self) -> Exactness:
        """Whether a row's bits are independent of what runs beside it, and what is not."""
        return ("exact" if self._numerics.exact else "not exact"), self._numerics.reasons

    @property
    def numerics_mode(self) -> str:
        """Names the arithmetic that rows are computed with: part of what makes kept rows usable."""
        return self._numerics.mode

    def run(self, strips: Sequence[Strip], wants: Sequence[Want] = ()) -> RoundResult:
        """One round: evaluates every strip's tokens, writes their rows, picks at the wanted rows.

        wants: one per wanted row, strips in order and rows in order. The leaves' buffers are written in place and
        evaluated. AssertionError when rows do not fit a leaf: the bank reserved too few.
        """
        if sum(s.wanted for s in strips) != len(wants):
            raise AssertionError("one want for each wanted row")
        logits = self.forward(strips)
        if not wants:
            self.settle(strips)
            return RoundResult(((),) * len(strips))
        picked = pick(logits.astype(mx.float32), wants)
        self.settle(strips, *picked.arrays)
        picks = iter(picked.resolve())
        return RoundResult(tuple(tuple(next(picks) for _ in range(s.wanted)) for s in strips))

    def accept(self, strip: Strip, kept: int) -> None:
        """Keeps the first `kept` tokens of a strip of the last round. Rows past them are rewritten by the next round.

        Needed after a verify round; without it all tokens of a strip stay.
        """
        if not 0 < kept <= len(strip.tokens):
            raise AssertionError(f"{kept} of {len(strip.tokens)} tokens cannot be kept")

    def forward(self, strips: Sequence[Strip]) -> Array:
        """Lazy logits `[wanted rows, vocab]` of the strips' wanted rows in order; evaluate with `settle`."""
        now = RoundRows(strips, self.pool, self._numerics.tile)
        self._shape.wanted = mx.array(np.array(_wanted_rows(strips), dtype=np.int32))
        tokens = [t for s in strips for t in s.tokens]
        positions = now.positions()
        for cache in self._caches:
            cache.round, cache.offset = now, positions
        try:
            logits = self.model(mx.array(np.array(tokens, dtype=np.int32))[:, None], cache=self._caches)
        finally:
            for cache in self._caches:
                cache.round = None
        return logits.reshape(-1, logits.shape[-1])

    def settle(self, strips: Sequence[Strip], *outputs: Array) -> None:
        """Evaluates outputs and every buffer the strips wrote, so that no pending graph keeps a buffer shared."""
        mx.eval(*outputs, *(a for s in strips for a in self.pool.segments[s.chain.leaf].flat()))


def _wanted_rows(strips: Sequence[Strip]) -> list[int]:
    out: list[int] = []
    at = 0
    for s in strips:
        at += len(s.tokens)
        out += range(at - s.wanted, at)
    return out or [0]  # the head is lazy: a row nobody reads is never computed
