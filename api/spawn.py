"""Subagents: one conversation's forks at work side by side, their results read as they finish."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import trio

from .conversation import Conversation
from .feed import Feed, Put, Stream

P = TypeVar("P")
R = TypeVar("R")
C = TypeVar("C")
OnError = Literal["raise", "collect"]
Run = Callable[[Conversation, P], Awaitable[R]]
Start = Callable[[Callable[[Put["Child[Conversation, P, R]"]], Awaitable[None]]], Feed["Child[Conversation, P, R]"]]


@dataclass(frozen=True, slots=True)
class Child(Generic[C, P, R]):
    """A child that has ended. chat: its conversation, which lives on. error: why there is no value, when collected."""

    index: int
    prompt: P
    chat: C
    value: R | None = None
    error: Exception | None = None

    @property
    def result(self) -> R:
        """What the child made; raises its error when it failed."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


class Spawn(Stream[Child[Conversation, P, R]]):
    """Children of one conversation. `async for` reads them as they finish; `await` gives all, in the prompts' order.

    All of them end with it: leaving an `async with` or a loop, an error and a cancellation end every child.
    on_error "raise": the first error ends the others and is raised; "collect": a child's error is its result.
    """

    def __init__(
        self,
        start: Start[P, R],
        parent: Conversation,
        prompts: Sequence[P],
        run: Run[P, R],
        *,
        limit: int | None,
        on_error: OnError,
    ) -> None:
        super().__init__()
        self._start = start
        self._parent = parent
        self._prompts = list(prompts)
        self._run = run
        self._limit = max(1, limit or len(self._prompts))
        self._collect = on_error == "collect"

    async def results(self) -> list[Child[Conversation, P, R]]:
        """Every child, in the prompts' order; what was read before is not repeated. `await spawn` is the same."""
        found = [child async for child in self]
        return sorted(found, key=lambda child: child.index)

    def __await__(self) -> Generator[object, None, list[Child[Conversation, P, R]]]:
        return self.results().__await__()

    async def _open(self) -> Feed[Child[Conversation, P, R]]:
        chats = [await self._parent.fork() for _ in self._prompts]
        prompts, run, collect, limit = self._prompts, self._run, self._collect, self._limit

        async def work(put: Put[Child[Conversation, P, R]]) -> None:
            room = trio.Semaphore(limit)
            try:
                async with trio.open_nursery() as nursery:
                    for index, (chat, prompt) in enumerate(zip(chats, prompts, strict=True)):
                        await room.acquire()
                        nursery.start_soon(_one, index, prompt, chat, run, collect, room, put)
            except ExceptionGroup as group:
                raise _first(group) from (group if len(group.exceptions) > 1 else None)

        return self._start(work)


async def _one(
    index: int,
    prompt: P,
    chat: Conversation,
    run: Run[P, R],
    collect: bool,
    room: trio.Semaphore,
    put: Put[Child[Conversation, P, R]],
) -> None:
    """One child, from its fork to its result."""
    child: Child[Conversation, P, R]
    try:
        child = Child(index, prompt, chat, await run(chat, prompt))
    except Exception as error:
        if not collect:
            raise
        child = Child(index, prompt, chat, error=error)
    finally:
        room.release()
    await put(child)


def _first(group: ExceptionGroup[Exception]) -> Exception:
    found: Exception = group
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    return found


__all__ = ["Child", "OnError", "Run", "Spawn"]
