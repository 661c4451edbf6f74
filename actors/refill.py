"""One restore: runs of records are read and verified, and while one is written the next is on its way."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import trio
from onecopy.runtime.core import Ref
from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.store import Kind, Stored, Tensors

from .messages.stager import Restore, RestoreReport
from .messages.store import Read

LOG = logging.getLogger("onecopy.store")

RUN = 4
"""Records read by one call: enough for a disk to go forward, and what a cancel may have to wait for."""


@dataclass(frozen=True, slots=True)
class Run:
    """Records as they came. rooms: where each was to be read to; None for what has no place of its own."""

    records: tuple[Stored, ...]
    rooms: tuple[Tensors | None, ...]


class Refill:
    """Ends at the first record that cannot be had; what was written before it counts."""

    def __init__(self, ask: Restore, store: Ref) -> None:
        self._ask = ask
        self._store = store
        self._blocks = 0
        self._read = 0
        self._anchored = False
        self._made = False

    async def run(self) -> None:
        send, receive = trio.open_memory_channel[Run](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_ahead, send)
            nursery.start_soon(self._see_memory)
            try:
                await self._write(receive)
            except OnecopyError as error:
                LOG.warning("restoring %s stopped after %d blocks: %s", self._ask.owner, self._blocks, error.message)
            nursery.cancel_scope.cancel()

    def report(self, seconds: float) -> RestoreReport:
        ask = self._ask
        blocks = (ask.first + self._blocks) * BLOCK
        rows = ask.anchor[0] if self._anchored and ask.anchor is not None else blocks
        return RestoreReport(rows, self._anchored, self._blocks, self._read, seconds)

    async def _read_ahead(self, send: trio.MemorySendChannel[Run]) -> None:
        keys = self._ask.keys if self._ask.anchor is None else (*self._ask.keys, self._ask.anchor[1])
        async with send:
            for first in range(0, len(keys), RUN):
                wanted = keys[first : first + RUN]
                try:
                    run = await self._fetch(first, wanted)
                except OnecopyError as error:
                    LOG.warning("reading rows of %s: %s", self._ask.owner, error.message)
                    return
                await send.send(run)
                if len(run.records) < len(wanted):
                    return

    async def _fetch(self, first: int, keys: tuple[bytes, ...]) -> Run:
        rooms = tuple([await self._room(n) for n in range(first, first + len(keys))])
        return Run(await self._store.ask(Read(keys, rooms)), rooms)

    async def _see_memory(self) -> None:
        """The device answers when it has made the memory."""
        with contextlib.suppress(OnecopyError):
            await self._ask.writer.room(self._ask.segment, self._ask.first)
            self._made = True

    async def _room(self, number: int) -> Tensors | None:
        """The first runs have none: they are read while the device is still making the memory."""
        ask = self._ask
        placed = self._made and number < len(ask.keys)
        return await ask.writer.room(ask.segment, ask.first + number) if placed else None

    async def _write(self, receive: trio.MemoryReceiveChannel[Run]) -> None:
        async for run in receive:
            for stored, room in zip(run.records, run.rooms, strict=False):
                await self._take(stored, room)

    async def _take(self, stored: Stored, room: Tensors | None) -> None:
        ask = self._ask
        self._read += stored.size
        if stored.kind is not Kind.BLOCK:
            await ask.writer.write_anchor(ask.segment, stored.start + len(stored.tokens), stored.tensors)
            self._anchored = True
            return
        if stored.tensors is not room:
            await ask.writer.write_block(ask.segment, ask.first + self._blocks, stored.tensors)
        self._blocks += 1
