"""The books themselves: segments, turns, conversations, sums of bytes, and the few changes that keep them in step.

Every change costs a chain's depth at most, however many segments there are: sums are kept as they change, and what
could be given up is noted when it becomes so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from . import pricing
from .anchors import Anchors
from .grants import Conversation, Totals, Turn, count
from .layout import BLOCK, Layout, round_up
from .ops import Allocate, CopyRows, Drop, DropAnchor, LoadAnchor, ResizeLayer, RowOp, SaveAnchor
from .prefixes import Prefixes
from .pricing import Resize, Rounding, Way
from .segments import Mark, Segment

BeforeDrop = Callable[[Conversation], bool]

ANCHORS = 2
"""States kept of a conversation beside the one at its end: an edit of a late message goes back to one of them."""

MOST_ANCHORS = 64
"""States kept of a conversation while half of the budget is free: an edit of an early message goes back to one of them.
Far more turns than are edited, and few enough to look through."""


class Books:
    """State of one bank. Only its ledger may change it.

    idle: conversations without a turn, longest unused first; safe: those whose rows are all on disk; slack: idle ones
    that own unused blocks. loose: segments where no conversation ends that may have rows nobody needs.
    states: anchors that somebody reads. used: bytes of all buffers and anchors that exist or are ordered; locked: those
    that cannot be given up now; reserved: bytes set aside for planned resizes.
    """

    def __init__(
        self, layout: Layout, budget: int, rounding: Rounding, bucket: int, before_drop: BeforeDrop | None
    ) -> None:
        self.layout = layout
        self.budget = budget
        self.rounding = rounding
        self.bucket = bucket
        self.before_drop: BeforeDrop = before_drop or (lambda _: True)
        self.orders: list[RowOp] = []
        self.segments: dict[int, Segment] = {}
        self.turns: dict[int, Turn] = {}
        self.conversations: dict[str, Conversation] = {}
        self.totals = Totals()
        self.prefixes = Prefixes()
        self.anchors = Anchors()
        self.idle: OrderedDict[str, None] = OrderedDict()
        self.safe: set[str] = set()
        self.slack: OrderedDict[str, None] = OrderedDict()
        self.loose: dict[int, Segment] = {}
        self.states: set[int] = set()
        self.used = 0
        self.locked = 0
        self.reserved = 0
        self._next = 1
        self._sizes: dict[int, int] = {}
        self._margin = pricing.fill_bytes(layout)

    # --- prices

    @property
    def available(self) -> int:
        return self.budget - self.used - self.reserved

    def size(self, rows: int) -> int:
        """Bytes of a segment of that capacity."""
        if rows not in self._sizes:
            self._sizes[rows] = pricing.segment_bytes(self.layout, rows, self.rounding)
        return self._sizes[rows]

    def weight(self, s: Segment) -> int:
        """Bytes that go with a segment: its buffers and its anchors."""
        return self.size(s.capacity) + len(s.anchors) * self.layout.state_bytes

    def bill(self, way: Way) -> int | None:
        """Bytes of the budget that `way` needs at its worst moment; None: impossible. Fill values are not rows."""
        price = pricing.bill(self.layout, way, self.rounding)
        return None if price is None else max(0, price - self._margin)

    # --- segments

    def allocate(self, parent: Segment | None, start: int, capacity: int) -> Segment:
        made = Segment(self._next, parent, start, capacity, self)
        self._next += 1
        self.segments[made.id] = made
        self.used += self.size(capacity)
        if parent is not None:
            parent.adopt(made)
            made.saved = min(parent.saved, start)
        self.orders.append(Allocate(made.id, start, capacity))
        return made

    def copy(self, source: Segment, target: Segment, start: int, stop: int, reason: str | None) -> int:
        """Rows `[start, stop)` into a leaf whose frontier is `start`: bytes moved."""
        if start == stop:
            return 0
        self.orders.append(CopyRows(source.id, target.id, start, stop))
        target.tokens += source.tokens[start - source.start : stop - source.start]
        moved = (stop - start) * self.layout.row_bytes
        if reason is not None:
            count(self.totals.copied, reason, moved)
        return moved

    def resize(self, s: Segment, rows: int) -> int:
        """Moves a segment to buffers of `rows` rows, one layer at a time: bytes held more. It must not cut."""
        grown = pricing.gain(self.layout, Resize(s.capacity, rows, len(s.tokens)), self.rounding)
        self.orders += [ResizeLayer(s.id, i, rows, s.frontier) for i in range(len(self.layout.layers))]
        s.capacity = rows
        self._weighs(s, grown)
        return grown

    def drop(self, s: Segment) -> None:
        self.prefixes.remove(s)
        del self.segments[s.id]
        self.loose.pop(s.id, None)
        for position in list(s.anchors):
            self.drop_anchor(s, position)
        self.used -= self.weight(s)
        if s.parent is not None:
            s.parent.disown(s)
        self.orders.append(Drop(s.id))

    def drop_free(self, s: Segment | None) -> None:
        """Drops a segment that nobody needs, and then its parent if that was its last user, and so on."""
        while s is not None and s.free:
            above = s.parent
            self.drop(s)
            s = above
        if s is not None:
            self._note_loose(s)

    def cut(self, s: Segment, stop: int) -> None:
        """Gives up the rows from `stop` on; nobody may hold them."""
        if stop < s.frontier:
            del s.tokens[max(0, stop - s.start) :]
            s.saved = min(s.saved, stop)
            s.live = False
            for position in [at for at in s.anchors if at > stop]:
                self.drop_anchor(s, position)
            self.index(s)

    # --- recurrent states

    def anchor(self, s: Segment) -> bool:
        """Keeps the state at a segment's frontier for turns that come back to there, if it is there and fits."""
        if s.frontier in s.anchors:
            return True
        salt = self.prefixes.salt(s)
        there = s.live and s.lease is None and s.tokens and salt is not None
        if not there or self.available < self.layout.state_bytes:
            return False
        assert salt is not None
        self._enter_anchor(s, s.frontier, self._take_state(s), salt)
        return True

    def _enter_anchor(self, s: Segment, position: int, anchor: int, salt: bytes) -> None:
        s.anchors[position] = anchor
        self.anchors.add(s, position, salt)
        self._weighs(s, self.layout.state_bytes)

    def mark(self, turn: Turn, starts: Sequence[int], parts: int | None) -> None:
        """A turn is to keep states at places in its prompt, as many as there is room for: where another prompt left
        it, and where its latest messages start. More than `ANCHORS` never take from the half that is kept free."""
        wished = [*([parts] if parts is not None else ()), *(p for p in reversed(starts) if p != parts)]
        spare, fit = self.available - self.budget // 2, self.available
        most = max(spare // self.layout.state_bytes, min(ANCHORS, fit // self.layout.state_bytes))
        places = wished[: min(most, MOST_ANCHORS)]
        self.reserved += len(places) * self.layout.state_bytes
        turn.marks = tuple(Mark(p, self._next + i, p == parts) for i, p in enumerate(sorted(places)))
        self._next += len(places)

    def reach_marks(self, turn: Turn) -> None:
        """Rows of a turn were written: a round that ended at a mark has kept the state there."""
        there = next((mark for mark in turn.marks if mark.position == turn.frontier), None)
        self.unmark(turn, turn.frontier - 1)
        if there is None:
            return
        turn.marks = turn.marks[1:]
        self.reserved -= self.layout.state_bytes
        s = next(s for s in turn.leaves if s.start < there.position <= s.frontier)
        self._enter_anchor(s, there.position, there.anchor, turn.conversation.salt)
        if there.parts:
            s.marks.add(there.position)

    def unmark(self, turn: Turn, upto: int | None = None) -> None:
        """No states are kept for this turn after all, at the marks up to a position or at any."""
        gone = [mark for mark in turn.marks if upto is None or mark.position <= upto]
        self.orders += [DropAnchor(mark.anchor) for mark in gone]
        self.reserved -= len(gone) * self.layout.state_bytes
        turn.marks = turn.marks[len(gone) :]

    def drop_anchor(self, s: Segment, position: int) -> None:
        anchor = s.anchors.pop(position)
        s.marks.discard(position)
        self.anchors.remove(s, position)
        if self.orders and self.orders[-1] == SaveAnchor(s.id, anchor):
            self.orders.pop()  # nobody has seen it
        else:
            self.orders.append(DropAnchor(anchor))
        self._weighs(s, -self.layout.state_bytes)

    def thin(self, tip: Segment) -> None:
        """Gives up old anchors in the rows that only this conversation has: before the latest `MOST_ANCHORS`, or
        `ANCHORS` while less than half of the budget is free."""
        for a, position in self.own_anchors(tip)[self._most_anchors :]:
            self.drop_anchor(a, position)

    @property
    def _most_anchors(self) -> int:
        """States of one conversation that are kept as memory is now."""
        return MOST_ANCHORS if self.available >= self.budget // 2 else ANCHORS

    def own_anchors(self, tip: Segment) -> list[tuple[Segment, int]]:
        """The anchors in the rows that only this conversation has, latest first; those where prompts part not among
        them."""
        found = list[tuple[Segment, int]]()
        for a in tip.ancestors():
            if a is not tip and (a.tip is not None or len(a.children) > 1):
                break
            found += ((a, position) for position in sorted(a.anchors.keys() - a.marks, reverse=True))
        return found

    def give_state(self, source: Segment, position: int, leaf: Segment) -> None:
        """A new leaf goes on from the state that is kept at `position` of `source`."""
        self.orders.append(LoadAnchor(source.anchors[position], leaf.id))

    def _take_state(self, s: Segment) -> int:
        anchor, self._next = self._next, self._next + 1
        self.orders.append(SaveAnchor(s.id, anchor))
        return anchor

    def keep_state(self, s: Segment) -> int:
        """An anchor of the recurrent state at a segment's frontier, for somebody who reads it: its id."""
        anchor = self._take_state(s)
        self.states.add(anchor)
        self.used += self.layout.state_bytes
        return anchor

    def drop_state(self, anchor: int) -> None:
        if anchor in self.states:
            self.states.remove(anchor)
            self.used -= self.layout.state_bytes
            self.orders.append(DropAnchor(anchor))

    # --- finding them

    def index(self, s: Segment, salt: bytes | None = None) -> None:
        """Makes prefix search agree with the segment's tokens. Without a salt only a segment it knows is looked at."""
        salt = self.prefixes.salt(s) if salt is None else salt
        if s.tokens and salt is not None:
            self.prefixes.update(s, salt)
        else:
            self.prefixes.remove(s)

    # --- who needs a segment

    def lock(self, s: Segment, by: int) -> None:
        """One reason more or less why `s`, and so every ancestor, cannot be given up."""
        for a in s.ancestors():
            before, a.locks = a.locks, a.locks + by
            if (before == 0) != (a.locks == 0):
                self.locked += self.weight(a) if before == 0 else -self.weight(a)

    def held(self, segment: Segment) -> None:
        self.lock(segment, 1)

    def unheld(self, segment: Segment) -> None:
        self.lock(segment, -1)
        self.drop_free(segment)

    def lease(self, s: Segment, turn: int) -> None:
        s.lease = turn
        self.lock(s, 1)

    def unlease(self, s: Segment) -> None:
        s.lease = None
        self.lock(s, -1)

    def _weighs(self, s: Segment, more: int) -> None:
        self.used += more
        if s.locks:
            self.locked += more

    def _note_loose(self, s: Segment) -> None:
        if s.tip is None and s.lease is None and s.capacity > rows_needed(s):
            self.loose[s.id] = s

    # --- conversations

    def begin(self, name: str, tip: Segment, salt: bytes, now: float, hint: str | None) -> Conversation:
        """A new conversation that ends in `tip`."""
        made = Conversation(name, tip, salt, now, now, self.lock, hint)
        self.conversations[name] = made
        tip.tip = name
        self.index(tip, salt)
        return made

    def end_at(self, conversation: Conversation, tip: Segment) -> None:
        """The conversation ends in another segment now; the old one keeps what others need of it."""
        old, conversation.tip = conversation.tip, tip
        if old is not tip:
            if old.tip == conversation.id:
                old.tip = None
            if conversation.pinned:
                self.lock(tip, 1)
                self.lock(old, -1)
        tip.tip = conversation.id

    def rest(self, conversation: Conversation) -> None:
        """The conversation has no turn any more."""
        self.idle[conversation.id] = None
        self.idle.move_to_end(conversation.id)
        self.note_slack(conversation)
        self._note_saved(conversation)

    def wake(self, conversation: Conversation) -> None:
        self.idle.pop(conversation.id, None)
        self.slack.pop(conversation.id, None)
        self.safe.discard(conversation.id)

    def note_slack(self, conversation: Conversation) -> None:
        if conversation.tip.capacity > rows_needed(conversation.tip):
            self.slack[conversation.id] = None
        else:
            self.slack.pop(conversation.id, None)

    def on_disk(self, segment: Segment) -> None:
        if segment.tip is not None and segment.tip in self.idle:
            self._note_saved(self.conversations[segment.tip])

    def _note_saved(self, conversation: Conversation) -> None:
        tip = conversation.tip
        rows = tip.frontier if self.layout.recurrent else tip.frontier // BLOCK * BLOCK
        if 0 < rows <= tip.saved:
            self.safe.add(conversation.id)
        else:
            self.safe.discard(conversation.id)

    def forget(self, conversation: Conversation) -> None:
        """Drops an idle conversation: its own rows go, rows that others use stay."""
        conversation.pinned = False
        self.wake(conversation)
        del self.conversations[conversation.id]
        conversation.tip.tip = None
        self.drop_free(conversation.tip)


def rows_needed(s: Segment) -> int:
    """Capacity for the rows that somebody needs: whole blocks, one at least."""
    stop = s.frontier if s.tip is not None else s.held
    return max(BLOCK, round_up(stop - s.start))


def at(segment: Segment, stop: int) -> Segment:
    """The segment of the chain that holds row `stop - 1`."""
    return next(s for s in segment.ancestors() if s.start < stop)
