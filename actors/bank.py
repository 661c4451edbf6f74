"""The bank: owner of all segments, holds, leases and the memory budget.

It decides on its books and orders the device; orders and rounds go through one queue, so what was granted is there
before it is used. A turn that does not fit waits its turn here, or is refused with the numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

import trio
from onecopy.runtime.core import Actor, Reply, handles
from onecopy.runtime.errors import Conflict, InsufficientMemory, LaneCrashed, NotFound, OnecopyError, Overloaded
from onecopy.runtime.rows.ledger import Conversation, Grant, Ledger, Shortage
from onecopy.runtime.rows.segments import Lease
from onecopy.runtime.seams.clock import Clock
from onecopy.runtime.seams.device import Device

from .auditing import Auditing
from .disk_side import NoDisk
from .messages.bank import (
    NOTHING,
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
    Pin,
    Preserve,
    Preserved,
    Release,
    Restored,
    Saved,
    Source,
    Tokens,
)
from .messages.session import Waiting
from .orders import Orders

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
    source: Source = NOTHING


class Bank(Actor):
    """Answers turns with leases. `apply` carries out orders on the device thread; `ledger` is this actor's alone."""

    def __init__(self, ledger: Ledger, device: Device, apply: Any, clock: Clock, disk: NoDisk | None = None) -> None:
        super().__init__("bank", work_size=4096)
        self._ledger = ledger
        self._orders = Orders(ledger, device, apply)
        self._clock = clock
        self._disk = disk or NoDisk()
        self._queue: deque[Queued] = deque()
        self._planned: deque[tuple[Queued, Grant]] = deque()
        self._asked = 0
        self._auditing = Auditing(ledger, clock, lambda: self._handled - self._asked)
        self._held_for = 0.0
        self._begun: dict[int, float] = {}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._disk.begin(self.ref, nursery, self._orders.send)
            nursery.start_soon(self._keep_house)
            await super().run()

    async def stopping(self) -> None:
        """What is not on disk yet goes there; the supervisor bounds how long that may take."""
        await self._disk.flush()

    async def _keep_house(self) -> None:
        while True:
            await self._clock.sleep(IDLE_SLACK / 2)
            for name in self._ledger.idle_slack(self._clock.now(), IDLE_SLACK):
                self._ledger.trim(name)
            self._disk.tend(waiting=bool(self._queue))
            self._orders.send()
            await self._auditing.audit()

    async def after_batch(self) -> None:
        self._execute_planned()
        self._orders.send()

    # --- admission

    @handles(Admit)
    def admit(self, ask: Admit, reply: Reply[Grant]) -> None:
        if self._disk.worth_a_look(ask):
            self._disk.look(ask, reply)
        else:
            self._place(Queued(ask, reply, self._clock.now()))

    @handles(LookedUp)
    def looked_up(self, message: LookedUp) -> None:
        if not message.reply.done:
            self._place(Queued(message.ask, message.reply, self._clock.now(), message.source))

    @handles(Restored)
    def restored(self, message: Restored) -> None:
        grant = self._disk.restored(message)
        if grant is None:
            self._begin_again(message)
        else:
            self._hand_over(message.reply, grant)

    def _begin_again(self, message: Restored) -> None:
        """The turn's rows go, and it is admitted once more, without the disk."""
        turn = self._ledger.turns.get(message.grant.lease.turn)
        if turn is None:
            message.reply.fail(LaneCrashed("The lane restarted before the turn began.", retry_after=1.0))
            return
        self._lost(turn.id, message.grant.matched)
        if turn.conversation.id in self._ledger.conversations:
            self._give_up(turn.conversation)
        if not message.reply.done:
            self._place(Queued(message.ask, message.reply, self._clock.now()))

    def _place(self, turn: Queued) -> None:
        """Grants, queues or refuses."""
        got = self._try(turn) if not self._queue else None
        if isinstance(got, Grant):
            self._give(turn, got)
        elif got is None or (self._something_ends() and got.needed <= self._ledger.budget):
            self._enqueue(turn)
        else:
            self._refuse(turn, got)

    def _refuse(self, turn: Queued, short: Shortage) -> None:
        self._ledger.totals.refused += 1
        turn.reply.fail(refusal(short))

    def _something_ends(self) -> bool:
        """Memory will become free without anybody asking: a turn runs, or a save holds rows."""
        return bool(self._ledger.turns) or self._disk.busy

    def _try(self, turn: Queued) -> Grant | Shortage:
        name = self._disk.name(turn.ask, turn.source)
        got = self._ledger.admit(turn.ask.turn, turn.ask.wanted, name, self._clock.now())
        self._disk.admitted(got)
        return got

    def _give(self, turn: Queued, grant: Grant) -> None:
        self._begun[turn.ask.turn] = self._clock.now()
        if self._ledger.turns[turn.ask.turn].plan is not None:
            self._planned.append((turn, grant))
        else:
            self._begin(turn, grant)

    def _execute_planned(self) -> None:
        """Resizes are decided on again after the batch they were granted in: rows may be held since that they cut."""
        while self._planned:
            turn, grant = self._planned.popleft()
            if turn.ask.turn in self._ledger.turns:
                self._begin(turn, self._ledger.executed(grant))
            else:
                turn.reply.fail(LaneCrashed("The lane restarted before the turn began.", retry_after=1.0))

    def _begin(self, turn: Queued, grant: Grant) -> None:
        self._orders.send()
        if self._disk.extends(turn.ask, grant, turn.source):
            self._disk.restore(turn.ask, turn.reply, grant, turn.source)
        else:
            self._hand_over(turn.reply, grant)

    def _hand_over(self, reply: Reply[Grant], grant: Grant) -> None:
        grant = replace(grant, written=self._disk.written(grant.conversation))
        if not reply.set(grant):
            self._end(grant.lease.turn, grant.matched)

    def _enqueue(self, turn: Queued) -> None:
        if len(self._queue) >= QUEUE:
            turn.reply.fail(Overloaded(f"{QUEUE} requests already wait for memory.", retry_after=5.0))
            return
        self._queue.append(turn)
        self._ledger.totals.waited += 1
        self._tell_positions()

    def _serve_queue(self) -> None:
        """Grants what fits now, in order. The head is never overtaken: a long prompt must not starve."""
        before = len(self._queue)
        while self._queue:
            head = self._queue[0]
            if not head.reply.done:
                got = self._try(head)
                if isinstance(got, Shortage):
                    if self._something_ends():
                        break
                    self._refuse(head, got)
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
        self._orders.send()
        reply.set(None if isinstance(got, Shortage) else got)

    @handles(Commit)
    def commit(self, message: Commit) -> None:
        for turn, tokens in message.written:
            if turn in self._ledger.turns:
                self._ledger.commit(turn, tokens)
                self._disk.after_rows(self._ledger.turns[turn])

    @handles(Release)
    def release(self, message: Release) -> None:
        if message.broken:
            self._lost(message.turn, message.keep)
        else:
            self._end(message.turn, message.keep)

    @handles(LaneLost)
    def lane_lost(self, _: LaneLost) -> None:
        for turn in list(self._ledger.turns):
            self._lost(turn, self._ledger.turns[turn].frontier)
        for conversation in [c for c in self._ledger.conversations.values() if self._orders.spoilt(c)]:
            self._give_up(conversation)
        self._orders.settle()
        self._after_drop()

    def _give_up(self, conversation: Conversation) -> None:
        self._ledger.forget(conversation.id)
        self._disk.left(conversation)

    def _lost(self, turn: int, keep: int) -> None:
        """Its round failed: rows of committed rounds stay, restored ones that no round ran on yet do not."""
        self._ledger.doubt(turn)
        unproven = self._disk.failed(turn)
        self._end(turn, keep if unproven is None else min(keep, unproven))

    def _end(self, turn: int, keep: int) -> None:
        if turn not in self._ledger.turns or self._disk.restoring(turn):
            # Rows on their way from disk go to this lease's segments: it ends when they are there.
            self._close_ranks()
            return
        now = self._clock.now()
        conversation = self._ledger.turns[turn].conversation
        self._ledger.release(turn, keep, now)
        if conversation.id in self._ledger.conversations and self._orders.spoilt(conversation):
            self._give_up(conversation)
        else:
            self._disk.ended(turn, conversation)
        took = now - self._begun.pop(turn, now)
        self._held_for += (took - self._held_for) / 8 if self._held_for else took
        self._orders.send()
        self._serve_queue()

    # --- conversations

    @handles(ListKept)
    def list_kept(self, _: ListKept, reply: Reply[tuple[Kept, ...]]) -> None:
        self._asked += 1
        reply.set((*map(self._kept, self._ledger.conversations.values()), *self._disk.away))

    @handles(Find)
    def find(self, ask: Find, reply: Reply[Kept]) -> None:
        parked = self._disk.away.get(ask.conversation)
        reply.set(parked or self._kept(self._known(ask.conversation)))

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
        self._orders.send()
        if isinstance(got, Shortage):
            raise refusal(got)
        reply.set(self._kept(got))

    @handles(Forget)
    def forget(self, ask: Forget, reply: Reply[None]) -> None:
        parked = self._disk.away.get(ask.conversation)
        if parked is None:
            found = self._idle(ask.conversation)
            self._ledger.forget(ask.conversation)
            parked = self._disk.left(found)
        self._disk.away.remove(ask.conversation)
        self._disk.erase(parked.tip if parked is not None else b"", reply)
        self._after_drop()

    def _after_drop(self) -> None:
        self._orders.send()
        self._serve_queue()

    @handles(Saved)
    def saved(self, message: Saved) -> None:
        self._disk.saved(message)
        self._serve_queue()

    @handles(Preserve)
    def preserve(self, ask: Preserve, reply: Reply[Kept]) -> None:
        parked = self._disk.away.get(ask.conversation)
        if parked is not None:
            reply.set(parked)
        else:
            self._disk.preserve(self._idle(ask.conversation), reply, ask.forget)

    @handles(Preserved)
    def preserved(self, message: Preserved) -> None:
        """It may have been used again meanwhile: then it stays."""
        try:
            found = self._disk.preserved(message)
            kept = self._kept(self._idle(found.id))
        except OnecopyError as error:
            message.reply.fail(error)
            return
        if message.forget and not found.pinned:
            self._ledger.forget(found.id)
            kept = self._disk.left(found) or kept
        message.reply.set(kept)
        self._after_drop()

    def _idle(self, name: str) -> Conversation:
        """A conversation without a turn. NotFound, Conflict."""
        found = self._known(name)
        if self._kept(found).running:
            raise Conflict(f"Session {name} has a running turn.")
        return found

    def _known(self, name: str) -> Conversation:
        if self._disk.away.get(name) is not None:
            raise Conflict(f"Session {name} is on disk only; its next turn brings it back.")
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
            tip=self._disk.on_disk(c).tip,
        )

    # --- numbers

    @handles(BankStatistics)
    def bank_statistics(self, _: BankStatistics, reply: Reply[dict[str, Any]]) -> None:
        self._asked += 1
        reply.set(self.statistics())

    def statistics(self) -> dict[str, Any]:
        """Bytes used and in the budget; segments, turns, conversations, queue; admissions with their price, and copies,
        by kind; what audits found."""
        books = self._ledger
        return {
            **super().statistics(),
            "bytes_used": books.used,
            "bytes_budget": books.budget,
            "segments": len(books.segments),
            "turns": len(books.turns),
            "conversations": len(books.conversations),
            "queued": len(self._queue),
            **asdict(books.totals),
            "audits": self._auditing.audits,
            "broken_laws": self._auditing.found,
            "broken": self._auditing.broken,
        }


def refusal(short: Shortage) -> InsufficientMemory:
    """The error a client reads."""
    return InsufficientMemory(
        needed=short.needed,
        available=short.available,
        holders=short.holders,
        largest_prompt=short.largest_prompt,
    )
