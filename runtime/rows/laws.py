"""Conservation laws of the books, as sentences for those that do not hold. Reads only; costs a walk over everything.

Books that are wrong would give somebody wrong rows, so whoever finds them wrong had better begin again from disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from .books import Books, rows_needed
from .grants import Conversation, Turn
from .layout import BLOCK
from .segments import Segment


def broken_laws(books: Books) -> list[str]:
    """What is wrong; empty when all laws hold. O(segments + conversations)."""
    return [sentence for sentence in laws(books) if sentence is not None]


def laws(books: Books) -> Iterator[str | None]:
    """What is wrong, as sentences, with a None after each thing looked at: whoever goes over large books can pause
    there, as long as the books stay as they are."""
    yield from _sums(books)
    for s in books.segments.values():
        yield from _segment(books, s)
        yield None
    for c in books.conversations.values():
        yield from _conversation(books, c)
        yield None
    for turn in books.turns.values():
        yield from _turn(turn)


def _sums(books: Books) -> Iterator[str]:
    held = sum(books.weight(s) for s in books.segments.values()) + len(books.states) * books.layout.state_bytes
    kept = sum(len(s.anchors) for s in books.segments.values())
    if kept != len(books.anchors):
        yield f"{len(books.anchors)} anchors can be found, the segments have {kept}"
    if held != books.used:
        yield f"{books.used} bytes are accounted for, the segments have {held}"
    locked = sum(books.weight(s) for s in books.segments.values() if s.locks)
    if locked != books.locked:
        yield f"{books.locked} bytes are accounted for as locked, there are {locked}"
    reserved = sum(t.plan.reserved for t in books.turns.values() if t.plan is not None)
    reserved += sum(len(t.marks) for t in books.turns.values()) * books.layout.state_bytes
    if reserved != books.reserved:
        yield f"{books.reserved} bytes are set aside, plans have {reserved}"
    if books.available < 0:
        yield f"{books.used} bytes are in use and {reserved} set aside, the budget is {books.budget}"
    leased = {s.id for s in books.segments.values() if s.lease is not None}
    written = {s.id for turn in books.turns.values() for s in turn.leaves}
    if leased != written:
        yield f"leases and turns disagree about segments {sorted(leased ^ written)}"
    if set(books.idle) != set(books.conversations) - {t.conversation.id for t in books.turns.values()}:
        yield "idle conversations are not those without a turn"


def _segment(books: Books, s: Segment) -> Iterator[str]:
    if s.start % BLOCK or s.capacity % BLOCK or len(s.tokens) > s.capacity:
        yield f"segment {s.id} has {len(s.tokens)} rows in {s.capacity} from {s.start}"
    if s.held > s.frontier and s.lease is None:
        yield f"rows up to {s.held} of segment {s.id} are held, it has {s.frontier}"
    if s.free:
        yield f"nobody needs segment {s.id}"
    if s.saved > s.frontier:
        yield f"{s.saved} rows of segment {s.id} are on disk, it has {s.frontier}"
    if any(not s.start < at <= s.frontier for at in s.anchors) or not s.marks <= s.anchors.keys():
        yield f"segment {s.id} has an anchor outside its rows"
    locks = len(s.holds) + (s.lease is not None) + _pinned(books, s) + sum(c.locks for c in s.children)
    if s.locks != locks:
        yield f"segment {s.id} counts {s.locks} locks, there are {locks}"
    if s.tip is not None and s.tip not in books.conversations:
        yield f"segment {s.id} ends conversation {s.tip}, which is gone"
    yield from _family(books, s)


def _family(books: Books, s: Segment) -> Iterator[str]:
    if (s.parent is None) != (s.start == 0):
        yield f"segment {s.id} begins at {s.start} without the rows before it"
    if s.parent is not None and (books.segments.get(s.parent.id) is not s.parent or s not in s.parent.children):
        yield f"segment {s.id} is not a child of its parent"
    if any(books.segments.get(c.id) is not c for c in s.children):
        yield f"segment {s.id} has a child that is gone"
    starts = [c.start for c in s.children]
    if s.forks != {at: starts.count(at) for at in starts}:
        yield f"segment {s.id} does not know where its children start"


def _pinned(books: Books, s: Segment) -> int:
    return s.tip is not None and s.tip in books.conversations and books.conversations[s.tip].pinned


def _conversation(books: Books, c: Conversation) -> Iterator[str]:
    if books.segments.get(c.tip.id) is not c.tip or c.tip.tip != c.id:
        yield f"conversation {c.id} does not end where it says"
    if c.id in books.idle and c.tip.capacity > rows_needed(c.tip) and c.id not in books.slack:
        yield f"nobody knows of the unused blocks of conversation {c.id}"


def _turn(turn: Turn) -> Iterator[str]:
    for s in turn.leaves:
        if s.lease != turn.id:
            yield f"segment {s.id} is not leased to turn {turn.id}"
