"""Planted faults. A harness that cannot see one of these is no harness: each must break a promise under some seed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import trio
from onecopy.actors import lane, running, session
from onecopy.actors.away import OnDisk
from onecopy.actors.bank import Bank
from onecopy.actors.disk_side import DiskSide
from onecopy.actors.keeping import Keeping
from onecopy.actors.messages.lane import Cancel
from onecopy.actors.orders import Orders
from onecopy.actors.rows_door import Filling
from onecopy.actors.rows_store import RowsStore
from onecopy.actors.running import Running
from onecopy.actors.system import System
from onecopy.runtime.core import Mailbox
from onecopy.runtime.decode import verify
from onecopy.runtime.decode.drafts import Verdict
from onecopy.runtime.rows import admission, reclaim
from onecopy.runtime.rows.books import Books
from onecopy.runtime.rows.grants import Turn
from onecopy.runtime.rows.ledger import Ledger
from onecopy.runtime.rows.ops import CopyRows, Drop, Link, ResizeLayer, Trim
from onecopy.runtime.rows.prefixes import Match, Prefixes
from onecopy.runtime.rows.segments import Segment, links

from tests.sim import engine
from tests.sim.disk import SimFile
from tests.sim.found import NO_BUFFER, STATES_LEFT, bank_crashes_at, held_meanwhile, leaves_while_restoring
from tests.sim.run import Report, run_scenario
from tests.sim.scenario import Crash, Scenario, scenario, stored

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault. plant: puts it in while the context lasts. draw: the scenarios that may show it."""

    name: str
    what: str
    plant: Plant
    draw: Callable[[int], Scenario] = scenario


def caught(mutant: Mutant, seeds: range = range(200)) -> Report | None:
    """The first run that breaks a promise with the fault in place; None when no seed shows it."""
    with mutant.plant():
        return next((r for seed in seeds if (r := run_scenario(mutant.draw(seed))).broken), None)


def patch(owner: Any, name: str, new: Any) -> Plant:
    return lambda: mock.patch.object(owner, name, new)


# --- the five of the design


def _held_ignored() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Segment, "held", property(lambda self: self.start))


def _stale_pooled() -> contextlib.AbstractContextManager[Any]:
    right = engine.SimPool.pool

    def stale(self: Any, s: Any, a: int, b: int) -> None:
        before = [layer.entries.copy() for layer in s.layers]
        right(self, s, a, b)
        for layer, old in zip(s.layers, before, strict=True):
            layer.entries[:] = [o if o != engine.GARBAGE else n for o, n in zip(old, layer.entries, strict=True)]

    return mock.patch.object(engine.SimPool, "pool", stale)


def _early_answer() -> contextlib.AbstractContextManager[Any]:
    right = RowsStore.put

    def put(self: RowsStore, ask: Any, reply: Any) -> None:
        right(self, ask, reply)
        reply.set(len(ask.records))

    return mock.patch.object(RowsStore, "put", put)


@contextlib.contextmanager
def _view_alive() -> Iterator[None]:
    right = engine.SimEngine._strip
    views: list[Any] = []

    def kept(self: Any, strip: Any, wants: Any) -> Any:
        out = right(self, strip, wants)
        views[:] = [self.pool.segments[strip.chain.leaf].rows(0)]
        return out

    with mock.patch.object(engine.SimEngine, "_strip", kept):
        yield
    views.clear()


# --- matching, forks, rewinds


def _off_by_one(by: int) -> Plant:
    right = Prefixes.longest

    def wrong(self: Prefixes, tokens: Any, limit: int, salt: bytes) -> Match:
        found = right(self, tokens, limit, salt)
        return replace(found, length=max(1, found.length + by), ends=()) if 1 < found.length < limit else found

    return patch(Prefixes, "longest", wrong)


def _salt_ignored() -> contextlib.AbstractContextManager[Any]:
    longest, update = Prefixes.longest, Prefixes.update
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Prefixes, "longest", lambda s, t, n, salt: longest(s, t, n, b"")))
    stack.enter_context(mock.patch.object(Prefixes, "update", lambda s, segment, salt: update(s, segment, b"")))
    return stack


def _orders(change: Callable[[Any], Any]) -> Plant:
    right = Books.__dict__["copy"], Books.__dict__["resize"]

    def changed(made: Any) -> Any:
        def call(self: Books, *args: Any) -> Any:
            out = made(self, *args)
            self.orders[:] = map(change, self.orders)
            return out

        return call

    def plant() -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(mock.patch.object(Books, "copy", changed(right[0])))
        stack.enter_context(mock.patch.object(Books, "resize", changed(right[1])))
        return stack

    return plant


def _whole_links(segment: Segment, stop: int) -> Any:
    right = links(segment, stop)
    read = reversed(list(segment.ancestors())[: len(right)])
    return tuple(Link(at.segment, at.start, max(at.stop, s.frontier)) for at, s in zip(right, read, strict=True))


def _short_copy(op: Any) -> Any:
    return replace(op, stop=op.stop - 1) if isinstance(op, CopyRows) and op.stop - op.start > 1 else op


def _short_resize(op: Any) -> Any:
    return replace(op, keep=op.keep - 1) if isinstance(op, ResizeLayer) else op


def _hold_comes_late() -> contextlib.AbstractContextManager[Any]:
    """Holds count at admission, but not again when the resize is made."""
    right = admission.execute

    def cutting(books: Books, turn: int) -> str:
        with _held_ignored():
            return right(books, turn)

    return mock.patch.object(admission, "execute", cutting)


# --- recurrent states


def _cut_keeps_state() -> contextlib.AbstractContextManager[Any]:
    right = Books.cut

    def cut(self: Books, s: Segment, stop: int) -> None:
        live = s.live
        right(self, s, stop)
        s.live = live

    return mock.patch.object(Books, "cut", cut)


@contextlib.contextmanager
def _passes_starts() -> Iterator[None]:
    """A chunk goes on past a place where a state is wanted, and what stands at its end is taken for that state."""

    def to_end(self: Running, end: int) -> tuple[int, int | None]:
        mark = next((m for m in self.lease.marks if self.position < m.position <= end), None)
        if mark is None:
            return end, None
        return (end if end < self.prompt else mark.position), mark.anchor

    right = Books.reach_marks

    def reach_marks(self: Books, turn: Turn) -> None:
        first = turn.marks[0] if turn.marks else None
        if first is not None and first.position < turn.frontier:
            turn.marks = turn.marks[1:]
            self.reserved -= self.layout.state_bytes
            s = next(s for s in turn.leaves if s.start < first.position <= s.frontier)
            self._enter_anchor(s, first.position, first.anchor, turn.conversation.salt)
        right(self, turn)

    with mock.patch.object(Running, "_to_mark", to_end), mock.patch.object(Books, "reach_marks", reach_marks):
        yield


def _everybodys(self: Keeping, conversation: Any, leaf: Segment, tokens: tuple[int, ...]) -> Any:
    """States on the way to a conversation's end, and those of others who went on in the same segments."""
    for s in leaf.ancestors():
        yield from ((at, self._door.with_state(s.anchors[at])) for at in s.marks if at <= len(tokens))


async def _never_put_right(self: Any, kept: Any) -> None:
    return None


def _only_segments(self: Ledger) -> Any:
    gone = (*map(Drop, self.segments), Trim())
    self.segments.clear()
    return gone


def _loses_last(self: Ledger) -> Any:
    """The orders, unless it is the end of the books that asks."""
    out, self._books.orders = tuple(self._books.orders), []
    return () if sys._getframe(1).f_code.co_name == "abandon" else out


def _any_weights() -> contextlib.AbstractContextManager[Any]:
    right = System._facts
    return mock.patch.object(System, "_facts", lambda self: {**right(self), "weights": ""})


# --- rounds


def _all_drafts_kept(proposal: Any, picks: Any) -> Verdict:
    right = verify(proposal, picks)
    return Verdict(len(proposal), (*proposal, picks[-1])) if proposal else right


def _row_too_many() -> contextlib.AbstractContextManager[Any]:
    right = running.Running.decoded

    def wrong(self: Any, *given: Any) -> Any:
        brought = right(self, *given)
        return replace(brought, rows=(*brought.rows, brought.picks[-1].token))

    return mock.patch.object(running.Running, "decoded", wrong)


def _neighbours_picks() -> contextlib.AbstractContextManager[Any]:
    right = engine.SimEngine.run

    def wrong(self: Any, strips: Any, wants: Any = ()) -> Any:
        out = right(self, strips, wants)
        same = len({len(p) for p in out.picks}) == 1
        return engine.SimResult(out.picks[::-1]) if same else out

    return mock.patch.object(engine.SimEngine, "run", wrong)


# --- actors


async def _keeps_lease(self: Any) -> None:
    return None


def _drops_when_full() -> contextlib.AbstractContextManager[Any]:
    right = Mailbox.put

    def put(self: Mailbox, envelope: Any) -> None:
        with contextlib.suppress(session.Overloaded):
            right(self, envelope)

    return mock.patch.object(Mailbox, "put", put)


def _replies_forgotten() -> contextlib.AbstractContextManager[Any]:
    right = Mailbox.close

    def close(self: Mailbox, error: Any) -> int:
        self._owed.clear()
        return right(self, error)

    return mock.patch.object(Mailbox, "close", close)


def _repeats_a_block() -> contextlib.AbstractContextManager[Any]:
    right = Filling.write_block

    async def wrong(self: Any, segment: int, block: int, tensors: Any) -> None:
        first = self.__dict__.setdefault("first", tensors)
        same = all(first[name].shape == rows.shape for name, rows in tensors.items())
        await right(self, segment, block, first if same else tensors)

    async def nowhere(self: Any, segment: int, block: int) -> None:
        await trio.lowlevel.checkpoint()

    return mock.patch.multiple(Filling, write_block=wrong, place=nowhere)


def _places_lower() -> contextlib.AbstractContextManager[Any]:
    right = Filling.place

    async def wrong(self: Any, segment: int, block: int) -> Any:
        return await right(self, segment, block - 1)

    return mock.patch.object(Filling, "place", wrong)


def _crashing(seed: int) -> Scenario:
    return replace(scenario(seed), slow=1.0, crashes=(Crash("lane", 3 + seed % 20, after=False),))


def _full(seed: int) -> Scenario:
    return replace(scenario(seed), mailbox=2)


def _of(layout: str) -> Callable[[int], Scenario]:
    return lambda seed: replace(scenario(seed), layout=layout)


def _drafting(seed: int) -> Scenario:
    return replace(scenario(seed), layout="recurrent", drafts=7)


def _failing(seed: int) -> Scenario:
    return replace(scenario(seed), layout="recurrent", fail_after=(3 + seed % 20,))


def _reweighed(seed: int) -> Scenario:
    drawn = stored(seed)
    assert drawn.store is not None
    lives = tuple(replace(life, weights=number, rival=False) for number, life in enumerate(drawn.store.lives))
    return replace(drawn, store=replace(drawn.store, lives=lives))


_all_keys_hold = patch(OnDisk, "upto", lambda self, rows: self)

MUTANTS = (
    Mutant("no fsync", "files are never synced", patch(SimFile, "sync", lambda self: None), stored),
    Mutant("hold ignored", "a segment forgets that others read its rows", _held_ignored),
    Mutant("stale pooled length", "pooled entries outlive the rows they were made from", _stale_pooled),
    Mutant("ack before durable", "answers do not wait for the commit", _early_answer, stored),
    Mutant("view kept alive", "a view of a live buffer survives its round", _view_alive),
    Mutant("match one too long", "a row is taken that was never computed for these tokens", _off_by_one(1)),
    Mutant("match too short", "rows that are there are computed again", _off_by_one(-70), _of("attention")),
    Mutant("salt ignored", "one key's rows serve another key", _salt_ignored),
    Mutant("short fork", "a copy leaves its last row behind", _orders(_short_copy)),
    Mutant("short trim", "giving slack back loses the last row", _orders(_short_resize)),
    Mutant("wrong tail", "a fork reads its ancestor past where it left", patch(admission, "links", _whole_links)),
    Mutant("budget not counted", "every allocation is afforded", patch(admission, "make_room", lambda *a, **k: True)),
    Mutant("reclaims too little", "reclaiming stops half way", patch(reclaim, "_give", lambda books, plan: None)),
    Mutant("rejected draft kept", "a draft stays whatever was picked", patch(running, "verify", _all_drafts_kept)),
    Mutant("row too many", "the last token counts as a row before it is one", _row_too_many),
    Mutant("neighbour's picks", "two conversations of a round get each other's tokens", _neighbours_picks),
    Mutant(
        "lease not returned",
        "a client that leaves takes its lease along",
        patch(session.Session, "stopping", _keeps_lease),
    ),
    Mutant("cancel overtakes begin", "the lane hears of the end first", patch(Cancel, "control", True)),
    Mutant("lost lane ignored", "leases of a crashed lane stay", patch(Bank, "_end", lambda self, turn, keep: None)),
    Mutant("queue not served", "memory that comes back wakes nobody", patch(Bank, "_serve_queue", lambda self: None)),
    Mutant("full mailbox drops", "a message to a full mailbox vanishes", _drops_when_full, _full),
    Mutant("replies forgotten", "an actor that ends answers nobody", _replies_forgotten, _crashing),
    Mutant("restore a block too low", "a block is read into the memory of the one before", _places_lower, stored),
    Mutant("restore repeats a block", "the first block comes back in place of the second", _repeats_a_block, stored),
    Mutant("stale keys", "rows written after a rewind go under the keys of the old ones", _all_keys_hold, stored),
    Mutant(
        "failed order believed",
        "rows count as copied although the device failed to copy them",
        patch(Orders, "_carry_out", lambda self, orders: self._apply(orders)),
        lambda seed: NO_BUFFER,
    ),
    Mutant(
        "hold comes late", "a resize cuts rows that are held since it was granted", _hold_comes_late, held_meanwhile
    ),
    Mutant(
        "cut keeps state",
        "a state that has seen rows that were given up is gone on with",
        _cut_keeps_state,
        _of("recurrent"),
    ),
    Mutant(
        "start passed",
        "a state that has seen the message's first rows is kept as the one before them",
        _passes_starts,
        _of("recurrent"),
    ),
    Mutant(
        "another's waypoint",
        "a state goes to disk under the tokens of a conversation that had left before it",
        patch(Keeping, "_waypoints", _everybodys),
        lambda seed: replace(stored(seed), layout="recurrent"),
    ),
    Mutant(
        "state not put right",
        "a state that has seen rejected drafts is gone on with",
        patch(lane.Lane, "_keep", _never_put_right),
        _drafting,
    ),
    Mutant(
        "doubt ignored",
        "the state of a round that failed late is gone on with",
        patch(Ledger, "doubt", lambda self, turn: None),
        _failing,
    ),
    Mutant(
        "states left behind",
        "a bank that crashed leaves copies of states on the device",
        patch(Ledger, "abandon", _only_segments),
        lambda seed: STATES_LEFT,
    ),
    Mutant(
        "last orders lost",
        "what a bank that crashed was about to give back stays on the device",
        patch(Ledger, "take_orders", _loses_last),
        lambda seed: bank_crashes_at(1 + seed),
    ),
    Mutant("any weights", "rows on disk serve whatever weights computed them", _any_weights, _reweighed),
    Mutant(
        "restore outlives lease",
        "rows from disk go on into a segment that somebody else has",
        patch(DiskSide, "restoring", lambda self, turn: False),
        lambda seed: leaves_while_restoring(0.02 * (1 + seed)),
    ),
)

__all__ = ["MUTANTS", "Mutant", "caught"]
