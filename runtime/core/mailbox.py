"""The mailbox: two bounded queues, control drained before work; full means an immediate `Overloaded`.

A mailbox owes every ask it accepted until that ask is settled, wherever the envelope is by then: queued, in the
actor's hand, or put aside for a later answer. Closing it fails them all, so no asker can hang.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import trio

from ..errors import ActorStopped, Overloaded
from .message import Envelope
from .reply import Reply

WORK_SIZE = 1024
CONTROL_SIZE = 256


class Mailbox:
    """Where one actor object receives. Only the actor's own task may receive; anyone on the trio thread may put.

    work_size, control_size: messages at most in each queue. dead: messages nobody handled, counted by reason.
    """

    def __init__(self, name: str, work_size: int = WORK_SIZE, control_size: int = CONTROL_SIZE) -> None:
        self.name = name
        self.dead: Counter[str] = Counter()
        self._work: deque[Envelope] = deque()
        self._control: deque[Envelope] = deque()
        self._sizes = {False: work_size, True: control_size}
        self._owed: dict[Reply[Any], None] = {}
        self._waiter: trio.lowlevel.Task | None = None
        self._open = True
        self._on_stop: Callable[[], None] | None = None
        self._accepted = self._refused = 0

    @property
    def open(self) -> bool:
        """Accepting messages."""
        return self._open

    @property
    def depth(self) -> int:
        """Messages queued, control and work."""
        return len(self._control) + len(self._work)

    def put(self, envelope: Envelope) -> None:
        """Queues and wakes the actor. Raises ActorStopped when closed, Overloaded when full unless it is `due`."""
        if not self._open:
            raise ActorStopped(f"{self.name} has stopped.", retry_after=1.0)
        control = envelope.message.control
        queue = self._control if control else self._work
        if len(queue) >= self._sizes[control] and not envelope.message.due:
            self._refused += 1
            raise Overloaded(f"{self.name} has {len(queue)} messages waiting and takes no more.", retry_after=1.0)
        queue.append(envelope)
        self._accepted += 1
        if envelope.reply is not None:
            envelope.reply.owed(self._owed)
        self._wake()

    async def receive(self, limit: int | None = None) -> list[Envelope]:
        """Waits for at least one message and takes all that are queued, control first; at most `limit`.

        Always a checkpoint. Once the actor was asked to stop, this is where its `run` ends (by cancellation).
        """
        self._end_when_stopping()
        if self.depth:
            await trio.lowlevel.checkpoint()
        while not self.depth:
            await self._park()
        return self.receive_nowait(limit)

    def receive_nowait(self, limit: int | None = None) -> list[Envelope]:
        """Takes what is queued, control first, possibly nothing; at most `limit`. For actors with their own loop.

        Once the actor was asked to stop it takes nothing, and `run` is cancelled at its next checkpoint.
        """
        if self._end_when_stopping():
            return []
        wanted = self.depth if limit is None else min(limit, self.depth)
        return [self._next().popleft() for _ in range(wanted)]

    def control_nowait(self) -> list[Envelope]:
        """Takes the control queue only. Lets control overtake a batch of work that is already in hand."""
        batch = list(self._control)
        self._control.clear()
        return batch

    def stop(self, end: Callable[[], None]) -> None:
        """Stops accepting. `end` is called when the actor next receives, or now when it waits for a message."""
        self._open = False
        self._on_stop = end
        if self._waiter is not None:
            end()

    def close(self, error: Callable[[], BaseException]) -> int:
        """Stops accepting, buries what is queued as "stopped", and fails every reply still owed with `error()`.

        Returns what `bury` returns.
        """
        self._open = False
        deserted = self.bury([*self._control, *self._work], "stopped")
        self._control.clear()
        self._work.clear()
        for reply in list(self._owed):
            reply.fail(error())
        return deserted

    def bury(self, envelopes: list[Envelope], reason: str) -> int:
        """Counts messages that will not be handled as dead letters. Returns how many were not: their askers left."""
        deserted = sum(envelope.reply is not None and envelope.reply.done for envelope in envelopes)
        self.dead[reason] += len(envelopes) - deserted
        return deserted

    def statistics(self) -> dict[str, int]:
        """control, work: queued now. owed: asks not settled yet. accepted, refused (full): since the start."""
        return {
            "control": len(self._control),
            "work": len(self._work),
            "owed": len(self._owed),
            "accepted": self._accepted,
            "refused": self._refused,
        }

    def _next(self) -> deque[Envelope]:
        return self._control or self._work

    def _end_when_stopping(self) -> bool:
        if self._on_stop is not None:
            self._on_stop()
        return self._on_stop is not None

    def _wake(self) -> None:
        if self._waiter is not None:
            trio.lowlevel.reschedule(self._waiter)
            self._waiter = None

    async def _park(self) -> None:
        if self._waiter is not None:
            raise trio.BusyResourceError(f"{self.name} receives in two tasks")
        self._waiter = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._waiter = None
        return trio.lowlevel.Abort.SUCCEEDED
