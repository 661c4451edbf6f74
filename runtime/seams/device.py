"""The device, as a seam: one place where model code runs, one call at a time, in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple

import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Device(Protocol):
    """Runs functions in the order given. Only evaluated arrays, NumPy views and plain values may leave it."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Runs `fn(*args)` after all earlier work and returns its result or raises its error.

        Raises first, instead of running, the error of a `post` that failed since the last `run`.
        """
        ...

    def begin(self, fn: Callable[[*Ts], T], *args: *Ts) -> Awaitable[T]:
        """As `run`, but queued where that can be: what the caller does until it awaits the answer costs nothing.

        To be awaited once, by the task that began it, before that task waits for anything else.
        """
        ...

    def post(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Queues `fn(*args)` without waiting. Its result is dropped; its error surfaces on the next `run`."""
        ...

    def statistics(self) -> dict[str, Any]: ...


class InlineDevice:
    """Runs everything at once on the calling thread. For tests and for models that need no thread of their own."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._runs = self._posts = 0

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        await trio.lowlevel.checkpoint()
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._runs += 1
        return fn(*args)

    def begin(self, fn: Callable[[*Ts], T], *args: *Ts) -> Awaitable[T]:
        return self.run(fn, *args)

    def post(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        self._posts += 1
        try:
            fn(*args)
        except Exception as error:
            self._error = self._error or error

    def statistics(self) -> dict[str, Any]:
        """runs, posts: calls so far."""
        return {"runs": self._runs, "posts": self._posts}
