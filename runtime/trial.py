"""A trial of a new engine: does the model, run on rows, answer as it does by itself, and are its rows' bits their own?

The first decides whether the model is served at all, the second what `exactness` says. Device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.errors import ModelLoadError

from .forward import Forward
from .models.layouts import PROBE_TOKENS
from .rows.attention import RowTile
from .rows.buffers import Pool
from .rows.layout import BLOCK
from .rows.ops import Allocate, Chain, Drop, Link
from .rows.plan import Strip

Array = Any
Host = np.ndarray[Any, Any]

FIRST = -2
"""Segment ids of the trial; the bank's begin at 1."""

NEAR, NEAR_HALF = 1e-3, 5e-2
"""How far logits may lie apart, as a part of the largest: in float32, and in half precision."""

STEPS = (1, 3, 4)
"""Lengths of the strips that the trial's tokens are fed in, beside all at once."""

MANY = 8
"""Strips beside each other: as many rows as experts are sorted from, which is another way to compute them."""


class Trial:
    """Plays the probe's tokens on scratch segments, alone and in company."""

    def __init__(self, forward: Forward, pool: Pool, tile: RowTile) -> None:
        self._forward, self._pool, self._tile = forward, pool, tile

    def run(self, name: str, wanted: Array) -> tuple[str, ...]:
        """Sentences about what is not exact. ModelLoadError when logits are not near `wanted [tokens, vocab]`."""
        whole, stepped = self._whole(name), self._in_steps()
        _compare(name, whole, wanted)
        _compare(name, stepped, wanted)
        return self._judged(whole, stepped)

    def exactness(self, name: str) -> tuple[str, ...]:
        """The same sentences without a comparison with the model alone, whose rows these are not."""
        return self._judged(self._whole(name), self._in_steps())

    def _whole(self, name: str) -> Host:
        try:
            return self._feed([PROBE_TOKENS])[0]
        except (TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError, NotImplementedError) as e:
            reason = " ".join(str(e).split())[:200]
            if "RowCache" in reason:
                reason = "its own code computes on cached keys and values, which stay where they are here"
            raise ModelLoadError(f"{name}: this architecture does not run on kept rows: {reason}") from e

    def _judged(self, whole: Host, stepped: Host) -> tuple[str, ...]:
        same = np.array_equal(stepped, whole)
        beside = self._feed([*[PROBE_TOKENS] * MANY, PROBE_TOKENS[:3], PROBE_TOKENS[:1]])
        alike = all(np.array_equal(rows, whole[: len(rows)]) for rows in beside)
        steps = () if same else ("rows computed in other steps have other bits",)
        return steps if alike else (*steps, "rows depend on what runs beside them")

    def _in_steps(self) -> Host:
        self._pool.apply((Allocate(FIRST, 0, BLOCK),))
        rows: list[Host] = []
        at = 0
        for n in STEPS:
            rows += self._round([(FIRST, at, PROBE_TOKENS[at : at + n])])
            at += n
        self._pool.apply((Drop(FIRST),))
        return np.concatenate(rows)

    def _feed(self, prompts: Sequence[tuple[int, ...]]) -> list[Host]:
        ids = [FIRST - i for i in range(len(prompts))]
        self._pool.apply(tuple(Allocate(i, 0, BLOCK) for i in ids))
        try:
            return self._round([(i, 0, tokens) for i, tokens in zip(ids, prompts, strict=True)])
        finally:
            self._pool.apply(tuple(Drop(i) for i in ids))

    def _round(self, work: Sequence[tuple[int, int, tuple[int, ...]]]) -> list[Host]:
        strips = [Strip(Chain((Link(s, 0, at),), BLOCK), at, tokens, len(tokens)) for s, at, tokens in work]
        logits = self._forward(strips, self._pool, self._tile).astype(mx.float32)
        mx.eval(logits, *(a for segment, _, _ in work for a in self._pool.segments[segment].flat()))
        return np.split(np.array(logits), np.cumsum([len(s.tokens) for s in strips])[:-1])


def _compare(name: str, found: Host, own: Array) -> None:
    """Rounding differs between two ways to compute one thing, but only by little."""
    wanted = np.array(own.astype(mx.float32))
    scale = float(np.abs(wanted).max()) + 1e-6
    worst = float(np.abs(found - wanted).max()) / scale if found.shape == wanted.shape else float("inf")
    if not worst < (NEAR if own.dtype == mx.float32 else NEAR_HALF):
        raise ModelLoadError(f"{name}: run on kept rows this architecture gives other answers than by itself.")
