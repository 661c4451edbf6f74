"""One restore: records are read and verified ahead, side by side, and handed to the writer in their order."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import trio
from onecopy.runtime.core import Ref
from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.store import Kind, Stored

from .messages.stager import Restore, RestoreReport
from .messages.store import Read

LOG = logging.getLogger("onecopy.store")

AHEAD = 4
"""Records read before the writer has taken them: enough to keep disk and processors busy, and little memory."""


@dataclass(slots=True, eq=False)
class Slot:
    """A record on its way. stored: None when it cannot be had."""

    stored: Stored | None = None
    come: trio.Event = field(default_factory=trio.Event)


class Refill:
    """Ends at the first record that cannot be had; what was written before it counts."""

    def __init__(self, ask: Restore, store: Ref) -> None:
        self._ask = ask
        self._store = store
        self._blocks = 0
        self._read = 0
        self._anchored = False

    async def run(self) -> None:
        send, receive = trio.open_memory_channel[Slot](AHEAD - 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_ahead, nursery, send)
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

    async def _read_ahead(self, nursery: trio.Nursery, send: trio.MemorySendChannel[Slot]) -> None:
        ask = self._ask
        async with send:
            for key in ask.keys if ask.anchor is None else (*ask.keys, ask.anchor[1]):
                slot = Slot()
                await send.send(slot)
                nursery.start_soon(self._fetch, key, slot)

    async def _fetch(self, key: bytes, slot: Slot) -> None:
        try:
            slot.stored = await self._store.ask(Read(key))
        except OnecopyError as error:
            LOG.warning("reading rows of %s: %s", self._ask.owner, error.message)
        slot.come.set()

    async def _write(self, receive: trio.MemoryReceiveChannel[Slot]) -> None:
        async for slot in receive:
            await slot.come.wait()
            if slot.stored is None:
                return
            await self._take(slot.stored)

    async def _take(self, stored: Stored) -> None:
        ask = self._ask
        self._read += stored.size
        if stored.kind is Kind.BLOCK:
            await ask.writer.write_block(ask.segment, ask.first + self._blocks, stored.tensors)
            self._blocks += 1
        else:
            await ask.writer.write_anchor(ask.segment, stored.start + len(stored.tokens), stored.tensors)
            self._anchored = True
