"""Counts of what passes the doors, kept from the pieces themselves. Written by one event loop, read by `/metrics`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.turn import Finished, Piece, Queued, Reasoning, Started, Text, ToolCall

State = Literal["gone", "waiting", "running"]
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of histogram buckets, in seconds."""


@dataclass(slots=True)
class Histogram:
    """Counts per bucket of `BOUNDS` (the last is unbounded) and the sum of all values, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value


@dataclass(slots=True)
class Meter:
    """Totals since start. now: the clock that durations are taken from, in seconds."""

    now: Callable[[], float]
    running: int = 0
    waiting: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=Histogram)
    token_gap: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)

    def watch(self) -> Watch:
        return Watch(self, self.now())


@dataclass(slots=True)
class Watch:
    """One turn's passage through the doors, as a context: entering counts it as waiting, leaving ends all counts."""

    meter: Meter
    began: float
    state: State = "gone"
    last: float | None = None
    ended: bool = False

    def __enter__(self) -> Watch:
        self._move("waiting")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._move("gone")
        if not self.ended:
            self.meter.finished["abort"] += 1

    def saw(self, piece: Piece) -> None:
        match piece:
            case Queued():
                self._move("waiting")
            case Started():
                self._move("running")
            case Text() | Reasoning() | ToolCall():
                self._token()
            case Finished():
                self._finish(piece)

    def failed(self, error: OnecopyError) -> None:
        self.ended = True
        self.meter.failed[error.code] += 1

    def _token(self) -> None:
        now = self.meter.now()
        if self.last is None:
            self.meter.first_token.add(now - self.began)
        else:
            self.meter.token_gap.add(now - self.last)
        self.last = now

    def _finish(self, end: Finished) -> None:
        self.ended = True
        self.meter.finished[end.reason] += 1
        self.meter.whole.add(self.meter.now() - self.began)
        self.meter.totals.update(_amounts(end))

    def _move(self, state: State) -> None:
        self._count(self.state, -1)
        self._count(state, 1)
        self.state = state

    def _count(self, state: State, change: int) -> None:
        if state == "waiting":
            self.meter.waiting += change
        elif state == "running":
            self.meter.running += change


def _amounts(end: Finished) -> dict[str, int]:
    receipt, usage = end.receipt, end.usage
    return {
        "prompt_tokens": usage.prompt,
        "cached_tokens": usage.cached,
        "generation_tokens": usage.completion,
        "reasoning_tokens": usage.reasoning,
        "rows_adopted": receipt.rows_adopted,
        "rows_forked": receipt.rows_forked,
        "rows_restored": receipt.rows_restored,
        "rows_prefilled": receipt.rows_prefilled,
        "bytes_copied": receipt.bytes_copied,
        "bytes_written": receipt.bytes_written,
        "rounds": receipt.rounds,
        "compiled_rounds": receipt.compiled,
        "draft_tokens": receipt.drafted,
        "accepted_tokens": receipt.accepted,
    }
