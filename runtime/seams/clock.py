"""Time, as a seam. Inside trio all monotonic times are trio times, so a mock clock moves everything at once."""

from __future__ import annotations

import math
import time
from typing import Protocol

import trio


class Clock(Protocol):
    """now: monotonic seconds, comparable with ask deadlines. wall: Unix seconds. Sleeps are checkpoints."""

    def now(self) -> float: ...
    def wall(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...
    async def sleep_until(self, deadline: float) -> None: ...


class _TrioClock:
    def now(self) -> float:
        """Trio's time on the trio thread; elsewhere the system's monotonic time, which has another origin."""
        try:
            return trio.current_time()
        except RuntimeError:
            return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Seconds below zero count as zero."""
        await trio.sleep(max(0.0, seconds))

    async def sleep_until(self, deadline: float) -> None:
        """Until `now()` reaches `deadline`; at once when it has passed, never when it is infinite."""
        if math.isinf(deadline) and deadline > 0:
            await trio.sleep_forever()
        await trio.sleep_until(deadline)


class RealClock(_TrioClock):
    """The machine's clocks."""

    def wall(self) -> float:
        return time.time()


class VirtualClock(_TrioClock):
    """Wall time that moves with trio's, for runs on a mock clock. epoch: Unix seconds at trio time 0.

    `jump` sets the wall clock forward or back, as an administrator or NTP would; `now` is not affected.
    """

    def __init__(self, epoch: float = 1_700_000_000.0) -> None:
        self._epoch = epoch

    def wall(self) -> float:
        return self._epoch + self.now()

    def jump(self, seconds: float) -> None:
        self._epoch += seconds
