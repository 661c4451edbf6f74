"""One restore: runs of records are read and verified, and while one is taken the next is on its way."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

import trio
from onecopy.runtime.core import Ref
from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.store import Kind, Place, Stored

from .messages.stager import Restore, RestoreReport
from .messages.store import Read

LOG = logging.getLogger("onecopy.store")

RUN = 4
"""Records read by one call: enough for a disk to go forward, and their bytes are in memory twice for a while."""
PLACED_RUN = 32
"""The same where bytes go right to their places: few calls, and who else restores does not wait long for its turn."""
AHEAD = 2
"""Runs under way at a time: one that is read, and the next, which waits at the store for its turn."""


@dataclass(frozen=True, slots=True)
class Run:
    """Records as they came, and where each was to be read to."""

    records: tuple[Stored, ...]
    places: tuple[Place | None, ...]


@dataclass(slots=True, eq=False)
class Coming:
    """A run under way. keys: of its records, the first of which is number `first`. run: None when it cannot be had."""

    first: int
    keys: tuple[bytes, ...]
    run: Run | None = None
    done: trio.Event = field(default_factory=trio.Event)


class Refill:
    """Ends at the first record that cannot be had; what was written before it counts."""

    def __init__(self, ask: Restore, store: Ref) -> None:
        self._ask = ask
        self._store = store
        self._blocks = 0
        self._read = 0
        self._anchored = False
        self._over = False

    async def run(self) -> None:
        """Waits for every read it began: it may write to the rows' memory, which is somebody else's afterwards.

        Cancelled, as by a stop, it leaves at once, and what is read then ends with the record in hand.
        """
        async with trio.open_nursery() as nursery:
            try:
                await self._take_all(nursery)
            except OnecopyError as error:
                LOG.warning("restoring %s stopped after %d blocks: %s", self._ask.owner, self._blocks, error.message)
            finally:
                self._over = True

    def report(self, seconds: float) -> RestoreReport:
        ask = self._ask
        blocks = (ask.first + self._blocks) * BLOCK
        rows = ask.anchor[0] if self._anchored and ask.anchor is not None else blocks
        return RestoreReport(rows, self._anchored, self._blocks, self._read, seconds)

    async def _take_all(self, nursery: trio.Nursery) -> None:
        keys = self._ask.keys if self._ask.anchor is None else (*self._ask.keys, self._ask.anchor[1])
        step = RUN if await self._place(0) is None else PLACED_RUN
        # The first is short: it is read while the places of the others are made.
        starts = [0, *range(min(RUN, len(keys)), len(keys), step)]
        ends = [*starts[1:], len(keys)]
        waiting = deque(Coming(first, keys[first:end]) for first, end in zip(starts, ends, strict=True))
        under_way = deque[Coming]()
        while waiting or under_way:
            while waiting and len(under_way) < AHEAD:
                under_way.append(waiting.popleft())
                await self._send(nursery, under_way[-1])
            await under_way[0].done.wait()
            if not await self._take_run(under_way.popleft()):
                return

    async def _send(self, nursery: trio.Nursery, coming: Coming) -> None:
        """Returns when the run waits at the store, so that runs come there in their order."""
        numbers = range(coming.first, coming.first + len(coming.keys))
        try:
            places = tuple([await self._place(n) for n in numbers])
        except OnecopyError as error:
            self._not_had(coming, error)
        else:
            await nursery.start(self._bring, coming, places)

    async def _bring(
        self, coming: Coming, places: tuple[Place | None, ...], *, task_status: trio.TaskStatus[None]
    ) -> None:
        task_status.started()  # the next line puts the ask before any other task runs
        try:
            records = await self._store.ask(Read(coming.keys, places, lambda: not self._over))
        except OnecopyError as error:
            self._not_had(coming, error)
        else:
            coming.run = Run(records, places)
            coming.done.set()

    def _not_had(self, coming: Coming, error: OnecopyError) -> None:
        LOG.warning("reading rows of %s: %s", self._ask.owner, error.message)
        coming.done.set()

    async def _take_run(self, coming: Coming) -> bool:
        """Whether all of the run was had, so that what comes behind it may be taken."""
        if coming.run is None:
            return False
        for stored, place in zip(coming.run.records, coming.run.places, strict=False):
            await self._take(stored, place)
        return len(coming.run.records) == len(coming.keys)

    async def _place(self, number: int) -> Place | None:
        """A block's own. What is read while the device still makes it would slow that down: both ask for new pages."""
        ask = self._ask
        return await ask.writer.place(ask.segment, ask.first + number) if number < len(ask.keys) else None

    async def _take(self, stored: Stored, place: Place | None) -> None:
        ask = self._ask
        self._read += stored.size
        if stored.kind is not Kind.BLOCK:
            await ask.writer.write_anchor(ask.segment, stored.start + len(stored.tokens), stored.tensors)
            self._anchored = True
            return
        if place is None or stored.tensors is not place.arrays:
            await ask.writer.write_block(ask.segment, ask.first + self._blocks, stored.tensors)
        self._blocks += 1
