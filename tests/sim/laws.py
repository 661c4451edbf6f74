"""Conservation laws of the bank's books, as sentences for those that do not hold. Pure; reads only.

The ledger audits itself in production; these laws were written without looking there, from the design alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ledger import Conversation, Ledger
from onecopy.runtime.rows.segments import Segment


def audit(ledger: Ledger) -> list[str]:
    """What is wrong with the books; empty when all laws hold. O(segments + conversations)."""
    out = list(_totals(ledger))
    for s in ledger.segments.values():
        out += _segment(ledger, s)
    for c in ledger.conversations.values():
        out += _conversation(ledger, c)
    for turn in ledger.turns.values():
        out += [f"segment {s.id} is not leased to turn {turn.id}" for s in turn.leaves if s.lease != turn.id]
    return out


def _totals(ledger: Ledger) -> Iterator[str]:
    state = ledger.layout.state_bytes
    buffers = (ledger.layout.capacity_bytes(s.capacity) for s in ledger.segments.values())
    held = sum(buffers) + state * sum(1 + len(s.anchors) for s in ledger.segments.values())
    held += state * len(ledger._books.states)
    if held != ledger.used:
        yield f"{ledger.used} bytes are accounted for, the segments have {held}"
    if ledger.used > ledger.budget:
        yield f"{ledger.used} bytes are in use, the budget is {ledger.budget}"
    leased = {s.id for s in ledger.segments.values() if s.lease is not None}
    written = {s.id for turn in ledger.turns.values() for s in turn.leaves}
    if leased != written:
        yield f"leases and turns disagree about segments {sorted(leased ^ written)}"


def _segment(ledger: Ledger, s: Segment) -> Iterator[str]:
    if s.start % BLOCK or s.capacity % BLOCK or len(s.tokens) > s.capacity:
        yield f"segment {s.id} has {len(s.tokens)} rows in {s.capacity} from {s.start}"
    own = max([s.start, *s.holds.values(), *(c.start for c in s.children if s.lease is None or c.lease != s.lease)])
    if own > s.frontier:
        yield f"rows up to {own} of segment {s.id} are held, it has {s.frontier}"
    if s.free:
        yield f"nobody needs segment {s.id}"
    if (s.parent is None) != (s.start == 0):
        yield f"segment {s.id} begins at {s.start} without the rows before it"
    if s.parent is not None and (ledger.segments.get(s.parent.id) is not s.parent or s not in s.parent.children):
        yield f"segment {s.id} is not a child of its parent"
    if any(ledger.segments.get(c.id) is not c for c in s.children):
        yield f"segment {s.id} has a child that is gone"
    if s.tip is not None and s.tip not in ledger.conversations:
        yield f"segment {s.id} ends conversation {s.tip}, which is gone"


def _conversation(ledger: Ledger, c: Conversation) -> Iterator[str]:
    if ledger.segments.get(c.tip.id) is not c.tip or c.tip.tip != c.id:
        yield f"conversation {c.id} does not end where it says"
