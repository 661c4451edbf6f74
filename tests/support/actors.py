"""A small actor with one message of each kind, and a way to run one without a supervisor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import trio
import trio.testing
from onecopy.runtime.core import Actor, Ask, Message, Reply, handles
from onecopy.runtime.errors import Conflict


@dataclass(frozen=True, slots=True)
class Note(Message):
    """A tell that is written down."""

    text: str


@dataclass(frozen=True, slots=True)
class Urgent(Message):
    """A tell by the control queue."""

    control: ClassVar[bool] = True
    text: str


@dataclass(frozen=True, slots=True)
class Echo(Ask[str]):
    """Answered at once."""

    text: str


@dataclass(frozen=True, slots=True)
class Slow(Ask[str]):
    """Answered after `seconds`, in the actor's task."""

    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Later(Ask[int]):
    """Put aside, and answered when the batch is over."""


@dataclass(frozen=True, slots=True)
class Never(Ask[int]):
    """Put aside for good."""


@dataclass(frozen=True, slots=True)
class Refuse(Ask[int]):
    """Answered with a Conflict."""


@dataclass(frozen=True, slots=True)
class Crash(Ask[int]):
    """A bug."""


@dataclass(frozen=True, slots=True)
class CrashTold(Message):
    """A bug, in a tell. conflict: raised as an error that would have been an answer to an ask."""

    conflict: bool = False


@dataclass(frozen=True, slots=True)
class Unknown(Ask[int]):
    """Nobody handles this."""


class Clerk(Actor):
    """Writes down what it handles. `log` may be shared by several clerks."""

    def __init__(self, name: str = "clerk", log: list[str] | None = None, **sizes: int) -> None:
        super().__init__(name, **sizes)
        self.log: list[str] = log if log is not None else []
        self.aside: list[Reply[int]] = []
        self.kept: list[Reply[int]] = []

    async def start(self) -> None:
        self.log.append(f"{self.name} starts")

    async def stopping(self) -> None:
        self.log.append(f"{self.name} stops")

    async def after_batch(self) -> None:
        for reply in self.aside:
            reply.set(len(self.aside))
        self.aside.clear()

    @handles(Note)
    def note(self, message: Note) -> None:
        self.log.append(message.text)

    @handles(Urgent)
    async def urgent(self, message: Urgent) -> None:
        self.log.append(message.text)

    @handles(Echo)
    def echo(self, message: Echo, reply: Reply[str]) -> None:
        self.log.append(message.text)
        reply.set(message.text)

    @handles(Slow)
    async def slow(self, message: Slow, reply: Reply[str]) -> None:
        await trio.sleep(message.seconds)
        self.log.append(message.text)
        reply.set(message.text)

    @handles(Later)
    def later(self, message: Later, reply: Reply[int]) -> None:
        self.aside.append(reply)

    @handles(Never)
    def never(self, message: Never, reply: Reply[int]) -> None:
        self.kept.append(reply)

    @handles(Refuse)
    def refuse(self, message: Refuse, reply: Reply[int]) -> None:
        raise Conflict("not now")

    @handles(Crash)
    def crash(self, message: Crash, reply: Reply[int]) -> None:
        raise ZeroDivisionError("a bug")

    @handles(CrashTold)
    def crash_told(self, message: CrashTold) -> None:
        raise Conflict("nobody asked") if message.conflict else ZeroDivisionError("a bug")


A = TypeVar("A", bound=Actor)


@asynccontextmanager
async def living(actor: A) -> AsyncIterator[A]:
    """Runs `actor` around the body; a crash is swallowed here, a stop is orderly."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_live, actor)
        await trio.testing.wait_all_tasks_blocked()
        yield actor
        actor.stop()


async def _live(actor: Actor) -> None:
    try:
        await actor.live()
    except (ZeroDivisionError, Conflict):
        return


async def begin(nursery: trio.Nursery, *asks: Any, into: list[object] | None = None) -> None:
    """Starts asks one after the other, each sent before the next; their outcomes go to `into`."""
    for ask in asks:
        nursery.start_soon(collect, [] if into is None else into, ask)
        await trio.testing.wait_all_tasks_blocked()


async def collect(into: list[object], ask: Any) -> None:
    into.append(await outcome(ask))


async def outcome(ask: Any) -> object:
    """The answer of an ask, or the error it raised."""
    try:
        return await ask
    except Exception as error:
        return error
