"""The actor: one object, one mailbox, one task; handlers declared by message type."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, overload

import trio

from ..errors import ActorStopped, DeadlineExceeded, OnecopyError
from .mailbox import CONTROL_SIZE, WORK_SIZE, Mailbox
from .message import Ask, Envelope, Message
from .ref import Ref
from .reply import Reply

R = TypeVar("R")
S = TypeVar("S", bound="Actor")
M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Ask[Any])
T = TypeVar("T")
Handler = Callable[..., Any]


@overload
def handles(  # type: ignore[overload-overlap]
    kind: type[Ask[R]],
) -> Callable[[Callable[[S, A, Reply[R]], T]], Callable[[S, A, Reply[R]], T]]: ...
@overload
def handles(kind: type[M]) -> Callable[[Callable[[S, M], T]], Callable[[S, M], T]]: ...
def handles(kind: type[Message]) -> Callable[[Any], Any]:
    """Declares a method, sync or async, as the handler of messages of exactly this class.

    A handler of an ask gets (message, reply) and answers now or later; a handler of a tell gets (message).
    A OnecopyError raised for an ask is its answer. Every other exception is a bug and crashes the actor.
    """

    def mark(method: Handler) -> Handler:
        vars(method).setdefault("__handles__", []).append(kind)
        return method

    return mark


class Actor:
    """Base of all actors.

    Subclasses declare handlers with `@handles`, and may override the hooks `start`, `stopping`, `after_batch`,
    `statistics`, or `run` itself. State belongs to the actor's own task: nobody else touches it.
    From `start` on, `self.ref` is the stable address that survives a restart.
    """

    _handlers: ClassVar[dict[type[Message], str]] = {}

    def __init__(self, name: str, *, work_size: int = WORK_SIZE, control_size: int = CONTROL_SIZE) -> None:
        self.name = name
        self.mailbox = Mailbox(name, work_size, control_size)
        self.ref = Ref(name, self.mailbox)
        self._table: dict[type[Message], Handler] = {kind: getattr(self, to) for kind, to in self._handlers.items()}
        self._batch: deque[Envelope] = deque()
        self._in_hand: Envelope | None = None
        self._scope = trio.CancelScope()
        self._handled = self._skipped = self._failed = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {kind: name for name, method in vars(cls).items() for kind in getattr(method, "__handles__", ())}
        cls._handlers = {**cls._handlers, **own}

    async def start(self) -> None:
        """Before the first message. An error here is a failed start."""

    async def run(self) -> None:
        """The loop. Returning is a normal end; being cancelled after `stop` is the orderly one."""
        while True:
            await self.work(await self.mailbox.receive())

    async def after_batch(self) -> None:
        """After each batch: the place for group commit. Replies put aside by its handlers can be settled here."""

    async def stopping(self) -> None:
        """Orderly end, after the last message: settle what is owed, flush, say goodbye. Not called after a crash."""

    def statistics(self) -> dict[str, Any]:
        """What this object did (see `counts`) and its mailbox. Extend it with the actor's own figures."""
        return {**self.counts(), "mailbox": self.mailbox.statistics()}

    def counts(self) -> dict[str, int]:
        """handled (failed of them: asks answered with an error), skipped (nobody waited any more), dead letters.

        Once the actor has ended, accepted = handled + skipped + dead.
        """
        return {
            "accepted": self.mailbox.statistics()["accepted"],
            "handled": self._handled,
            "failed": self._failed,
            "skipped": self._skipped,
            "dead": sum(self.mailbox.dead.values()),
        }

    def stop(self) -> None:
        """Asks for an orderly end: accept nothing more, finish the batch in hand, then `stopping`. Does not wait."""
        self.mailbox.stop(self._scope.cancel)

    def kill(self) -> None:
        """Cancels `run` at its current checkpoint; `stopping` still follows."""
        self.mailbox.stop(self._scope.cancel)
        self._scope.cancel()

    async def live(self, started: Callable[[], None] = lambda: None) -> None:
        """The whole life: start, run, stopping, teardown. Raises what crashed it. The supervisor's business."""
        end = "stopped"
        try:
            await self.start()
            started()
            with self._scope:
                await self.run()
            self.mailbox.stop(self._scope.cancel)
            await self.stopping()
        except Exception:
            end = "crashed"
            raise
        finally:
            self._teardown(end)

    def _teardown(self, end: str) -> None:
        self.mailbox.dead[end] += self._in_hand is not None
        self._skipped += self.mailbox.bury(list(self._batch), end)
        self._skipped += self.mailbox.close(lambda: ActorStopped(f"{self.name} {end}.", retry_after=1.0))
        self._batch.clear()

    async def work(self, batch: list[Envelope]) -> None:
        """Dispatches a batch in order, letting control messages overtake, then `after_batch`."""
        self._batch.extend(batch)
        while self._batch:
            self._batch.extendleft(reversed(self.mailbox.control_nowait()))
            await self.dispatch(self._batch.popleft())
        await self.after_batch()

    async def dispatch(self, envelope: Envelope) -> None:
        """Handles one message, unless nobody waits for its answer any more."""
        message, reply = envelope.message, envelope.reply
        if reply is not None and self._skip(message, reply):
            return
        handler = self._table.get(type(message))
        if handler is None:
            self._unhandled(message, reply)
            return
        self._in_hand = envelope
        if reply is None:
            await self._call(handler, message)
        else:
            await self._answer(handler, message, reply)
        self._in_hand = None
        self._handled += 1

    async def _answer(self, handler: Handler, message: Message, reply: Reply[Any]) -> None:
        try:
            await self._call(handler, message, reply)
        except OnecopyError as error:
            self._failed += 1
            reply.fail(error)

    async def _call(self, handler: Handler, *args: Any) -> None:
        result = handler(*args)
        if result is not None and inspect.isawaitable(result):
            await result

    def _skip(self, message: Message, reply: Reply[Any]) -> bool:
        if not reply.done and reply.expired(trio.current_time()):
            reply.fail(DeadlineExceeded(f"{self.name} reached {type(message).__name__} after its deadline."))
        self._skipped += reply.done
        return reply.done

    def _unhandled(self, message: Message, reply: Reply[Any] | None) -> None:
        self.mailbox.dead["unhandled"] += 1
        if reply is not None:
            reply.fail(OnecopyError(f"{self.name} has no handler for {type(message).__name__}."))
