"""What the bank does with the disk at admission: looks, restores, and condemns what cannot be computed on.

Part of the bank, not an actor: it touches the bank's books only from the bank's own task, and reports back to it by
messages.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import trio
from onecopy.runtime.core import Ref, Reply
from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ledger import Grant, Ledger
from onecopy.runtime.seams.clock import Clock
from onecopy.runtime.store import Found

from .messages.bank import NOTHING, Admit, LookedUp, Restored, Source
from .messages.stager import Restore
from .messages.store import Condemn, Lookup
from .rows_door import RowsDoor

PIN = 60.0
"""Seconds for which blocks found for a prompt are kept from eviction: far longer than any restore takes."""

LOOK = 2.0
"""Seconds a look at the index may take before the turn goes on without it: computing again is never wrong."""


class Restoring:
    """`bank` hears `LookedUp` and `Restored`. under_way: turns whose rows are being filled."""

    def __init__(self, ledger: Ledger, door: RowsDoor, store: Ref, stager: Ref, clock: Clock) -> None:
        self._ledger = ledger
        self._door = door
        self._store = store
        self._stager = stager
        self._clock = clock
        self.under_way: set[int] = set()
        self._unproven: dict[int, tuple[int, Source]] = {}
        self._bank: Ref
        self._nursery: trio.Nursery

    def begin(self, bank: Ref, nursery: trio.Nursery) -> None:
        self._bank = bank
        self._nursery = nursery

    def worth_a_look(self, ask: Admit) -> bool:
        """More of the prompt is missing in memory than a look costs."""
        return len(ask.wanted.tokens) > self._ledger.longest(ask.wanted) + BLOCK // 4

    def look(self, ask: Admit, reply: Reply[Grant]) -> None:
        self._nursery.start_soon(self._look, ask, reply)

    async def _look(self, ask: Admit, reply: Reply[Grant]) -> None:
        found = None
        with contextlib.suppress(OnecopyError):
            wish = Lookup(ask.wanted.tokens, ask.wanted.salt, PIN)
            found = await self._store.ask(wish, self._clock.now() + LOOK)
        self._bank.tell(LookedUp(ask, reply, self._source(found, len(ask.wanted.tokens))))

    def _source(self, found: Found | None, prompt: int) -> Source:
        return (resumable_source if self._ledger.layout.recurrent else source_of)(found, prompt)

    def extends(self, ask: Admit, grant: Grant, source: Source) -> bool:
        """The disk has at least one row that the grant has not, beside the last one, which is always computed."""
        return min(source.rows, len(ask.wanted.tokens) - 1) > grant.matched

    def restore(self, ask: Admit, reply: Reply[Grant], grant: Grant, source: Source) -> None:
        """Fills the granted rows from disk, then tells the bank."""
        self.under_way.add(grant.lease.turn)
        self._nursery.start_soon(self._restore, ask, reply, grant, source)

    async def _restore(self, ask: Admit, reply: Reply[Grant], grant: Grant, source: Source) -> None:
        first = grant.matched // BLOCK
        leaf = grant.lease.leaves[-1].segment
        wish = Restore(grant.conversation, leaf, first, source.keys[first:], self._door.filling(), source.anchor)
        report = None
        with contextlib.suppress(OnecopyError):
            report = await self._stager.ask(wish)
        self._bank.tell(Restored(ask, reply, grant, source, report))

    def restored(self, message: Restored) -> Grant | None:
        """Enters restored rows in the books; the grant as it is now. None when nobody knows how far it came and a
        recurrent state may stand in the turn's buffers that is not the one behind its rows."""
        self.under_way.discard(message.grant.lease.turn)
        if message.report is None and self._ledger.layout.recurrent:
            return None
        grant, report, tokens = message.grant, message.report, message.ask.wanted.tokens
        rows = min(report.rows, len(tokens) - 1) if report is not None else 0
        if self._ledger.layout.recurrent and (report is None or not report.anchor):
            rows = 0
        if rows <= grant.matched or grant.lease.turn not in self._ledger.turns:
            return grant
        grant = replace(grant, lease=self._ledger.unmark(grant.lease.turn, rows))
        self._ledger.commit(grant.lease.turn, tokens[grant.matched : rows])
        self._ledger.from_disk(grant.lease.turn)
        leaf = next(s for s in reversed(self._ledger.turns[grant.lease.turn].leaves) if s.tokens)
        leaf.saved = max(leaf.saved, rows)
        self._unproven[grant.lease.turn] = (grant.matched, message.source)
        return replace(
            grant, matched=rows, how="restored", diverged=max(rows, grant.diverged), restored=rows - grant.matched
        )

    def proven(self, turn: int) -> None:
        """A round ran on restored rows, or nobody will try: they are as good as computed ones."""
        self._unproven.pop(turn, None)

    def failed(self, turn: int) -> int | None:
        """The first round on restored rows failed: they are condemned. Rows the turn had before them, else None."""
        if turn not in self._unproven:
            return None
        rows, source = self._unproven.pop(turn)
        keys = (*source.keys[rows // BLOCK :], *([source.anchor[1]] if source.anchor else []))
        self._store.tell(Condemn(keys, "the first round on restored rows failed"))
        return rows


def source_of(found: Found | None, prompt: int) -> Source:
    """What of the found rows is worth reading for a prompt of that many tokens: its blocks, then the longest state."""
    if found is None:
        return NOTHING
    keys = found.keys[: prompt // BLOCK]
    whole = len(keys) * BLOCK
    anchor = next((a for a in found.anchors if whole < a[0] <= prompt), None)
    return Source(keys, anchor if anchor is not None and anchor[0] // BLOCK == len(keys) else None)


def resumable_source(found: Found | None, prompt: int) -> Source:
    """For a recurrent model: the latest state from which at least one token is left to compute, and the blocks up to
    it."""
    if found is None:
        return NOTHING
    anchor = next((a for a in found.anchors if a[0] < prompt and a[0] // BLOCK <= len(found.keys)), None)
    return NOTHING if anchor is None else Source(found.keys[: anchor[0] // BLOCK], anchor)
