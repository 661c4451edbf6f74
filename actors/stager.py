"""The stager: moves rows from segments to disk and back, in windows, under a permit for the bytes in flight.

Rows are read in place, record by record, and the stager pauses before each so that rounds go first. A disk that fails
is retried with backoff; what does not make it stays dirty and is reported, and no answer ever waits for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import trio
from onecopy.runtime.core import Actor, Ref, Reply, handles
from onecopy.runtime.errors import NotPersisting, OnecopyError, Unavailable
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.seams import Clock
from onecopy.runtime.store import ROOT, Kind, Record
from onecopy.runtime.store.permit import Layout, charge

from .messages.stager import (
    CancelSave,
    Flush,
    Forgotten,
    KeysInFlight,
    Restore,
    RestoreReport,
    RowsReader,
    Save,
    SaveReport,
    StagerStatistics,
)
from .messages.store import Plan, Planned, Put, Touch
from .refill import Refill

LOG = logging.getLogger("onecopy.store")

BACKOFF = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each further attempt at a window. After the last the save ends as dirty and its hold goes back."""
PART = 8 << 20
"""Bytes written by one commit, or one record if that is larger: what a stop or a cancel may have to wait for."""
WARN_EVERY = 60.0
"""Seconds between two warnings about a disk that fails."""


class Permit:
    """A ceiling on bytes in flight. First come, first served; a charge above the whole permit goes alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._turn = trio.StrictFIFOLock()
        self._freed = trio.Event()

    @asynccontextmanager
    async def take(self, n: int) -> AsyncIterator[None]:
        n = min(n, self.size)
        async with self._turn:
            while self.used + n > self.size:
                self._freed = trio.Event()
                await self._freed.wait()
            self.used += n
        try:
            yield
        finally:
            self.used -= n
            self._freed.set()


@dataclass(frozen=True, slots=True)
class Item:
    """One record to be: block number, or None for the anchor. charge: bytes at most, None when nobody can price it."""

    block: int | None
    charge: int | None


@dataclass(slots=True, eq=False)
class Task:
    """One save on its way. earlier: bytes of the state that were on disk before. done: blocks (None: the anchor)."""

    ask: Save
    reply: Reply[SaveReport]
    begun: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    plan: Planned | None = None
    done: set[int | None] = field(default_factory=set)
    earlier: int = 0
    written: int = 0
    windows: int = 0
    error: str | None = None

    @property
    def rows(self) -> int:
        """Leading rows on disk; the anchor's rows count when everything before them is there."""
        if self.plan is None:
            return 0
        gap = next((i for i in self.plan.missing if i not in self.done), None)
        if gap is not None:
            return gap * BLOCK
        anchored = self.ask.anchor and (self.plan.anchor is None or None in self.done)
        return len(self.ask.tokens) if anchored else self.whole

    @property
    def whole(self) -> int:
        """Rows of the state's whole blocks."""
        return len(self.ask.tokens) // BLOCK * BLOCK

    def report(self, now: float) -> SaveReport:
        rows, plan = self.rows, self.plan
        wanted = len(self.ask.tokens) if self.ask.anchor else self.whole
        return SaveReport(
            rows=rows,
            complete=self.error is None and plan is not None and rows == wanted,
            keys=plan.keys[: rows // BLOCK] if plan else (),
            blocks=len(self.done - {None}),
            written=self.written,
            state=self.earlier + self.written,
            windows=self.windows,
            seconds=now - self.begun,
            error=self.error,
            anchor=plan.end if plan and (plan.anchor is None or None in self.done) else None,
        )


def windows(items: Iterable[Item], most: int) -> Iterator[list[Item]]:
    """Splits a save so that each window's charge is `most` at most; a record that alone has more gets its own."""
    window, total = list[Item](), 0
    for item in items:
        cost = most if item.charge is None else item.charge
        if window and total + cost > most:
            yield window
            window, total = [], 0
        window.append(item)
        total += cost
    if window:
        yield window


class Stager(Actor):
    """store: the rows store. layout: prices saves. permit: bytes in flight at most. pause: awaited before each record
    is read, and returns when rounds leave time for it."""

    def __init__(
        self,
        store: Ref,
        layout: Layout,
        permit: int,
        clock: Clock,
        pause: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        super().__init__("stager", work_size=4096)
        self._store = store
        self._layout = layout
        self._permit = Permit(permit)
        self._clock = clock
        self._pause = pause
        self._reading = trio.StrictFIFOLock()
        self._running: dict[str, Task] = {}
        self._waiting: dict[str, Task] = {}
        self._dirty: dict[str, str] = {}
        self._idle = trio.Event()
        self._warned = -WARN_EVERY
        self._unwarned = 0
        self._totals = dict.fromkeys(("saves", "restores", "written_bytes", "read_bytes", "blocks", "failures"), 0)
        self._nursery: trio.Nursery

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await super().run()

    # -- saves

    @handles(Save)
    def save(self, ask: Save, reply: Reply[SaveReport]) -> None:
        task = Task(ask, reply, self._clock.now())
        if ask.owner not in self._running:
            self._begin(task)
            return
        replaced = self._waiting.pop(ask.owner, None)
        if replaced is not None:
            replaced.error = "a later save took its place"
            replaced.reply.set(replaced.report(self._clock.now()))
        self._waiting[ask.owner] = task

    @handles(CancelSave)
    def cancel_save(self, message: CancelSave) -> None:
        for task in (self._waiting.get(message.owner), self._running.get(message.owner)):
            if task is not None:
                task.error = "cancelled"
                task.scope.cancel()

    @handles(Forgotten)
    def forgotten(self, message: Forgotten) -> None:
        self._dirty.pop(message.owner, None)

    @handles(Flush)
    def flush(self, ask: Flush, reply: Reply[tuple[str, ...]]) -> None:
        self._nursery.start_soon(self._flush, ask.seconds, reply)

    async def _flush(self, seconds: float, reply: Reply[tuple[str, ...]]) -> None:
        with trio.move_on_after(seconds):
            while self._running:
                self._idle = trio.Event()
                await self._idle.wait()
        reply.set(tuple(sorted({*self._running, *self._waiting, *self._dirty})))

    def _begin(self, task: Task) -> None:
        self._running[task.ask.owner] = task
        self._nursery.start_soon(self._run_save, task)

    async def _run_save(self, task: Task) -> None:
        ask = task.ask
        with task.scope:
            try:
                plan = await self._plan(task)
                if not ask.again and any(i < len(ask.known) for i in plan.missing):
                    raise Unavailable("other conversations took its room on disk")
                await self._stage_all(task, plan)
                for at, reader in ask.waypoints:
                    await self._stage_state(task, at, reader)
            except OnecopyError as error:
                task.error = error.message
                await self._see_what_was_kept(task)
        self._finish(task)

    async def _stage_all(self, task: Task, plan: Planned) -> None:
        for window in windows(self._items(task.ask, plan), self._permit.size):
            await self._stage_until_done(task, plan, window)

    async def _stage_state(self, task: Task, at: int, reader: RowsReader) -> None:
        """The state at a place on the way, behind blocks that are on disk by now."""
        ask = replace(task.ask, tokens=task.ask.tokens[:at], reader=reader, known=task.plan.keys if task.plan else ())
        part = Task(ask, task.reply, task.begun)
        try:
            await self._stage_all(part, await self._plan(part))
        finally:
            task.written += part.written

    async def _see_what_was_kept(self, task: Task) -> None:
        """A window that failed may be on disk in part."""
        with contextlib.suppress(OnecopyError):
            await self._plan(task)

    async def _plan(self, task: Task) -> Planned:
        ask = task.ask
        task.plan = plan = await self._store.ask(Plan(ask.tokens, ask.salt, ask.anchor, ask.known))
        task.earlier = plan.present - task.written
        if plan.keys:
            self._store.tell(Touch(plan.keys[-1:], ask.used))
        return plan

    def _items(self, ask: Save, plan: Planned) -> list[Item]:
        at = len(ask.tokens)
        block = charge(0, BLOCK, self._layout, anchor=False)
        items = [Item(i, block) for i in plan.missing]
        if plan.anchor is not None:
            items.append(Item(None, charge(at, at, self._layout)))
        return items

    async def _stage_until_done(self, task: Task, plan: Planned, window: list[Item]) -> None:
        """One window, again after each failure while there is hope. Raises the last failure."""
        for wait in (*BACKOFF, None):
            try:
                await self._stage(task, plan, window)
                return
            except NotPersisting as error:
                self._warn(task.ask.owner, error.message)
                if error.lasting or wait is None:
                    raise
                await self._clock.sleep(wait)

    async def _stage(self, task: Task, plan: Planned, window: list[Item]) -> None:
        cost = sum(self._permit.size if item.charge is None else item.charge for item in window)
        async with self._permit.take(cost):
            for part in windows((item for item in window if item.block not in task.done), PART):
                records = tuple([await self._record(task, plan, item) for item in part])
                task.written += await self._store.ask(Put(records))
                task.done.update(item.block for item in part)
        task.windows += 1

    async def _record(self, task: Task, plan: Planned, item: Item) -> Record:
        """One record's rows. However many saves there are, the device has one such job at a time between two rounds."""
        async with self._reading:
            await self._pause()
            if task.reply.done:
                raise Unavailable("nobody waits for this save any more")
            return await self._read(task, plan, item)

    async def _read(self, task: Task, plan: Planned, item: Item) -> Record:
        ask, keys = task.ask, plan.keys
        if item.block is not None:
            start = item.block * BLOCK
            rows = await ask.reader.read_block(ask.segment, item.block)
            above = keys[item.block - 1] if item.block else ROOT
            tokens = ask.tokens[start : start + BLOCK]
            return Record(Kind.BLOCK, keys[item.block], above, start, tokens, rows, used=ask.used)
        assert plan.anchor is not None
        state = await ask.reader.read_anchor(ask.segment, len(ask.tokens))
        above, tail = keys[-1] if keys else ROOT, ask.tokens[task.whole :]
        return Record(Kind.ANCHOR, plan.anchor, above, task.whole, tail, state, used=ask.used)

    def _finish(self, task: Task) -> None:
        owner = task.ask.owner
        report = task.report(self._clock.now())
        del self._running[owner]
        if report.complete:
            self._dirty.pop(owner, None)
        else:
            self._dirty[owner] = report.error or "unfinished"
        self._count_save(report)
        _log_save(owner, report)
        task.reply.set(report)
        if (following := self._waiting.pop(owner, None)) is not None:
            self._begin(following)
        elif not self._running:
            self._idle.set()

    # -- restores

    @handles(Restore)
    def restore(self, ask: Restore, reply: Reply[RestoreReport]) -> None:
        self._nursery.start_soon(self._restore, ask, reply)

    async def _restore(self, ask: Restore, reply: Reply[RestoreReport]) -> None:
        begun = self._clock.now()
        refill = Refill(ask, self._store)
        await refill.run()
        report = refill.report(self._clock.now() - begun)
        self._totals["restores"] += 1
        self._totals["read_bytes"] += report.read
        _log_restore(ask.owner, report)
        reply.set(report)

    # -- telling

    @handles(KeysInFlight)
    def keys_in_flight(self, _: KeysInFlight, reply: Reply[frozenset[bytes]]) -> None:
        plans = [task.plan for task in self._running.values() if task.plan is not None]
        reply.set(frozenset(key for plan in plans for key in (*plan.keys, plan.end) if key is not None))

    @handles(StagerStatistics)
    def stager_statistics(self, _: StagerStatistics, reply: Reply[dict[str, Any]]) -> None:
        reply.set(self.statistics())

    def statistics(self) -> dict[str, Any]:
        """Counters since the start; dirty: owners whose rows are not all on disk, with the reason."""
        return {
            **super().statistics(),
            **self._totals,
            "permit_bytes": self._permit.size,
            "staged_bytes": self._permit.used,
            "saving": sorted(self._running),
            "dirty": dict(self._dirty),
            "persisting": not self._dirty,
            "why_not": next(iter(self._dirty.values()), None),
        }

    def _count_save(self, report: SaveReport) -> None:
        self._totals["saves"] += 1
        self._totals["written_bytes"] += report.written
        self._totals["blocks"] += report.blocks

    def _warn(self, owner: str, message: str) -> None:
        """At most one warning a minute, with the number of those in between."""
        self._totals["failures"] += 1
        now = self._clock.now()
        if now - self._warned < WARN_EVERY:
            self._unwarned += 1
            return
        more = f" ({self._unwarned} more failures since the last warning)" if self._unwarned else ""
        LOG.warning("rows of %s are not on disk yet: %s%s", owner, message, more)
        self._warned, self._unwarned = now, 0


def _log_save(owner: str, report: SaveReport) -> None:
    LOG.info(
        "saved %s: %d tokens on disk, %d new blocks, %d bytes written, %d bytes in all, %.0f ms%s",
        owner,
        report.rows,
        report.blocks,
        report.written,
        report.state,
        report.seconds * 1000,
        f"; not complete: {report.error}" if report.error else "",
    )


def _log_restore(owner: str, report: RestoreReport) -> None:
    LOG.info(
        "restored %s: %d tokens from disk, %d blocks, %d bytes read, %.0f ms",
        owner,
        report.rows,
        report.blocks,
        report.read,
        report.seconds * 1000,
    )
