"""The rows store: the one actor that knows, and changes, what is on disk.

Lookups are answered at once from the index. Reads run one after another in a thread. Everything that changes the
directory is a job, run one after another by one writer: jobs that waited together share one commit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

import outcome
import trio
from onecopy.runtime.core import Actor, Reply, handles
from onecopy.runtime.errors import NotPersisting, OnecopyError, StoreUnusable
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.seams import Clock, Disk
from onecopy.runtime.store import (
    ROOT,
    Conversation,
    Found,
    ReadOnly,
    RowsOnDisk,
    Stored,
    anchor_key,
    block_key,
    read_run,
)
from onecopy.runtime.store.portable import Memory, export_image, import_image, tip_of

from .messages.store import (
    Condemn,
    DropConversation,
    Export,
    Import,
    ListConversations,
    ListOwned,
    Lookup,
    Owned,
    Plan,
    Planned,
    Put,
    Read,
    StoreStatistics,
    Supersede,
    Touch,
)

LOG = logging.getLogger("onecopy.store")
T = TypeVar("T")

HOUSEKEEPING = 5.0
"""Seconds between looks for dead bytes, expired pins and unwritten touches."""
REOPEN = 30.0
"""Seconds between attempts to open a directory that could not be used."""
SWEEP_STEP = 16 << 20
"""Bytes moved by one sweep step: a save that comes in between waits no longer than these take."""


@dataclass(slots=True, eq=False)
class Job:
    """One change of the directory. change: runs in a thread, under the writer alone. settle: on the trio thread, after
    the commit; gets None or what went wrong."""

    change: Callable[[RowsOnDisk], object]
    settle: Callable[[OSError | None], object] = lambda error: None
    error: OSError | None = None


class RowsStore(Actor):
    """opener: opens the engine, or raises StoreUnusable. strict: then the actor does not start either.

    Otherwise it runs without a directory, says so, and tries again.
    """

    def __init__(self, opener: Callable[[], RowsOnDisk], disk: Disk, clock: Clock, *, strict: bool = True) -> None:
        super().__init__("rows store", work_size=4096)
        self._open = opener
        self._disk = disk
        self._clock = clock
        self._strict = strict
        self._engine: RowsOnDisk | None = None
        self._why_not: str | None = None
        self._closing = False
        self._condemned: set[bytes] = set()
        self._jobs: deque[Job] = deque()
        self._work = trio.Event()
        self._reads: deque[tuple[RowsOnDisk, Read, Reply[tuple[Stored, ...]]]] = deque()
        self._reading = trio.StrictFIFOLock()
        self._pins: list[tuple[float, tuple[bytes, ...]]] = []
        self._nursery: trio.Nursery

    async def start(self) -> None:
        try:
            await self._try_open()
        except StoreUnusable as error:
            if self._strict:
                raise
            LOG.error("%s Answers go on; nothing is kept on disk.", error)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._write)
            nursery.start_soon(self._keep_house)
            await super().run()

    async def stopping(self) -> None:
        """Writes what was accepted, then lets go of the directory."""
        if self._engine is None:
            return
        self._closing = True
        while self._jobs:
            await self._do(self._engine)
        try:
            await self._disk.in_thread(self._engine.close)
        except OSError as error:
            LOG.warning("the rows store could not be closed cleanly: %s", error)

    # -- questions

    @handles(Lookup)
    def lookup(self, ask: Lookup, reply: Reply[Found]) -> None:
        if self._engine is None:
            reply.set(Found((), ()))
            return
        found = self._sound(self._engine.find(ask.tokens, ask.salt))
        if ask.pin:
            self._pin(self._engine, (*found.keys[-1:], *(key for _, key in found.anchors)), ask.pin)
        reply.set(found)

    def _sound(self, found: Found) -> Found:
        """Without what was condemned and waits for the writer."""
        bad = next((i for i, key in enumerate(found.keys) if key in self._condemned), len(found.keys))
        anchors = tuple((at, key) for at, key in found.anchors if at < (bad + 1) * BLOCK and key not in self._condemned)
        return Found(found.keys[:bad], anchors)

    @handles(Plan)
    def plan(self, ask: Plan, reply: Reply[Planned]) -> None:
        engine = self._writable()
        keys = list(ask.known[: len(ask.tokens) // BLOCK])
        for i in range(len(keys), len(ask.tokens) // BLOCK):
            above = keys[-1] if keys else ROOT
            keys.append(block_key(above, ask.tokens[i * BLOCK : (i + 1) * BLOCK], engine.fingerprint, ask.salt))
        places = [None if key in self._condemned else engine.locate(key) for key in keys]
        missing = tuple(i for i, place in enumerate(places) if place is None)
        end = None
        if ask.anchor:
            tail = ask.tokens[len(keys) * BLOCK :]
            end = anchor_key(keys[-1] if keys else ROOT, tail, engine.fingerprint, ask.salt)
            places.append(engine.locate(end))
        wanted = end if places and places[-1] is None else None
        reply.set(Planned(tuple(keys), missing, wanted, sum(place.size for place in places if place is not None), end))

    @handles(Read)
    def read(self, ask: Read, reply: Reply[tuple[Stored, ...]]) -> None:
        if self._engine is None:
            reply.set(())
        else:
            self._reads.append((self._engine, ask, reply))
            self._nursery.start_soon(self._read_next)

    async def _read_next(self) -> None:
        """One ask at a time, the oldest: a disk is slower when asks pull it to and fro."""
        async with self._reading:
            engine, ask, reply = self._reads.popleft()
            entries = [entry for entry in takewhile(bool, map(engine.locate, ask.keys)) if entry is not None]

            def wanted() -> bool:
                return ask.wanted() and not reply.done

            records, failure = await self._disk.in_thread(read_run, engine.reader(), entries, ask.places, wanted)
        if failure is not None:
            key = ask.keys[len(records)]
            self._enqueue(Job(lambda engine: engine.failed(key, failure)))
        for stored in records:
            engine.loaded(stored)
        reply.set(tuple(records))

    @handles(ListConversations)
    def list_conversations(self, _: ListConversations, reply: Reply[tuple[Conversation, ...]]) -> None:
        self._ask_writer(lambda engine: tuple(engine.conversations()), reply)

    @handles(ListOwned)
    def list_owned(self, ask: ListOwned, reply: Reply[tuple[Owned, ...]]) -> None:
        self._ask_writer(lambda engine: tuple(Owned(*found) for found in engine.owned(ask.salts)), reply)

    @handles(Export)
    def export(self, ask: Export, reply: Reply[bytes]) -> None:
        self._ask_writer(lambda engine: export_image(engine, ask.tip), reply)

    @handles(Import)
    def import_(self, ask: Import, reply: Reply[bytes]) -> None:
        self._writable()

        def take(engine: RowsOnDisk) -> bytes:
            about, _ = import_image(engine, Memory(ask.data), ask.salt)
            return tip_of(about, ask.salt)

        self._ask_writer(take, reply)

    @handles(StoreStatistics)
    def store_statistics(self, _: StoreStatistics, reply: Reply[dict[str, Any]]) -> None:
        reply.set(self.statistics())

    def statistics(self) -> dict[str, Any]:
        """The engine's counters beside the actor's; persisting: rows written now would be kept; why_not: a sentence."""
        engine = self._engine.statistics() if self._engine is not None else {}
        own = {"persisting": self._why_not is None, "why_not": self._why_not, "waiting": len(self._jobs)}
        return {**super().statistics(), **own, **engine}

    # -- changes

    @handles(Put)
    def put(self, ask: Put, reply: Reply[int]) -> None:
        engine = self._writable()
        sizes = list[int]()

        def write(engine: RowsOnDisk) -> None:
            if not reply.done:  # nobody waits any more: a stop or a cancel must not wait for the disk either
                sizes.extend(engine.append(record) for record in ask.records)

        def settle(error: OSError | None) -> None:
            # A later job's failed write can take this one's records along: only the index knows.
            lost = error is None and any(engine.locate(record.key) is None for record in ask.records)
            self._answer_write(reply, OSError("another write failed") if lost else error, lambda: sum(sizes))

        self._enqueue(Job(write, settle))

    @handles(Touch)
    def touch(self, message: Touch) -> None:
        self._enqueue(Job(lambda engine: engine.note_use(message.keys, message.used)))

    @handles(Condemn)
    def condemn(self, message: Condemn) -> None:
        LOG.warning("%d stored records are given up: %s", len(message.keys), message.why)
        self._condemned.update(message.keys)
        self._enqueue(
            Job(lambda engine: engine.drop(message.keys), lambda _: self._condemned.difference_update(message.keys))
        )

    @handles(Supersede)
    def supersede(self, message: Supersede) -> None:
        self._enqueue(Job(lambda engine: engine.drop(message.keys)))

    @handles(DropConversation)
    def drop_conversation(self, ask: DropConversation, reply: Reply[int]) -> None:
        self._writable()
        self._ask_writer(lambda engine: engine.drop_conversation(ask.tip), reply)

    # -- the writer

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._jobs and self._engine is not None:
                await self._do(self._engine)

    async def _do(self, engine: RowsOnDisk) -> None:
        """Runs the jobs that wait now, commits once, and settles them. Jobs stay queued until they are settled."""
        batch = list(self._jobs)
        for job in batch:
            job.error = await self._attempt(job.change, engine)
        failed = await self._attempt(lambda engine: engine.commit(), engine)
        for job in batch:
            self._jobs.popleft()
            job.settle(job.error or failed)
        self._note(failed or next((job.error for job in batch if job.error), None), engine)

    async def _attempt(self, change: Callable[[RowsOnDisk], object], engine: RowsOnDisk) -> OSError | None:
        try:
            await self._disk.in_background(change, engine)
        except OSError as error:
            return error
        return None

    def _ask_writer(self, work: Callable[[RowsOnDisk], T], reply: Reply[T]) -> None:
        """Answers with what `work` returns or, being of the one tree, raises."""
        done = list[outcome.Outcome[T]]()

        def change(engine: RowsOnDisk) -> None:
            try:
                done.append(outcome.Value(work(engine)))
            except OnecopyError as error:
                done.append(outcome.Error(error))

        def settle(error: OSError | None) -> None:
            if error is None and isinstance(done[0], outcome.Error):
                reply.fail(done[0].error)
            else:
                self._answer_write(reply, error, lambda: done[0].unwrap())

        self._enqueue(Job(change, settle))

    def _answer_write(self, reply: Reply[Any], error: OSError | None, answer: Callable[[], Any]) -> None:
        if error is not None:
            reply.fail(not_persisting(error))
        else:
            reply.set(answer())

    def _enqueue(self, job: Job) -> None:
        if self._engine is None:
            job.settle(StoreClosed())
            return
        self._jobs.append(job)
        self._work.set()

    def _note(self, error: OSError | None, engine: RowsOnDisk) -> None:
        if error is not None:
            self._why_not = str(error)
        elif not engine.read_only:
            self._why_not = None

    # -- house

    async def _keep_house(self) -> None:
        while True:
            await self._clock.sleep(HOUSEKEEPING if self._engine is not None else REOPEN)
            if self._engine is None:
                await self._reopen()
            elif not self._engine.read_only:
                self._unpin_expired(self._engine)
                self._sweep()

    async def _reopen(self) -> None:
        try:
            await self._try_open()
        except StoreUnusable as error:
            self._why_not = str(error)
        else:
            LOG.warning("rows are kept on disk again")

    async def _try_open(self) -> None:
        try:
            self._engine = await self._disk.in_thread(self._open)
        except StoreUnusable as error:
            self._why_not = str(error)
            raise
        self._why_not = str(ReadOnly()) if self._engine.read_only else None

    def _sweep(self) -> None:
        """One small step, and the next one behind whatever waits by then."""
        more = list[bool]()

        def settle(error: OSError | None) -> None:
            if error is None and more[0] and not self._closing:
                self._sweep()

        self._enqueue(Job(lambda engine: more.append(engine.sweep_step(SWEEP_STEP).more), settle))

    def _pin(self, engine: RowsOnDisk, keys: Sequence[bytes], seconds: float) -> None:
        pinned = tuple(keys)
        engine.pin(pinned)
        self._pins.append((self._clock.now() + seconds, pinned))

    def _unpin_expired(self, engine: RowsOnDisk) -> None:
        now = self._clock.now()
        for _, keys in (pin for pin in self._pins if pin[0] <= now):
            engine.unpin(keys)
        self._pins = [pin for pin in self._pins if pin[0] > now]

    def _writable(self) -> RowsOnDisk:
        if self._engine is None or self._engine.read_only:
            raise NotPersisting(f"Rows are not kept on disk: {self._why_not}", lasting=True)
        return self._engine


class StoreClosed(OSError):
    """There is no directory now."""

    def __init__(self) -> None:
        super().__init__("the rows store is not open")


def not_persisting(error: OSError) -> OnecopyError:
    """The answer for a write that failed."""
    lasting = isinstance(error, ReadOnly | StoreClosed) or getattr(error, "lasting", False)
    return NotPersisting(f"Rows could not be written to disk: {error}", lasting=lasting)


def rows_store_factory(opener: Callable[[], RowsOnDisk], disk: Disk, clock: Clock) -> Callable[[], RowsStore]:
    """Makes the actor for a supervisor: a directory that cannot be used is an error at the first start only."""
    first = [True]

    def make() -> RowsStore:
        strict, first[0] = first[0], False
        return RowsStore(opener, disk, clock, strict=strict)

    return make
