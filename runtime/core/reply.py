"""One-shot replies: a slot, and the one task that waits for it.

Whether an answer is received is decided at one instant. `set` and `fail` return True when the asker will receive the
answer, and False when it has left; an asker whose answer was accepted is no longer cancelled out of it. So an actor
that hands out something to be given back can tell, without a race, who holds it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Generic, TypeVar, cast

import trio

R = TypeVar("R")


class _State(Enum):
    OPEN = "open"
    ANSWERED = "answered"
    FAILED = "failed"
    ABANDONED = "abandoned"


class Reply(Generic[R]):
    """The answer to one ask.

    deadline: absolute trio time in seconds after which nobody waits any more; None for never.
    """

    __slots__ = ("_ledger", "_slot", "_state", "_waiter", "deadline")

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self._state = _State.OPEN
        self._slot: R | BaseException | None = None
        self._waiter: trio.lowlevel.Task | None = None
        self._ledger: dict[Reply[Any], None] | None = None

    @property
    def done(self) -> bool:
        """Settled: answered, failed or abandoned."""
        return self._state is not _State.OPEN

    @property
    def abandoned(self) -> bool:
        """The asker left, by cancellation or deadline, before an answer came."""
        return self._state is _State.ABANDONED

    def expired(self, now: float) -> bool:
        """The deadline has passed at `now` (trio time), whether or not the asker has noticed."""
        return self.deadline is not None and self.deadline <= now

    def set(self, value: R) -> bool:
        """Answers. False: the asker has left (or was answered before) and `value` is still the caller's."""
        return self._settle(_State.ANSWERED, value)

    def fail(self, error: BaseException) -> bool:
        """Answers with an error, raised where the ask waits. False as for `set`."""
        return self._settle(_State.FAILED, error)

    def owed(self, ledger: dict[Reply[Any], None]) -> None:
        """Enters this reply in `ledger`, where it stays until it is settled. Mutates `ledger`."""
        ledger[self] = None
        self._ledger = ledger

    async def wait(self) -> R:
        """The answer, or its error raised. Cancelled while open, the reply becomes abandoned. One waiter only."""
        if self._state is _State.OPEN:
            await self._park()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
        if self._state is _State.FAILED:
            raise cast(BaseException, self._slot)
        return cast(R, self._slot)

    async def _park(self) -> None:
        if self._waiter is not None:
            raise trio.BusyResourceError("a reply has one waiter")
        self._waiter = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._waiter = None
        self._settle(_State.ABANDONED, None)
        return trio.lowlevel.Abort.SUCCEEDED

    def _settle(self, state: _State, slot: R | BaseException | None) -> bool:
        if self._state is not _State.OPEN:
            return False
        self._state, self._slot = state, slot
        if self._ledger is not None:
            self._ledger.pop(self, None)
        if self._waiter is not None:
            trio.lowlevel.reschedule(self._waiter)
            self._waiter = None
        return True
