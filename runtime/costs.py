"""What a round of each width costs on this machine, measured once at start-up. Device thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .decode.want import Want
from .rows.caches import Strip
from .rows.layout import BLOCK
from .rows.ops import Allocate, Chain, Drop, Link
from .turn import Sampling

WIDTHS = 8
"""Widest round: one committed token and seven drafts. Wider ones pay on no machine tried."""

_MEASURED = (1, 4, 8)
_REPEATS = 3
_SCRATCH = 0
"""Segment id used for the measurement; the bank's ids begin at 1."""


class Rounds(Protocol):
    """The part of an engine that is measured."""

    pool: Any

    def run(self, strips: Sequence[Strip], wants: Sequence[Want]) -> Any: ...


def width_costs(engine: Rounds, stopwatch: Callable[[], float]) -> tuple[float, ...]:
    """Cost of a round of width 1 to `WIDTHS`, relative to width 1, never falling. Takes about ten rounds."""
    engine.pool.apply((Allocate(_SCRATCH, 0, BLOCK),))
    best = {w: min(_seconds(engine, w, stopwatch) for _ in range(_REPEATS)) for w in _MEASURED}
    engine.pool.apply((Drop(_SCRATCH),))
    costs = [1.0]
    for w in range(2, WIDTHS + 1):
        below = max(m for m in _MEASURED if m < w)
        above = min(m for m in _MEASURED if m >= w)
        part = (w - below) / (above - below)
        seconds = best[below] + (best[above] - best[below]) * part
        costs.append(max(costs[-1], seconds / best[1]))
    return tuple(costs)


def _seconds(engine: Rounds, width: int, stopwatch: Callable[[], float]) -> float:
    strip = Strip(Chain((Link(_SCRATCH, 0, 0),), BLOCK), 0, (1,) * width, width)
    wants = [Want(Sampling(seed=0, temperature=0.0), i + 1) for i in range(width)]
    begun = stopwatch()
    engine.run([strip], wants)
    return stopwatch() - begun
