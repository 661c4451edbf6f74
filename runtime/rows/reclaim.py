"""Making room: what can be given up, in which order, and whether it is enough before anything is touched.

Order: unused blocks of idle segments, recurrent states before the latest two of idle conversations, idle conversations
that are on disk, the others once `before_drop` agrees; the longest unused first. Never a held row, nor the chain that
the incoming turn is about to use. The allocator's own pool goes back to the system with what was freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from . import pricing
from .books import ANCHORS, Books, rows_needed
from .grants import Conversation, Shortage, count
from .layout import round_up
from .ops import Trim
from .pricing import Resize
from .segments import Segment

ADMISSION = "admission"
"""Holder of the chain that an incoming turn is about to use."""


@dataclass(slots=True)
class Giving:
    """What is to be given up: segments to tidy, in order, then states, then conversations to forget.

    states: positions of anchors by segment. freed: bytes it makes.
    """

    tidied: dict[int, int] = field(default_factory=dict)
    states: dict[int, list[int]] = field(default_factory=dict)
    forgotten: list[Conversation] = field(default_factory=list)
    freed: int = 0


def make_room(books: Books, needed: int | None, keep: Segment | None, hard: bool = True) -> bool:
    """Whether `needed` bytes are available, after giving up idle rows if `hard`; never any of `keep`'s chain.

    None is a way that is impossible. Nothing is given up when it would not be enough. Whoever goes on to use a chain
    without a conversation at its end has it `protected` itself until then.
    """
    if needed is None or needed <= books.available:
        return needed is not None
    if not hard:
        return False
    with protected(keep):
        if needed > books.available + _reclaimable(books, keep):
            return False
        giving = _plan(books, needed, keep)
        if giving is None:
            return False
        _give(books, giving)
    return needed <= books.available


def shortage(books: Books, rows: int, keep: Segment | None) -> Shortage:
    """The numbers of a refusal of `rows` new rows beside `keep`'s chain."""
    with protected(keep):
        free = max(0, books.available + _reclaimable(books, keep))
    alone = max(0, books.available + _reclaimable(books, None))
    needed = books.size(round_up(rows))
    pending = free - max(0, books.available) if free >= needed else 0
    fit = pricing.largest_prompt(books.layout, alone, books.rounding)
    return Shortage(needed, free - pending, len(books.turns), fit, pending)


@contextmanager
def protected(s: Segment | None) -> Iterator[None]:
    """Inside, nothing of this chain is given up. Afterwards it goes if nobody has come to need it."""
    if s is None or ADMISSION in s.holds:
        yield
        return
    s.holds[ADMISSION] = s.frontier
    try:
        yield
    finally:
        del s.holds[ADMISSION]


# --- what there is


def _reclaimable(books: Books, keep: Segment | None) -> int:
    """Unlocked bytes, and what locked idle segments give back: an upper bound that costs no walk over segments."""
    tidied = _tidied(books, books.budget, keep)
    locked = (books.segments[n] for n in tidied if books.segments[n].locks)
    return books.used - books.locked + sum(books.size(s.capacity) - books.size(tidied[s.id]) for s in locked)


def _tidied(books: Books, needed: int, keep: Segment | None) -> dict[int, int]:
    """Segments to tidy and the capacity each is left with, until `needed` bytes would be available."""
    out: dict[int, int] = {}
    available = books.available
    tips = (books.conversations[name].tip for name in books.slack)
    for s in (*tips, *books.loose.values()):
        if available >= needed:
            break
        rows = rows_needed(s)
        price = books.bill(Resize(s.capacity, rows, 0))
        if s is not keep and s.lease is None and rows < s.capacity and price is not None and price <= available:
            out[s.id] = rows
            available += books.size(s.capacity) - books.size(rows)
    return out


def _plan(books: Books, needed: int, keep: Segment | None) -> Giving | None:
    """What to give up for `needed` bytes; None when a save has to come first."""
    plan = Giving(_tidied(books, needed, keep))
    plan.freed = sum(books.size(books.segments[n].capacity) - books.size(rows) for n, rows in plan.tidied.items())
    for s, position in _older_states(books):
        if books.available + plan.freed >= needed:
            break
        if s.id in plan.tidied and s.tip is None and position > s.held:
            continue  # it goes with the rows that are tidied away
        plan.states.setdefault(s.id, []).append(position)
        plan.freed += books.layout.state_bytes
    left: dict[int, int] = {}
    for c, safe in _victims(books):
        if books.available + plan.freed >= needed:
            break
        if safe or books.before_drop(c):
            plan.forgotten.append(c)
            plan.freed += sum(_weight(books, s, plan) for s in _freed_with(c, left))
    return plan if books.available + plan.freed >= needed else None


def _older_states(books: Books) -> Iterator[tuple[Segment, int]]:
    """Anchors of idle conversations that an edit of a late message would not go back to, longest unused first.

    Not those of a segment that somebody needs: an admission may be about to go on from one.
    """
    for c in _unlocked(books) if books.layout.recurrent else ():
        anchors = [*books.own_anchors(c.tip), *((c.tip, position) for position in c.tip.marks)]
        older = sorted(anchors, key=lambda anchor: anchor[1])[:-ANCHORS]
        yield from ((s, position) for s, position in older if not s.locks)


def _victims(books: Books) -> Iterator[tuple[Conversation, bool]]:
    """Idle conversations that may go, and whether they are on disk: those first, then the others, oldest first."""
    if books.safe:
        yield from ((c, True) for c in _unlocked(books) if c.id in books.safe)
    yield from ((c, False) for c in _unlocked(books) if c.id not in books.safe)


def _unlocked(books: Books) -> Iterator[Conversation]:
    return (c for c in map(books.conversations.__getitem__, books.idle) if c.tip.locks == 0)


def _freed_with(c: Conversation, left: dict[int, int]) -> Iterator[Segment]:
    """Segments that go with a conversation once those chosen before are gone. left: uses that remain, by segment."""
    s: Segment | None = c.tip
    while s is not None and not s.locks:
        uses = len(s.children) + (s.tip is not None)
        left[s.id] = left.get(s.id, uses) - 1
        if left[s.id]:
            return
        yield s
        s = s.parent


def _weight(books: Books, s: Segment, plan: Giving) -> int:
    saved_before = books.size(s.capacity) - books.size(plan.tidied.get(s.id, s.capacity))
    return books.weight(s) - saved_before - len(plan.states.get(s.id, ())) * books.layout.state_bytes


# --- giving it up


def _give(books: Books, plan: Giving) -> None:
    for n in plan.tidied:
        tidy(books, books.segments[n])
    for n, positions in plan.states.items():
        for position in positions:
            books.drop_anchor(books.segments[n], position)
    for c in plan.forgotten:
        books.forget(c)
        books.totals.dropped += 1
    books.orders.append(Trim())


def tidy(books: Books, s: Segment) -> int:
    """Cuts the rows nobody needs and gives back the blocks they leave: bytes gained."""
    if s.tip is None:
        books.cut(s, s.held)
        books.loose.pop(s.id, None)
    gained = _shrink(books, s)
    if s.tip is not None:
        books.note_slack(books.conversations[s.tip])
    return gained


def _shrink(books: Books, s: Segment) -> int:
    """Moves a segment to buffers of the blocks it needs, one layer at a time, if the peak is available."""
    way = Resize(s.capacity, rows_needed(s), len(s.tokens), s.held - s.start)
    price = books.bill(way)
    if s.lease is not None or way.rows >= s.capacity or price is None or price > books.available:
        return 0
    count(books.totals.copied, "trim", len(s.tokens) * books.layout.row_bytes)
    books.totals.trimmed += 1
    return -books.resize(s, way.rows)
