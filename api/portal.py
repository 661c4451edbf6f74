"""A thread that runs trio, called from plain code and from other event loops, with cancellation in both directions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from threading import Event
from typing import Generic, TypeVar, TypeVarTuple, Unpack

import anyio
import trio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from onecopy.runtime.errors import ActorStopped

from .bare import bare

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Opening = Callable[[], AbstractAsyncContextManager[T]]

NAME = "onecopy"
"""The thread's name, for debuggers and for whoever counts threads."""


class Portal:
    """Ways into the trio thread, and out of it. Made by `held` and `hosted`.

    back: the loop the portal was opened from, for calls out of the trio thread; None for plain code.
    """

    def __init__(self, inner: BlockingPortal, back: BlockingPortal | None = None) -> None:
        self._inner = inner
        self._back = back

    def call(self, function: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> T:
        """Runs an async function on the trio thread and waits in this one. An interrupt cancels it and waits."""
        ended = Event()

        async def run() -> T:
            try:
                return await function(*args)
            finally:
                ended.set()

        with _stopped():
            future: Future[T] = self._inner.start_task_soon(run)
            try:
                return future.result()
            finally:
                if future.cancel():
                    ended.wait()

    async def acall(self, function: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> T:
        """Runs an async function on the trio thread; a cancelled caller cancels it and waits for its end."""
        with _stopped():
            return await self._inner.call_async(function, *args)

    async def out(self, function: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> T:
        """From the trio thread: runs an async function on the loop the portal was opened from."""
        assert self._back is not None, "plain code has no loop"
        return await self._back.call_async(function, *args)


class Stay(Generic[T]):
    """A context manager held open on the trio thread, in a task of its own: entered and left there, used from here."""

    def __init__(self, opening: Opening[T]) -> None:
        self._opening = opening
        self._scope = trio.CancelScope()
        self._ready = trio.Event()
        self._leave = trio.Event()
        self._over = trio.Event()
        self._value: list[T] = []
        self._error: Exception | None = None

    async def run(self) -> None:
        try:
            with self._scope:
                async with self._opening() as value:
                    self._value.append(value)
                    self._ready.set()
                    await self._leave.wait()
        except Exception as error:
            self._error = error
        finally:
            self._ready.set()
            self._over.set()

    async def opened(self) -> T:
        """What the context manager gave; raises what kept it from opening."""
        await self._ready.wait()
        if self._value:
            return self._value[0]
        self._raise()
        raise ActorStopped("The runtime was closed while it opened.")

    async def close(self) -> None:
        """Leaves the context manager, or gives up opening it, and waits for the end. Raises what went wrong there."""
        self._leave.set()
        if not self._value:
            self._scope.cancel()
        await self._over.wait()
        if self._value:
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


@contextmanager
def held(opening: Opening[T]) -> Iterator[tuple[Portal, T]]:
    """Opens something on a new trio thread, for plain code. The thread has ended when the block has."""
    with start_blocking_portal("trio", name=NAME) as inner:
        portal, stay = Portal(inner), Stay(opening)
        inner.start_task_soon(stay.run)
        try:
            yield portal, portal.call(stay.opened)
        finally:
            portal.call(stay.close)


@asynccontextmanager
async def hosted(opening: Opening[T]) -> AsyncIterator[tuple[Portal, T]]:
    """The same for a running event loop, which goes on while the other opens and closes."""
    with start_blocking_portal("trio", name=NAME) as inner:
        async with bare(BlockingPortal()) as back:
            portal, stay = Portal(inner, back), Stay(opening)
            inner.start_task_soon(stay.run)
            try:
                yield portal, await portal.acall(stay.opened)
            finally:
                with anyio.CancelScope(shield=True):
                    await portal.acall(stay.close)


@contextmanager
def _stopped() -> Iterator[None]:
    """A thread that has ended, or ended the call, as the one tree's word for it."""
    try:
        yield
    except CancelledError:
        raise ActorStopped("The runtime is closed.", retry_after=1.0) from None
    except RuntimeError as error:
        if type(error) is RuntimeError and "portal" in str(error):
            raise ActorStopped("The runtime is closed.", retry_after=1.0) from None
        raise


__all__ = ["NAME", "Opening", "Portal", "held", "hosted"]
