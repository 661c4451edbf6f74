"""The runtime for plain code: the names of `onecopy.api`, over a thread that runs trio. Callable from any thread.

An interrupt (Ctrl-C) while waiting cancels what was waited for and returns when that has ended; `timeout` bounds a
turn. Where the others are awaited there is a method: `chat.send(…).answer()`, `runtime.spawn(…).results()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, overload

import trio
from onecopy.actors.service import Service, SessionInfo
from onecopy.runtime.errors import ActorStopped
from onecopy.runtime.turn import Piece

from .answer import Answer
from .bare import bare
from .bridge import PortalService
from .conversation import Conversation as TrioConversation
from .feed import Stream as TrioStream
from .portal import Opening, Portal, held
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
Run = Callable[["Conversation", P], R]


class Stream(Generic[T]):
    """Items as they come; `with` ends the work at its end, a loop that is left ends it soon."""

    def __init__(self, inner: TrioStream[Any], portal: Portal) -> None:
        self._stream = inner
        self._way = portal
        self._ready: deque[T] = deque()

    def next(self) -> list[T]:
        """Everything that is ready, at least one item; [] at the end."""
        try:
            return [self._shown(item) for item in self._way.call(self._stream.next)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the work and waits until nothing of it runs."""
        with suppress(ActorStopped):
            self._way.call(self._stream.close)

    def _shown(self, item: Any) -> T:
        found: T = item
        return found

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if not self._ready:
            self._ready.extend(self.next())
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Sent(SentView, Stream[Piece]):
    """One turn: `for piece in sent`, or `sent` for the whole answer."""

    def __init__(self, inner: TrioSent, portal: Portal) -> None:
        SentView.__init__(self, inner, portal)
        Stream.__init__(self, inner, portal)

    def answer(self) -> Answer:
        """The whole answer: the rest is read, and what was read before counts."""
        return self._portal.call(self._inner.answer)


class Spawn(Stream[Child["Conversation", P, R]]):
    """Children: `for` as they finish, `await` for all in the prompts' order."""

    def results(self) -> list[Child[Conversation, P, R]]:
        """Every child, in the prompts' order; what was read before is not repeated."""
        found = list(self)
        return sorted(found, key=lambda child: child.index)

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
        """Says something. Iterate over the result for typed pieces, it for the whole answer."""
        return Sent(self._inner.send(messages, tools=tools, timeout=timeout, **settings), self._portal)

    def fork(self, at: int | None = None) -> Conversation:
        """Another conversation that goes on from here; `at` reserves exactly so many rows now."""
        return Conversation(self._portal.call(self._inner.fork, at), self._portal)

    def info(self) -> SessionInfo:
        """The conversation as the bank sees it."""
        return self._portal.call(self._inner.info)

    def pin(self, on: bool = True) -> SessionInfo:
        """Keeps its rows in memory whatever else is wanted, or stops doing so."""
        return self._portal.call(self._inner.pin, on)

    def park(self) -> SessionInfo:
        """Writes its rows to disk and frees their memory."""
        return self._portal.call(self._inner.park)

    def drop(self) -> None:
        """Forgets its rows, and ends its turn. The messages stay."""
        self._portal.call(self._inner.drop)


class Runtime(RuntimeView):
    """A running system in this process, as `onecopy.api.Runtime`."""

    @classmethod
    @contextmanager
    def open(cls, model: str = "smollm2", **options: Unpack[OpenOptions]) -> Iterator[Runtime]:
        """Loads a model and runs it around the block, on a thread that has ended when the block has."""
        with cls._on(lambda: TrioRuntime.open(model, **options)) as made:
            yield made

    @classmethod
    @contextmanager
    def over(cls, service: Service) -> Iterator[Runtime]:
        """A runtime over a service whose methods are called on the trio thread only."""
        with cls._on(lambda: TrioRuntime.over(service)) as made:
            yield made

    @classmethod
    @contextmanager
    def _on(cls, opening: Opening[TrioRuntime]) -> Iterator[Runtime]:
        with held(opening) as (portal, inner):
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
        """A child of `parent` for each prompt. run: a function of (conversation, prompt), in a thread."""
        there = None if run is None else self._outside(run, max(1, limit or len(prompts)))
        made = self._inner.children(parent._inner, prompts, limit, on_error, there, settings)
        return Spawn(made, self._portal)

    def step(
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

        return self._portal.call(there)

    def status(self) -> Status:
        """The model, health, all conversations that have rows, and numbers."""
        return self._portal.call(self._inner.status)

    def _outside(self, run: Run[P, R], limit: int) -> TrioRun[P, R]:
        """`run` in a thread of its own. Threads cannot be cancelled; a child's calls fail instead, so `run` ends."""
        threads = trio.CapacityLimiter(limit)

        async def there(child: TrioConversation, prompt: P) -> R:
            returned = trio.Event()
            async with bare(trio.open_nursery()) as nursery:
                nursery.start_soon(_end_when_cancelled, child, returned)
                try:
                    return await trio.to_thread.run_sync(
                        run, Conversation(child, self._portal), prompt, limiter=threads
                    )
                finally:
                    returned.set()

        return there


async def _end_when_cancelled(child: TrioConversation, returned: trio.Event) -> None:
    try:
        await returned.wait()
    except trio.Cancelled:
        child.end()
        raise


__all__ = ["Conversation", "Runtime", "Sent", "Spawn"]
