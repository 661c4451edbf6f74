"""The `Device` of a simulation: calls in order, delays and failures under a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class DeviceFault(Exception):
    """What a device raises when it fails."""


@dataclass(slots=True)
class DeviceFaults:
    """rng: draws delays. slow: seconds a call takes at most, mostly less. fail_run, fail_after: numbers of the `run`
    calls that fail before, or after, they did their work. hung: calls at most, past which a run counts as endless."""

    rng: random.Random
    slow: float = 0.0
    fail_run: frozenset[int] = frozenset()
    fail_after: frozenset[int] = frozenset()
    hung: int = 20_000


@dataclass(slots=True, eq=False)
class _Job:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    number: int = 0
    left: bool = False
    skipped: bool = False
    result: outcome.Outcome[Any] | None = field(default=None)


class SimDevice:
    """Everything runs in the order it was given, when virtual time allows; a post waits behind the calls before it.

    orphan: the call that runs now has nobody who waits for it any more.
    """

    def __init__(self, faults: DeviceFaults) -> None:
        self.faults = faults
        self.runs = self.posts = 0
        self.orphan = False
        self._jobs: deque[_Job] = deque()
        self._error: Exception | None = None

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.runs += 1
        if self.runs > self.faults.hung:
            raise RuntimeError("the simulation does not end")
        job = _Job(fn, args, self.runs)
        self._jobs.append(job)
        try:
            await self._take_time()
        except trio.Cancelled:
            # The waiter leaves at once; its call is skipped only if it has not begun.
            job.left, job.skipped = True, self.faults.rng.random() < 0.5
            raise
        self._advance(job)
        assert job.result is not None
        return job.result.unwrap()

    def begin(self, fn: Callable[[*Ts], T], *args: *Ts) -> Awaitable[T]:
        return self.run(fn, *args)

    def post(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        self.posts += 1
        self._jobs.append(_Job(fn, args))
        if len(self._jobs) == 1 and not self.faults.slow:
            self.finish()

    @property
    def failing(self) -> bool:
        """An order has failed, and no call has heard of it yet."""
        return self._error is not None

    def finish(self) -> None:
        """Does everything that waits."""
        while self._jobs:
            self._do(self._jobs.popleft())

    def statistics(self) -> dict[str, Any]:
        return {"runs": self.runs, "posts": self.posts}

    async def _take_time(self) -> None:
        if self.faults.slow and self.faults.rng.random() < 0.3:
            await trio.sleep(self.faults.slow * self.faults.rng.random())
        else:
            await trio.lowlevel.checkpoint()

    def _advance(self, job: _Job) -> None:
        while job.result is None:
            self._do(self._jobs.popleft())

    def _do(self, job: _Job) -> None:
        if job.skipped:
            return
        self.orphan = job.left
        if job.number == 0:
            result = outcome.capture(job.fn, *job.args)
            if isinstance(result, outcome.Error):
                self._error = self._error or result.error  # type: ignore[assignment]
            return
        error, self._error = self._error, None
        job.result = outcome.Error(error) if error is not None else self._call(job)

    def _call(self, job: _Job) -> outcome.Outcome[Any]:
        if job.number in self.faults.fail_run:
            return outcome.Error(DeviceFault(f"call {job.number} failed"))
        result = outcome.capture(job.fn, *job.args)
        return (
            outcome.Error(DeviceFault(f"call {job.number} failed late"))
            if job.number in self.faults.fail_after
            else result
        )
