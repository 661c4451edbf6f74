"""What a round of each width costs on this machine, measured once at start-up. Device thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from .decode.drafts import Prices
from .decode.want import Want
from .rows.caches import Strip
from .rows.layout import BLOCK, Layout
from .rows.ops import Allocate, Chain, Drop, Link
from .turn import Sampling

WIDTHS = 8
"""Widest round: one committed token and seven drafts. Wider ones pay on no machine tried, but a block drafter that was
trained for more may have them."""

WIDEST = 16

_MEASURED = (1, 4, 8, 16)
_REPEATS = 3
_SCRATCH = 0
"""Segment id used for the measurement; the bank's ids begin at 1."""


class Rounds(Protocol):
    """The part of an engine that is measured."""

    pool: Any
    drafter: Any
    fixed_rows: int

    @property
    def layout(self) -> Layout: ...

    def run(self, strips: Sequence[Strip], wants: Sequence[Want]) -> Any: ...

    def accept(self, kept: Sequence[tuple[Strip, int]]) -> None: ...


def prices(engine: Rounds, stopwatch: Callable[[], float]) -> Prices:
    """What drafting costs here, relative to a round of width 1. Takes about ten rounds."""
    widths, unit = _widths(engine, stopwatch)
    again = _again(engine, stopwatch) / unit if engine.layout.recurrent else 0.0
    ahead, drafter = tuple(s / unit for s in _ahead(engine, stopwatch)), engine.drafter
    return Prices(widths, again) if drafter is None else Prices(widths, again, ahead, drafter.name, drafter.mark)


def _ahead(engine: Rounds, stopwatch: Callable[[], float]) -> list[float]:
    """Seconds that the device takes to propose 1, 2, … tokens at the end of a round; none when it cannot."""
    deepest = 0 if engine.drafter is None else engine.drafter.deepest
    if not deepest:
        return []
    with _scratch(engine):
        none, one, all_ = (
            min(_seconds(engine, 1, stopwatch, draft) for _ in range(_REPEATS)) for draft in (0, 1, deepest)
        )
    each = max(0.0, all_ - one) / max(1, deepest - 1)
    return [max(0.0, one - none) + each * more for more in range(deepest)]


def _again(engine: Rounds, stopwatch: Callable[[], float]) -> float:
    """Seconds to keep half of a round of a recurrent model."""
    strip, wants = _round(4)

    def kept() -> float:
        engine.run([strip], wants)
        begun = stopwatch()
        engine.accept([(strip, 2)])
        return stopwatch() - begun

    with _scratch(engine):
        return min(kept() for _ in range(_REPEATS))


def _widths(engine: Rounds, stopwatch: Callable[[], float]) -> tuple[tuple[float, ...], float]:
    """Cost of a round of each width, relative to width 1, never falling; and the seconds of width 1."""
    deepest = 0 if engine.drafter is None else engine.drafter.deepest
    widest = min(WIDEST, max(WIDTHS, deepest + 1))
    measured = [w for w in _MEASURED if w < widest] + [widest]
    with _scratch(engine):
        best = {w: min(_seconds(engine, w, stopwatch) for _ in range(_REPEATS)) for w in measured}
    costs = [1.0]
    for w in range(2, widest + 1):
        below = max(m for m in measured if m < w)
        above = min(m for m in measured if m >= w)
        part = (w - below) / (above - below)
        seconds = best[below] + (best[above] - best[below]) * part
        costs.append(max(costs[-1], seconds / best[1]))
    return tuple(costs), best[1]


def _seconds(engine: Rounds, width: int, stopwatch: Callable[[], float], draft: int = 0) -> float:
    strip, wants = _round(width, draft)
    begun = stopwatch()
    engine.run([strip], wants)
    return stopwatch() - begun


def _round(width: int, draft: int = 0) -> tuple[Strip, list[Want]]:
    strip = Strip(Chain((Link(_SCRATCH, 0, 0),), BLOCK), 0, (1,) * width, width, draft=draft)
    return strip, [Want(Sampling(seed=0, temperature=0.0), i + 1) for i in range(width)]


@contextmanager
def _scratch(engine: Rounds) -> Iterator[None]:
    """The scratch segment exists in the block, at a size at which rounds are compiled if they ever are."""
    engine.pool.apply((Allocate(_SCRATCH, 0, engine.fixed_rows or BLOCK),))
    try:
        yield
    finally:
        engine.pool.apply((Drop(_SCRATCH),))
