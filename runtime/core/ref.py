"""Refs: the only way to reach an actor. A ref is stable: after a restart it points to the new object's mailbox."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import trio

from ..errors import ActorStopped, DeadlineExceeded
from .mailbox import Mailbox
from .message import Ask, Envelope, Message
from .reply import Reply

R = TypeVar("R")


class Ref:
    """An address. `tell` and `ask` may be called from any task of the trio thread, never from another thread.

    dead: messages sent here that nobody handled, by reason, over all the objects this ref has pointed to.
    """

    __slots__ = ("_dead", "_mailbox", "name")

    def __init__(self, name: str, mailbox: Mailbox | None = None) -> None:
        self.name = name
        self._mailbox = mailbox
        self._dead: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Ref {self.name} {'up' if self.alive else 'down'}>"

    @property
    def alive(self) -> bool:
        """An actor object is accepting messages now."""
        return self._mailbox is not None and self._mailbox.open

    @property
    def dead(self) -> Counter[str]:
        return self._dead + self._mailbox.dead if self._mailbox else Counter(self._dead)

    def point(self, mailbox: Mailbox) -> None:
        """Directs this ref to a new object's mailbox. The supervisor's business."""
        if self._mailbox is not None and self._mailbox is not mailbox:
            self._dead += self._mailbox.dead
        self._mailbox = mailbox

    def tell(self, message: Message) -> bool:
        """Sends without waiting. Raises Overloaded when the mailbox is full.

        False: the actor is down and the message became a dead letter ("down"); nobody is left to be told twice.
        """
        if not self.alive:
            self._dead["down"] += 1
            return False
        self._up().put(Envelope(message))
        return True

    async def ask(self, message: Ask[R], deadline: float | None = None) -> R:
        """Sends and waits for the answer.

        deadline: absolute trio time in seconds. Raises what the actor answered, DeadlineExceeded, Overloaded at once
        when the mailbox is full, ActorStopped when the actor is down, stops or crashes before it answers.
        An answer that was accepted is returned even when a cancellation is pending: the caller owns it from there.
        """
        reply: Reply[R] = Reply(deadline)
        if deadline is None:
            self._up().put(Envelope(message, reply))
            return await reply.wait()
        if reply.expired(trio.current_time()):
            raise self._late(message)
        self._up().put(Envelope(message, reply))
        with trio.CancelScope(deadline=deadline):
            return await reply.wait()
        raise self._late(message)

    def _up(self) -> Mailbox:
        if self._mailbox is None:
            raise ActorStopped(f"{self.name} is not running.", retry_after=1.0)
        return self._mailbox

    def _late(self, message: Message) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.name} did not answer {type(message).__name__} before its deadline.")
