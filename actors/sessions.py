"""Conversations as the doors see them: in memory, parked, or on disk from an earlier run. One name for each.

A conversation that only the disk has is known by the key of its last record: its name died with the process that
knew it. It belongs to a salt that asked something of this process, or to nobody who can see it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from onecopy.runtime.core import Ref
from onecopy.runtime.errors import Conflict, NotFound, OnecopyError, Unsupported
from onecopy.runtime.seams.clock import Clock

from .messages.bank import Find, Forget, Fork, Kept, ListKept, Pin, Preserve
from .messages.stager import KeysInFlight
from .messages.store import DropConversation, Export, Import, ListOwned, Owned
from .service import SessionInfo

STORED = "d_"
"""How the id of a conversation begins that has no name."""

SALTS = 1024
"""Salts remembered, the latest."""


class Sessions:
    """store, stager: None without a disk. new_id: a fresh id that begins as told."""

    def __init__(
        self, bank: Ref, store: Ref | None, stager: Ref | None, clock: Clock, new_id: Callable[[str], str]
    ) -> None:
        self._bank = bank
        self._store = store
        self._stager = stager
        self._clock = clock
        self._new_id = new_id
        self._salts: OrderedDict[bytes, None] = OrderedDict({b"": None})

    def met(self, salt: bytes) -> None:
        """Somebody with this salt is here: conversations on disk may be theirs."""
        self._salts[salt] = None
        self._salts.move_to_end(salt)
        if len(self._salts) > SALTS:
            self._salts.popitem(last=False)

    async def all(self) -> Sequence[SessionInfo]:
        # In this order: what is saved meanwhile is in the bank's books by then.
        stored = await self._stored()
        known = set(await self._in_flight())
        kept = await self._bank.ask(ListKept())
        known.update(k.tip for k in kept)
        stored = tuple(o for o in stored if known.isdisjoint((o.conversation.tip, o.conversation.block)))
        return [*map(self._info, kept), *map(_stored_info, stored)]

    async def one(self, id: str) -> SessionInfo:
        if id.startswith(STORED):
            return _stored_info(await self._find(id))
        return self._info(await self._bank.ask(Find(id)))

    async def pin(self, id: str, on: bool) -> SessionInfo:
        self._in_memory(id)
        return self._info(await self._bank.ask(Pin(id, on)))

    async def park(self, id: str) -> SessionInfo:
        if id.startswith(STORED):
            return await self.one(id)
        return self._info(await self._bank.ask(Preserve(id, forget=True)))

    async def fork(self, id: str, at: int | None) -> SessionInfo:
        self._in_memory(id)
        return self._info(await self._bank.ask(Fork(id, at, self._new_id("s_"))))

    async def export(self, id: str) -> bytes:
        store = self._on_disk()
        if id.startswith(STORED):
            tip = (await self._find(id)).conversation.tip
        else:
            tip = (await self._bank.ask(Preserve(id, forget=False))).tip
        return await store.ask(Export(tip))

    async def import_(self, data: bytes, salt: bytes) -> SessionInfo:
        store = self._on_disk()
        self.met(salt)
        return await self.one(_id(await store.ask(Import(data, salt))))

    async def drop(self, id: str) -> None:
        if id.startswith(STORED):
            await self._on_disk().ask(DropConversation((await self._find(id)).conversation.tip))
        else:
            await self._bank.ask(Forget(id))

    # --- inside

    def _on_disk(self) -> Ref:
        if self._store is None:
            raise Unsupported("This server keeps no rows on disk, so sessions cannot be moved.")
        return self._store

    def _in_memory(self, id: str) -> None:
        if id.startswith(STORED):
            raise Conflict(f"Session {id} is on disk only; its next turn brings it back.")

    async def _stored(self) -> tuple[Owned, ...]:
        """Empty when the disk cannot be asked: what is in memory can be listed all the same."""
        if self._store is not None:
            with contextlib.suppress(OnecopyError):
                return await self._store.ask(ListOwned(tuple(self._salts)))
        return ()

    async def _in_flight(self) -> frozenset[bytes]:
        if self._stager is not None:
            with contextlib.suppress(OnecopyError):
                return await self._stager.ask(KeysInFlight())
        return frozenset()

    async def _find(self, id: str) -> Owned:
        found = next((o for o in await self._stored() if _id(o.conversation.tip) == id), None)
        if found is None:
            raise NotFound(f"There is no session {id!r}.")
        return found

    def _info(self, kept: Kept) -> SessionInfo:
        return SessionInfo(
            kept.id,
            "parked" if kept.parked else "running" if kept.running else "idle",
            kept.tokens,
            kept.owned,
            self._clock.wall() - (self._clock.now() - kept.used),
            pinned=kept.pinned,
            hint=kept.hint,
            salt=kept.salt,
            details={"segments": kept.depth},
        )


def _id(tip: bytes) -> str:
    return STORED + tip.hex()[:24]


def _stored_info(owned: Owned) -> SessionInfo:
    found = owned.conversation
    details = {"disk_bytes": found.size, "disk_bytes_own": found.size_own}
    return SessionInfo(_id(found.tip), "parked", found.tokens, 0, float(found.used), salt=owned.salt, details=details)
