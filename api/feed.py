"""Work that runs in a nursery of its owner while somebody reads what it makes, as it makes it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

import trio
from onecopy.runtime.errors import ActorStopped, DeadlineExceeded, OnecopyError

T = TypeVar("T")
Put = Callable[[T], Awaitable[None]]

SIZE = 64
"""Items that wait for a reader before the work behind them pauses."""


class Feed(Generic[T]):
    """One running piece of work and its unread items. Everything but `abandon` is called on the trio thread.

    work: gets a `put` that waits while the reader is behind; its error is raised to the reader after the items before
    it. timeout: seconds until it is cancelled with DeadlineExceeded.
    """

    def __init__(
        self, nursery: trio.Nursery, work: Callable[[Put[T]], Awaitable[None]], *, timeout: float | None = None
    ) -> None:
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        self._scope = trio.CancelScope(deadline=deadline)
        self._token = trio.lowlevel.current_trio_token()
        self._items: deque[T] = deque()
        self._error: Exception | None = ActorStopped("The runtime is closed.", retry_after=1.0)
        self._over = trio.Event()
        self._news = trio.Event()
        self._room = trio.Event()
        try:
            nursery.start_soon(self._run, work)
        except RuntimeError:
            raise self._error from None

    async def next(self) -> list[T]:
        """Everything that is ready, waiting for at least one item; [] after the last one. Raises the work's error."""
        while not self._items and not self._over.is_set():
            self._news = trio.Event()
            await self._news.wait()
        batch = list(self._items)
        self._items.clear()
        self._room.set()
        if not batch and self._error is not None:
            raise self._error
        return batch

    async def close(self) -> None:
        """Cancels what still runs and waits for its end."""
        self._scope.cancel()
        with trio.CancelScope(shield=True):
            await self._over.wait()

    def abandon(self) -> None:
        """Cancels what still runs. Callable from any thread and from finalisers."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._scope.cancel)

    async def _run(self, work: Callable[[Put[T]], Awaitable[None]]) -> None:
        try:
            with self._scope:
                await work(self._put)
            self._error = self._cut() if self._scope.cancelled_caught else None
        except Exception as error:
            self._error = error
        finally:
            self._over.set()
            self._news.set()

    def _cut(self) -> OnecopyError:
        if trio.current_time() >= self._scope.deadline:
            return DeadlineExceeded("The time given for this was over before it was done.")
        return ActorStopped("This was ended before it was done.")

    async def _put(self, item: T) -> None:
        while len(self._items) >= SIZE:
            self._room = trio.Event()
            await self._room.wait()
        self._items.append(item)
        self._news.set()


class Stream(ABC, Generic[T]):
    """A feed that starts when it is first read: `async for`, or `async with` for a fixed end.

    Leaving a loop early, an error or a cancellation while waiting end the work behind it.
    """

    _feed: Feed[T] | None = None
    _over = False

    def __init__(self) -> None:
        self._ready: deque[T] = deque()

    @abstractmethod
    async def _open(self) -> Feed[T]:
        """Starts the work."""

    def _take(self, batch: list[T]) -> None:
        """Looks at items on their way to the reader."""

    def _closed(self) -> None:
        """Called once, when the work is over."""

    async def next(self) -> list[T]:
        """Everything that is ready, at least one item; [] at the end."""
        if self._over:
            return []
        try:
            if self._feed is None:
                self._feed = await self._open()
            batch = await self._feed.next()
            self._take(batch)
        except BaseException:
            await self.close()
            raise
        if not batch:
            await self.close()
        return batch

    async def close(self) -> None:
        """Ends the work and waits until nothing of it runs. Closing again does nothing."""
        if self._over:
            return
        self._over = True
        try:
            if self._feed is not None:
                await self._feed.close()
        finally:
            self._closed()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._ready:
            self._ready = deque(await self.next())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if self._feed is not None and not self._over:
            self._feed.abandon()
            self._closed()


__all__ = ["Feed", "Put", "Stream"]
