"""What the bank does with the disk: saves after turns and during long prefills, restores at admission.

Part of the bank, not an actor: it touches the bank's books only from the bank's own task, and reports back to it by
messages. Without a store there is no `Keeping`, and nothing here runs.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import trio
from onecopy.runtime.core import Ref, Reply
from onecopy.runtime.errors import OnecopyError, Unavailable
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ledger import Conversation, Grant, Ledger
from onecopy.runtime.rows.segments import Segment, chain_tokens
from onecopy.runtime.rows.transfer import read_rows, write_rows
from onecopy.runtime.seams.clock import Clock
from onecopy.runtime.seams.device import Device
from onecopy.runtime.store import Tensors

from .messages.bank import Admit, Kept, LookedUp, Parked, Restored, Saved
from .messages.stager import Restore, Save
from .messages.store import Condemn, Lookup

PIN = 60.0
"""Seconds for which blocks found for a prompt are kept from eviction: far longer than any restore takes."""

LOOK = 2.0
"""Seconds a look at the index may take before the turn goes on without it: computing again is never wrong."""

EVERY = 8
"""Blocks of a running prefill between two saves: what a crash can cost, against records written twice for nothing."""

HOLD = "save"


class RowsDoor:
    """The stager's way to rows: finds the segment of a chain that has a block, and reads or writes it on the device."""

    def __init__(self, ledger: Ledger, pool: object, device: Device) -> None:
        self._ledger = ledger
        self._pool = pool
        self._device = device

    async def read_block(self, segment: int, block: int) -> Tensors:
        found = self._segment(segment, block * BLOCK)
        return await self._device.run(read_rows, self._pool, found.id, block * BLOCK, (block + 1) * BLOCK)  # type: ignore[arg-type]

    async def write_block(self, segment: int, block: int, tensors: Tensors) -> None:
        """Rows before the frontier are there already, bit for bit; only those past it are written."""
        found = self._segment(segment, block * BLOCK)
        start = max(block * BLOCK, found.frontier)
        rows = {k: v[:, start - block * BLOCK :] for k, v in tensors.items()}
        await self._device.run(write_rows, self._pool, found.id, start, rows)  # type: ignore[arg-type]

    async def read_anchor(self, segment: int, at: int) -> Tensors:
        start = at // BLOCK * BLOCK
        if at == start:
            return {}
        found = self._segment(segment, start)
        return await self._device.run(read_rows, self._pool, found.id, start, at)  # type: ignore[arg-type]

    async def write_anchor(self, segment: int, at: int, tensors: Tensors) -> None:
        if tensors:
            await self.write_block(segment, at // BLOCK, tensors)

    def _segment(self, leaf: int, position: int) -> Segment:
        if leaf not in self._ledger.segments:
            raise Unavailable("The rows are gone.")
        return next(s for s in self._ledger.segments[leaf].ancestors() if s.start <= position)


class Keeping:
    """Saves and restores for one bank. `bank` hears `LookedUp`, `Restored` and `Saved`."""

    def __init__(self, ledger: Ledger, door: RowsDoor, store: Ref, stager: Ref, clock: Clock) -> None:
        self._ledger = ledger
        self._door = door
        self._store = store
        self._stager = stager
        self._clock = clock
        self._keys: dict[str, tuple[bytes, ...]] = {}
        self._saving: set[str] = set()
        self._fresh: dict[int, tuple[int, tuple[bytes, ...]]] = {}
        self._bank: Ref
        self._nursery: trio.Nursery

    def begin(self, bank: Ref, nursery: trio.Nursery) -> None:
        self._bank = bank
        self._nursery = nursery

    @property
    def busy(self) -> bool:
        """A save is under way: the rows it holds may soon be free to go."""
        return bool(self._saving)

    # --- restores

    def worth_a_look(self, ask: Admit) -> bool:
        """A whole block of the prompt is not in memory."""
        return len(ask.wanted.tokens) > self._ledger.longest(ask.wanted) + BLOCK

    def look(self, ask: Admit, reply: Reply[Grant]) -> None:
        self._nursery.start_soon(self._look, ask, reply)

    async def _look(self, ask: Admit, reply: Reply[Grant]) -> None:
        found = None
        with contextlib.suppress(OnecopyError):
            wish = Lookup(ask.wanted.tokens, ask.wanted.salt, PIN)
            found = await self._store.ask(wish, self._clock.now() + LOOK)
        self._bank.tell(LookedUp(ask, reply, found))

    def extends(self, ask: Admit, grant: Grant, keys: tuple[bytes, ...]) -> bool:
        return min(len(keys), (len(ask.wanted.tokens) - 1) // BLOCK) * BLOCK > grant.matched

    def restore(self, ask: Admit, reply: Reply[Grant], grant: Grant, keys: tuple[bytes, ...]) -> None:
        """Fills the granted rows from disk, then tells the bank. At least the last token is left to compute."""
        usable = keys[: (len(ask.wanted.tokens) - 1) // BLOCK]
        self._nursery.start_soon(self._restore, ask, reply, grant, usable)

    async def _restore(self, ask: Admit, reply: Reply[Grant], grant: Grant, keys: tuple[bytes, ...]) -> None:
        first = grant.matched // BLOCK
        leaf = grant.lease.leaves[-1].segment
        report = None
        with contextlib.suppress(OnecopyError):
            report = await self._stager.ask(Restore(grant.conversation, leaf, first, keys[first:], self._door))
        self._bank.tell(Restored(ask, reply, grant, keys, report))

    def restored(self, message: Restored) -> Grant:
        """Enters restored rows in the books; the grant as it is now."""
        grant, report = message.grant, message.report
        rows = min(report.rows, len(message.keys) * BLOCK) if report is not None else 0
        if rows <= grant.matched or grant.lease.turn not in self._ledger.turns:
            return grant
        self._ledger.commit(grant.lease.turn, message.ask.wanted.tokens[grant.matched : rows])
        self._fresh[grant.lease.turn] = (grant.matched, message.keys)
        return replace(
            grant, matched=rows, how="restored", diverged=max(rows, grant.diverged), restored=rows - grant.matched
        )

    def proven(self, turn: int) -> None:
        """A round ran on restored rows: they are as good as computed ones."""
        self._fresh.pop(turn, None)

    def failed(self, turn: int) -> int | None:
        """The first round on restored rows failed: they are condemned. Rows the turn had before them, else None."""
        if turn not in self._fresh:
            return None
        rows, keys = self._fresh.pop(turn)
        self._store.tell(Condemn(keys[rows // BLOCK :], "the first round on restored rows failed"))
        return rows

    # --- saves

    def dirty(self, leaf: Segment) -> bool:
        return leaf.frontier // BLOCK * BLOCK > leaf.saved

    def after_rows(self, conversation: str, leaf: Segment) -> None:
        """A running turn has written rows: a long prefill is saved as it goes."""
        if leaf.frontier - leaf.saved >= EVERY * BLOCK:
            self.save(conversation, leaf)

    def save(self, conversation: str, leaf: Segment) -> None:
        """Starts a save of whole blocks, unless one runs or nothing is new."""
        if self.dirty(leaf) and conversation not in self._saving:
            leaf.holds[HOLD] = leaf.frontier // BLOCK * BLOCK
            self._saving.add(conversation)
            self._nursery.start_soon(self._save, conversation, leaf, self.wish(conversation, leaf))

    def wish(self, conversation: str, leaf: Segment) -> Save:
        whole = leaf.frontier // BLOCK * BLOCK
        tokens = tuple(chain_tokens(leaf, whole))
        salt = self._ledger.conversations[conversation].salt
        return Save(conversation, tokens, leaf.id, self._door, salt, False, self._keys.get(conversation, ()))

    async def _save(self, conversation: str, leaf: Segment, wish: Save) -> None:
        report = None
        with contextlib.suppress(OnecopyError):
            report = await self._stager.ask(wish)
        self._bank.tell(Saved(conversation, leaf.id, report))

    def saved(self, message: Saved) -> None:
        """The hold goes; what the report names is on disk."""
        self._saving.discard(message.conversation)
        leaf = self._ledger.segments.get(message.segment)
        if leaf is not None:
            leaf.holds.pop(HOLD, None)
        if message.report is None:
            return
        if leaf is not None:
            leaf.saved = max(leaf.saved, min(message.report.rows, leaf.frontier))
        if message.conversation in self._ledger.conversations:
            self._keys[message.conversation] = message.report.keys
        else:
            self._keys.pop(message.conversation, None)

    def park(self, conversation: Conversation, reply: Reply[Kept]) -> None:
        """Saves an idle conversation to its last whole block; the bank hears `Parked`."""
        conversation.tip.holds["park"] = conversation.tip.frontier
        self._nursery.start_soon(self._park, conversation, reply)

    async def _park(self, conversation: Conversation, reply: Reply[Kept]) -> None:
        error: OnecopyError | None = None
        try:
            report = await self._stager.ask(self.wish(conversation.id, conversation.tip))
            if not report.complete:
                error = Unavailable(f"The session could not be written to disk: {report.error}.", retry_after=30.0)
        except OnecopyError as raised:
            error = raised
        conversation.tip.holds.pop("park", None)
        self._keys.pop(conversation.id, None)
        self._bank.tell(Parked(conversation.id, reply, error))

    async def flush(self) -> None:
        """Saves everything dirty, for the end of the process."""
        for c in list(self._ledger.conversations.values()):
            if self.dirty(c.tip):
                with contextlib.suppress(OnecopyError):
                    await self._stager.ask(self.wish(c.id, c.tip))
