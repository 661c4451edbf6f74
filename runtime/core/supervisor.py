"""Supervision: ordered start, reverse stop, rest-for-one restarts, bounded intensity, escalation with the cause.

When a child crashes, the children started after it are stopped in reverse order and started again after it, in
order, from their factories; temporary ones are not started again. Everything a supervisor does to its children it
does one thing at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any

import trio

from ..errors import RestartIntensityExceeded, Unavailable
from .actor import Actor
from .child import Cell, Child, Life, OnEvent
from .ref import Ref


class Supervisor:
    """`async with Supervisor(children) as supervisor:` runs the children around its body.

    max_restarts within `window` seconds, then the body is cancelled, all children are stopped in order and
    RestartIntensityExceeded is raised with the last crash as its cause. A child that fails at the first start stops
    the others and raises its own error. Cancelling from outside ends the body; children still get their orderly stop.
    on_event(kind, name, detail): started, stopped, crashed (the exception), restarting, overdue, escalated.
    """

    def __init__(
        self,
        children: Sequence[Child] = (),
        *,
        max_restarts: int = 3,
        window: float = 60.0,
        on_event: OnEvent = lambda kind, name, detail: None,
    ) -> None:
        self.max_restarts = max_restarts
        self.window = window
        self._on_event = on_event
        self._cells: dict[str, Cell] = {}
        self._lock = trio.Lock()
        self._closing = False
        self._failure: RestartIntensityExceeded | None = None
        self._restarts: list[tuple[float, str]] = []
        self._departed: Counter[str] = Counter(children=0, crashes=0)
        self._manager: AbstractAsyncContextManager[None] | None = None
        self._nursery: trio.Nursery
        for child in children:
            self._place(child)

    async def __aenter__(self) -> Supervisor:
        self._manager = self._running()
        await self._manager.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._manager is not None
        return await self._manager.__aexit__(kind, error, traceback)

    def ref(self, name: str) -> Ref:
        """The stable ref of a child; known from construction, before anything runs."""
        return self._cells[name].ref

    def actor(self, name: str) -> Actor | None:
        """The object now in that place. For inspection: only its own task may touch its state."""
        life = self._cells[name].life
        return life.actor if life else None

    async def spawn(self, child: Child) -> Ref:
        """Starts one more child, after all others. Raises what its start raised, Unavailable while stopping."""
        async with self._lock:
            if self._closing:
                raise Unavailable("The server is stopping.", retry_after=1.0)
            cell = self._place(child)
            try:
                await cell.up(self._nursery)
            except BaseException:
                self._retire(cell)
                raise
            return cell.ref

    async def stop(self, name: str) -> None:
        """Stops a child in order and forgets it. A name that is gone already is fine. Never from the child itself."""
        async with self._lock:
            if name in self._cells:
                await self._cells[name].down()
                self._retire(self._cells[name])

    def statistics(self) -> dict[str, Any]:
        """Each child's statistics, restarts within the window, and totals of the children that are gone."""
        return {
            "children": {name: cell.statistics() for name, cell in self._cells.items()},
            "restarts": len(self._restarts),
            "departed": dict(self._departed),
        }

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[None]:
        error: Exception | None = None
        try:
            async with trio.open_nursery() as self._nursery:
                try:
                    await self._start_all()
                    yield
                except Exception as raised:
                    error = raised
                finally:
                    await self._stop_all()
        except BaseExceptionGroup:
            if self._failure is None:
                raise
        if self._failure or error:
            raise self._failure or error  # type: ignore[misc]

    async def _start_all(self) -> None:
        async with self._lock:
            for cell in list(self._cells.values()):
                await cell.up(self._nursery)

    async def _stop_all(self) -> None:
        """Cancels restarts and starts under way (running actors are shielded), then stops all in reverse order."""
        self._closing = True
        self._nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            async with self._lock:
                for cell in reversed(self._cells.values()):
                    await cell.down()

    async def _ended(self, cell: Cell, life: Life) -> None:
        """A child's life is over, by itself or by a stop that holds the lock and has already let go of `life`."""
        async with self._lock:
            if self._closing or cell.life is not life:
                return
            if not cell.child.returns(life.error):
                self._retire(cell)
                return
            try:
                await self._restart(cell, life.error)
            except RestartIntensityExceeded as failure:
                self._escalate(cell, failure)

    async def _restart(self, cell: Cell, error: Exception | None) -> None:
        self._spend(cell, error)
        cells = list(self._cells.values())
        rest = cells[cells.index(cell) + 1 :]
        for later in reversed(rest):
            await later.down()
        for again in [cell, *rest]:
            if again.child.restart == "temporary":
                self._retire(again)
            else:
                await self._up_again(again)

    async def _up_again(self, cell: Cell) -> None:
        while True:
            self._on_event("restarting", cell.name, None)
            try:
                return await cell.up(self._nursery)
            except Exception as error:
                self._spend(cell, error)

    def _spend(self, cell: Cell, error: Exception | None) -> None:
        """Takes one restart from the allowance. Raises RestartIntensityExceeded when there is none left."""
        now = trio.current_time()
        self._restarts = [(at, name) for at, name in self._restarts if at > now - self.window] + [(now, cell.name)]
        own = sum(name == cell.name for _, name in self._restarts)
        bound = cell.child.max_restarts
        if len(self._restarts) > self.max_restarts or (bound is not None and own > bound):
            why = f"{error!r}" if error else "it ended"
            raise RestartIntensityExceeded(f"{cell.name} cannot be kept running: {why}.") from error

    def _escalate(self, cell: Cell, failure: RestartIntensityExceeded) -> None:
        self._failure = failure
        self._on_event("escalated", cell.name, failure)
        self._nursery.cancel_scope.cancel()

    def _place(self, child: Child) -> Cell:
        if child.name in self._cells:
            raise ValueError(f"there is already a child named {child.name}")
        cell = self._cells[child.name] = Cell(child, self._ended, self._on_event)
        return cell

    def _retire(self, cell: Cell) -> None:
        del self._cells[cell.name]
        self._departed["children"] += 1
        self._departed["crashes"] += cell.crashes
        self._departed.update(cell.total)
