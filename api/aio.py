"""The runtime for programs under asyncio: the names of `onecopy.api`, over a thread that runs trio.

Cancelling a task cancels what it waits for and returns when that has ended; closing the runtime ends everything with
ActorStopped for whoever still waits. Every other error is raised here as it was raised there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, overload

import anyio
from onecopy.actors.service import Service, SessionInfo
from onecopy.runtime.errors import ActorStopped
from onecopy.runtime.turn import Piece

from .answer import Answer
from .bridge import PortalService
from .conversation import Conversation as TrioConversation
from .feed import Stream as TrioStream
from .portal import Opening, Portal, hosted
from .runtime import OpenOptions, Status
from .runtime import Runtime as TrioRuntime
from .sent import Sent as TrioSent
from .settings import Message, Prompt, Settings, Tools
from .spawn import Child, OnError
from .spawn import Run as TrioRun
from .step import Step, StepSettings
from .views import ConversationView, RuntimeView, SentView

T = TypeVar("T")
P = TypeVar("P")
R = TypeVar("R")
Run = Callable[["Conversation", P], Awaitable[R]]


class Stream(Generic[T]):
    """Items as they come; `async with` ends the work at its end, a loop that is left ends it soon."""

    def __init__(self, inner: TrioStream[Any], portal: Portal) -> None:
        self._stream = inner
        self._way = portal
        self._ready: deque[T] = deque()

    async def next(self) -> list[T]:
        """Everything that is ready, at least one item; [] at the end."""
        try:
            return [self._shown(item) for item in await self._way.acall(self._stream.next)]
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the work and waits until nothing of it runs."""
        with anyio.CancelScope(shield=True), suppress(ActorStopped):
            await self._way.acall(self._stream.close)

    def _shown(self, item: Any) -> T:
        found: T = item
        return found

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._ready:
            self._ready.extend(await self.next())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


class Sent(SentView, Stream[Piece]):
    """One turn: `async for piece in sent`, or `await sent` for the whole answer."""

    def __init__(self, inner: TrioSent, portal: Portal) -> None:
        SentView.__init__(self, inner, portal)
        Stream.__init__(self, inner, portal)

    async def answer(self) -> Answer:
        """The whole answer: the rest is read, and what was read before counts."""
        return await self._portal.acall(self._inner.answer)

    def __await__(self) -> Generator[Any, None, Answer]:
        return self.answer().__await__()


class Spawn(Stream[Child["Conversation", P, R]]):
    """Children: `async for` as they finish, `await` for all in the prompts' order."""

    async def results(self) -> list[Child[Conversation, P, R]]:
        """Every child, in the prompts' order; what was read before is not repeated."""
        found = [child async for child in self]
        return sorted(found, key=lambda child: child.index)

    def __await__(self) -> Generator[Any, None, list[Child[Conversation, P, R]]]:
        return self.results().__await__()

    def _shown(self, item: Any) -> Child[Conversation, P, R]:
        return Child(item.index, item.prompt, Conversation(item.chat, self._way), item.value, item.error)


class Conversation(ConversationView):
    """A conversation, as `onecopy.api.Conversation`."""

    def send(
        self,
        messages: Prompt = (),
        *,
        tools: Tools | None = None,
        timeout: float | None = None,
        **settings: Unpack[Settings],
    ) -> Sent:
        """Says something. Iterate over the result for typed pieces, await it for the whole answer."""
        return Sent(self._inner.send(messages, tools=tools, timeout=timeout, **settings), self._portal)

    async def fork(self, at: int | None = None) -> Conversation:
        """Another conversation that goes on from here; `at` reserves exactly so many rows now."""
        return Conversation(await self._portal.acall(self._inner.fork, at), self._portal)

    async def info(self) -> SessionInfo:
        """The conversation as the bank sees it."""
        return await self._portal.acall(self._inner.info)

    async def pin(self, on: bool = True) -> SessionInfo:
        """Keeps its rows in memory whatever else is wanted, or stops doing so."""
        return await self._portal.acall(self._inner.pin, on)

    async def park(self) -> SessionInfo:
        """Writes its rows to disk and frees their memory."""
        return await self._portal.acall(self._inner.park)

    async def drop(self) -> None:
        """Forgets its rows, and ends its turn. The messages stay."""
        await self._portal.acall(self._inner.drop)


class Runtime(RuntimeView):
    """A running system in this process, as `onecopy.api.Runtime`."""

    @classmethod
    @asynccontextmanager
    async def open(cls, model: str = "smollm2", **options: Unpack[OpenOptions]) -> AsyncIterator[Runtime]:
        """Loads a model and runs it around the block, on a thread that has ended when the block has."""
        async with cls._on(lambda: TrioRuntime.open(model, **options)) as made:
            yield made

    @classmethod
    @asynccontextmanager
    async def over(cls, service: Service) -> AsyncIterator[Runtime]:
        """A runtime over a service whose methods are called on the trio thread only."""
        async with cls._on(lambda: TrioRuntime.over(service)) as made:
            yield made

    @classmethod
    @asynccontextmanager
    async def _on(cls, opening: Opening[TrioRuntime]) -> AsyncIterator[Runtime]:
        async with hosted(opening) as (portal, inner):
            yield cls(inner, portal)

    @property
    def service(self) -> Service:
        """What the doors run on, for this event loop: `create_app(runtime.service)`."""
        return PortalService(self._inner, self._portal)

    def conversation(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Message] = (),
        tools: Tools = (),
        **defaults: Unpack[Settings],
    ) -> Conversation:
        """A new conversation. Nothing is computed until something is sent."""
        made = self._inner.conversation(system, messages=messages, tools=tools, **defaults)
        return Conversation(made, self._portal)

    @overload
    def spawn(
        self,
        parent: Conversation,
        prompts: Sequence[Prompt],
        *,
        limit: int | None = None,
        on_error: OnError = "raise",
        run: None = None,
        **settings: Unpack[Settings],
    ) -> Spawn[Prompt, Answer]: ...

    @overload
    def spawn(
        self,
        parent: Conversation,
        prompts: Sequence[P],
        *,
        limit: int | None = None,
        on_error: OnError = "raise",
        run: Run[P, R],
    ) -> Spawn[P, R]: ...

    def spawn(
        self,
        parent: Conversation,
        prompts: Sequence[Any],
        *,
        limit: int | None = None,
        on_error: OnError = "raise",
        run: Run[Any, Any] | None = None,
        **settings: Unpack[Settings],
    ) -> Spawn[Any, Any]:
        """A child of `parent` for each prompt. run: an async function of (conversation, prompt), run on this loop."""
        there = None if run is None else self._outside(run)
        made = self._inner.children(parent._inner, prompts, limit, on_error, there, settings)
        return Spawn(made, self._portal)

    async def step(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        logprobs: int | None = None,
        choices: Sequence[str] | None = None,
        timeout: float | None = None,
        **settings: Unpack[StepSettings],
    ) -> Step:
        """The next tokens after a text or token ids; no template, no tools."""

        async def there() -> Step:
            return await self._inner.step(
                prompt, max_tokens=max_tokens, logprobs=logprobs, choices=choices, timeout=timeout, **settings
            )

        return await self._portal.acall(there)

    async def status(self) -> Status:
        """The model, health, all conversations that have rows, and numbers."""
        return await self._portal.acall(self._inner.status)

    def _outside(self, run: Run[P, R]) -> TrioRun[P, R]:
        async def there(child: TrioConversation, prompt: P) -> R:
            return await self._portal.out(run, Conversation(child, self._portal), prompt)

        return there


__all__ = ["Conversation", "Runtime", "Sent", "Spawn"]
