"""The bank: owner of all segments, holds, leases and the memory budget.

It decides on its books and orders the device; orders and rounds go through one queue, so what was granted is there
before it is used. A turn that does not fit waits its turn here, or is refused with the numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import trio
from onecopy.runtime.core import Actor, Reply, handles
from onecopy.runtime.errors import Conflict, InsufficientMemory, NotFound, Overloaded, Unsupported
from onecopy.runtime.rows.ledger import Conversation, Grant, Ledger, Shortage
from onecopy.runtime.rows.ops import RowOp, Trim
from onecopy.runtime.rows.segments import Lease
from onecopy.runtime.seams.clock import Clock
from onecopy.runtime.seams.device import Device

from .keeping import Keeping
from .messages.bank import (
    Admit,
    BankStatistics,
    Commit,
    Find,
    Forget,
    Fork,
    Grow,
    Kept,
    LaneLost,
    ListKept,
    LookedUp,
    Park,
    Parked,
    Pin,
    Release,
    Restored,
    Saved,
    Tokens,
)
from .messages.session import Waiting

LOG = logging.getLogger("onecopy.bank")

QUEUE = 256
"""Turns that may wait for memory: more than this many clients are better told to come back."""

IDLE_SLACK = 2.0
"""Seconds a conversation rests before its unused blocks are given back: an agent's next turn comes sooner than that."""


@dataclass(slots=True, eq=False)
class Queued:
    ask: Admit
    reply: Reply[Grant]
    since: float
    keys: tuple[bytes, ...] = ()


class Bank(Actor):
    """Answers turns with leases. `apply` carries out orders on the device thread; `ledger` is this actor's alone."""

    def __init__(
        self, ledger: Ledger, device: Device, apply: Any, clock: Clock, keeping: Keeping | None = None
    ) -> None:
        super().__init__("bank", work_size=4096)
        self._ledger = ledger
        self._device = device
        self._apply = apply
        self._clock = clock
        self._keeping = keeping
        self._queue: deque[Queued] = deque()
        self._held_for = 0.0
        self._begun: dict[int, float] = {}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            if self._keeping is not None:
                self._keeping.begin(self.ref, nursery)
            nursery.start_soon(self._keep_house)
            await super().run()

    async def stopping(self) -> None:
        """What is not on disk yet goes there; the supervisor bounds how long that may take."""
        if self._keeping is not None:
            await self._keeping.flush()

    async def _keep_house(self) -> None:
        while True:
            await self._clock.sleep(IDLE_SLACK / 2)
            for name in self._ledger.idle_slack(self._clock.now(), IDLE_SLACK):
                self._ledger.trim(name)
            self._order()

    async def after_batch(self) -> None:
        self._order()

    def _order(self) -> None:
        orders: tuple[RowOp, ...] = self._ledger.take_orders()
        if orders:
            self._device.post(self._apply, (*orders, Trim()) if _frees(orders) else orders)

    # --- admission

    @handles(Admit)
    def admit(self, ask: Admit, reply: Reply[Grant]) -> None:
        if self._keeping is not None and self._keeping.worth_a_look(ask):
            self._keeping.look(ask, reply)
        else:
            self._place(Queued(ask, reply, self._clock.now()))

    @handles(LookedUp)
    def looked_up(self, message: LookedUp) -> None:
        if not message.reply.done:
            keys = message.found.keys if message.found is not None else ()
            self._place(Queued(message.ask, message.reply, self._clock.now(), keys))

    @handles(Restored)
    def restored(self, message: Restored) -> None:
        assert self._keeping is not None
        self._hand_over(message.reply, self._keeping.restored(message))

    def _place(self, turn: Queued) -> None:
        """Grants, queues or refuses."""
        got = self._try(turn.ask) if not self._queue else None
        if isinstance(got, Grant):
            self._give(turn, got)
        elif got is None or (self._something_ends() and got.needed <= self._ledger.budget):
            self._enqueue(turn)
        else:
            turn.reply.fail(refusal(got))

    def _something_ends(self) -> bool:
        """Memory will become free without anybody asking: a turn runs, or a save holds rows."""
        return bool(self._ledger.turns) or (self._keeping is not None and self._keeping.busy)

    def _try(self, ask: Admit) -> Grant | Shortage:
        return self._ledger.admit(ask.turn, ask.wanted, ask.conversation, self._clock.now())

    def _give(self, turn: Queued, grant: Grant) -> None:
        self._order()
        self._begun[turn.ask.turn] = self._clock.now()
        if self._keeping is not None and self._keeping.extends(turn.ask, grant, turn.keys):
            self._keeping.restore(turn.ask, turn.reply, grant, turn.keys)
        else:
            self._hand_over(turn.reply, grant)

    def _hand_over(self, reply: Reply[Grant], grant: Grant) -> None:
        if not reply.set(grant):
            self._end(grant.lease.turn, grant.matched)

    def _enqueue(self, turn: Queued) -> None:
        if len(self._queue) >= QUEUE:
            turn.reply.fail(Overloaded(f"{QUEUE} requests already wait for memory.", retry_after=5.0))
            return
        self._queue.append(turn)
        self._tell_positions()

    def _serve_queue(self) -> None:
        """Grants what fits now, in order. The head is never overtaken: a long prompt must not starve."""
        before = len(self._queue)
        while self._queue:
            head = self._queue[0]
            if not head.reply.done:
                got = self._try(head.ask)
                if isinstance(got, Shortage):
                    if self._something_ends():
                        break
                    head.reply.fail(refusal(got))
                else:
                    self._give(head, got)
            self._queue.popleft()
        if len(self._queue) != before:
            self._tell_positions()

    def _close_ranks(self) -> None:
        """Those who left the queue make way: the head may fit now, and the others move up."""
        here = [q for q in self._queue if not q.reply.done]
        if len(here) < len(self._queue):
            self._queue = deque(here)
            self._serve_queue()
            self._tell_positions()

    def _tell_positions(self) -> None:
        each = self._held_for or None
        for i, q in enumerate(self._queue, 1):
            if not q.reply.done and q.ask.asker.alive:
                estimate = None if each is None else each * i / max(1, len(self._ledger.turns))
                with contextlib.suppress(Overloaded):  # a client that does not read hears of a later place
                    q.ask.asker.tell(Waiting(i, estimate))

    # --- a running turn

    @handles(Grow)
    def grow(self, ask: Grow, reply: Reply[Lease | None]) -> None:
        if ask.turn not in self._ledger.turns:
            raise NotFound(f"Turn {ask.turn} has no lease.")
        got = self._ledger.grow(ask.turn, ask.rows)
        self._order()
        reply.set(None if isinstance(got, Shortage) else got)

    @handles(Commit)
    def commit(self, message: Commit) -> None:
        for turn, tokens in message.written:
            if turn in self._ledger.turns:
                self._ledger.commit(turn, tokens)
                self._keep_rows(turn)

    def _keep_rows(self, turn: int) -> None:
        if self._keeping is not None:
            made = self._ledger.turns[turn]
            written = [s for s in made.leaves if s.tokens]
            self._keeping.proven(turn)
            if written:
                self._keeping.after_rows(made.conversation.id, written[-1])

    @handles(Release)
    def release(self, message: Release) -> None:
        self._end(message.turn, message.keep)

    @handles(LaneLost)
    def lane_lost(self, _: LaneLost) -> None:
        for turn in list(self._ledger.turns):
            keep = self._keeping.failed(turn) if self._keeping is not None else None
            self._end(turn, self._ledger.turns[turn].frontier if keep is None else keep)

    def _end(self, turn: int, keep: int) -> None:
        if turn not in self._ledger.turns:
            self._close_ranks()
            return
        now = self._clock.now()
        conversation = self._ledger.turns[turn].conversation
        self._ledger.release(turn, keep, now)
        if self._keeping is not None and conversation.id in self._ledger.conversations:
            self._keeping.save(conversation.id, conversation.tip)
        took = now - self._begun.pop(turn, now)
        self._held_for += (took - self._held_for) / 8 if self._held_for else took
        self._order()
        self._serve_queue()

    # --- conversations

    @handles(ListKept)
    def list_kept(self, _: ListKept, reply: Reply[tuple[Kept, ...]]) -> None:
        reply.set(tuple(self._kept(c) for c in self._ledger.conversations.values()))

    @handles(Find)
    def find(self, ask: Find, reply: Reply[Kept]) -> None:
        reply.set(self._kept(self._known(ask.conversation)))

    @handles(Tokens)
    def tokens(self, ask: Tokens, reply: Reply[tuple[int, ...]]) -> None:
        self._known(ask.conversation)
        reply.set(tuple(self._ledger.tokens_of(ask.conversation)))

    @handles(Pin)
    def pin(self, ask: Pin, reply: Reply[Kept]) -> None:
        found = self._known(ask.conversation)
        found.pinned = ask.on
        reply.set(self._kept(found))

    @handles(Fork)
    def fork(self, ask: Fork, reply: Reply[Kept]) -> None:
        self._known(ask.conversation)
        got = self._ledger.fork(ask.conversation, ask.at, ask.name, self._clock.now())
        self._order()
        if isinstance(got, Shortage):
            raise refusal(got)
        reply.set(self._kept(got))

    @handles(Forget)
    def forget(self, ask: Forget, reply: Reply[None]) -> None:
        found = self._known(ask.conversation)
        if found.tip.lease is not None:
            raise Conflict(f"Session {ask.conversation} has a running turn.")
        self._ledger.forget(ask.conversation)
        self._order()
        self._serve_queue()
        reply.set(None)

    @handles(Saved)
    def saved(self, message: Saved) -> None:
        assert self._keeping is not None
        self._keeping.saved(message)
        self._serve_queue()

    @handles(Park)
    def park(self, ask: Park, reply: Reply[Kept]) -> None:
        found = self._known(ask.conversation)
        if self._kept(found).running:
            raise Conflict(f"Session {ask.conversation} has a running turn.")
        if self._keeping is None:
            raise Unsupported("This server keeps no rows on disk, so there is nowhere to park a session.")
        self._keeping.park(found, reply)

    @handles(Parked)
    def parked(self, message: Parked) -> None:
        found = self._ledger.conversations.get(message.conversation)
        if message.error is not None or found is None:
            message.reply.fail(message.error or NotFound(f"Session {message.conversation} is gone."))
        elif self._kept(found).running:
            message.reply.fail(Conflict(f"Session {message.conversation} has a running turn."))
        else:
            message.reply.set(self._kept(found))
            self._ledger.forget(message.conversation)
            self._order()
            self._serve_queue()

    def _known(self, name: str) -> Conversation:
        if name not in self._ledger.conversations:
            raise NotFound(f"There is no session {name!r}.")
        return self._ledger.conversations[name]

    def _kept(self, c: Conversation) -> Kept:
        running = c.tip.lease is not None or any(t.conversation is c for t in self._ledger.turns.values())
        return Kept(
            c.id,
            c.tip.frontier,
            self._ledger.owned_bytes(c),
            running,
            c.pinned,
            c.used,
            c.created,
            c.tip.depth,
            c.salt,
            c.hint,
        )

    # --- numbers

    @handles(BankStatistics)
    def bank_statistics(self, _: BankStatistics, reply: Reply[dict[str, Any]]) -> None:
        reply.set(self.statistics())

    def statistics(self) -> dict[str, Any]:
        """Bytes used and in the budget; segments, turns, conversations, queue; admissions and copies by kind."""
        books = self._ledger
        return {
            **super().statistics(),
            "bytes_used": books.used,
            "bytes_budget": books.budget,
            "segments": len(books.segments),
            "turns": len(books.turns),
            "conversations": len(books.conversations),
            "queued": len(self._queue),
            "admitted": dict(books.totals.admitted),
            "copied": dict(books.totals.copied),
            "dropped": books.totals.dropped,
            "trimmed": books.totals.trimmed,
            "refused": books.totals.refused,
        }


def refusal(short: Shortage) -> InsufficientMemory:
    """The error a client reads."""
    return InsufficientMemory(
        needed=short.needed,
        available=short.available,
        holders=short.holders,
        largest_prompt=short.largest_prompt,
    )


def _frees(orders: tuple[RowOp, ...]) -> bool:
    return any(type(op).__name__ in ("Drop", "ResizeLayer") for op in orders)
