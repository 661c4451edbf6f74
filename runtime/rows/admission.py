"""How a turn gets its rows: the ways in their order of preference, each priced before it is taken.

A turn goes on in the rows its conversation ends with, goes back into the last reply, or forks from whoever has the
longest prefix. Where it wants buffers of a fixed size, they are adopted, resized in place or copied, and where none of
that can be had it runs with what is at hand. Fixed means whole buckets: a turn takes any number that lasts its answer,
and rows move for it only when they are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .books import Books, at
from .chains import merge
from .grants import Conversation, Grant, Plan, Shortage, Turn, Wanted, count
from .layout import BLOCK, round_up
from .prefixes import END_SLACK, Match
from .pricing import Allocate, Copy, Resize, adoptable
from .reclaim import make_room, protected, shortage
from .segments import Segment, links

RESERVE = 256
"""Rows of answer reserved at admission: most answers fit, and an unused block is all that a short one wastes."""

DEPTH = 16
"""Segments of a chain at most; a longer one is merged, so that attention never reads many small pieces."""

WORTH = 128
"""Rows that are worth a state: where two prompts part that share so many beyond any state, and where messages start."""

GROWTH = 8
"""A new leaf of a long conversation gets an eighth of its rows, so that the number of segments stays logarithmic."""


def admit(books: Books, turn: int, wanted: Wanted, name: str, now: float) -> Grant | Shortage:
    """Finds rows for a turn; `name` is the conversation's if it turns out to be new. A shortage changed nothing."""
    kept = books.prefixes.longest(wanted.tokens, len(wanted.tokens) - 1, wanted.salt)
    found = resumable(books, kept, wanted)
    asked = Asked(books, turn, wanted, name, now)
    got = asked.go_on(found) or asked.rewind(found) or asked.fork(found)
    if isinstance(got, Shortage) and found.length:
        # Better computed again than refused: without the prefix to protect, more can be given up.
        got = asked.fork(Match(0, ()))
    if isinstance(got, Grant) and books.layout.recurrent:
        parts = kept.length if kept.length - got.matched >= WORTH else None
        books.mark(books.turns[turn], worth_a_state(wanted.starts, got.matched), parts)
        got = replace(got, lease=books.turns[turn].lease)
    return got


def worth_a_state(starts: Sequence[int], matched: int) -> list[int]:
    """Of the positions at which messages start those where a state spares an edit `WORTH` rows: behind a long message,
    or before as many rows as that up to the next state."""
    new = [start for start in starts if start > matched]
    kept = list[int]()
    for before, start in reversed(list(zip([matched, *new], new, strict=False))):
        if start - before >= WORTH or (kept and kept[-1] - start >= WORTH):
            kept.append(start)
    return kept[::-1]


def resumable(books: Books, found: Match, wanted: Wanted) -> Match:
    """What of a match a turn can go on from. A recurrent state cannot be trimmed: a turn goes on where one stands, at
    the end of a conversation whose rows were all delivered, or at the latest anchor on the way."""
    if not books.layout.recurrent:
        return found
    ends = tuple(s for s in found.ends if s.live)
    best = books.anchors.latest(wanted.tokens, found.length, wanted.salt)
    if ends and ends[0].frontier >= best[0]:
        best = ends[0].frontier, ends[0]
    return Match(best[0], (best[1],) if best[1] is not None else (), ends)


def leaf_rows(books: Books, wished: int, least: int, keep: Segment | None, grown: int = 0) -> int | None:
    """Rows of a new leaf: generous if memory is free, else what is wished, else the least.

    grown: what a conversation that goes on gets at its length (`GROWTH`); a fork gets its own tail only, or many forks
    of a long parent would each set aside a share of it.
    """
    for rows in dict.fromkeys(round_up(max(1, r)) for r in (max(wished, grown), wished, least)):
        if make_room(books, books.bill(Allocate(rows)), keep, hard=rows == round_up(max(1, least))):
            return rows
    return None


class Asked:
    """One admission under way."""

    def __init__(self, books: Books, turn: int, wanted: Wanted, name: str, now: float) -> None:
        self.books = books
        self.turn = turn
        self.wanted = wanted
        self.name = name
        self.now = now
        self.prompt = len(wanted.tokens)
        self.full = self.prompt + min(wanted.answer, RESERVE)
        self.copied: dict[str, int] = {}
        self.price = 0
        self.peak = 0

    # --- ways

    def go_on(self, found: Match) -> Grant | Shortage | None:
        """The conversation ends on a prefix of the prompt: it goes on in its own rows."""
        tip = next((s for s in found.ends if s.frontier + END_SLACK >= found.length and self._ours(s)), None)
        return None if tip is None else self._continue(tip, tip.frontier, found.length)

    def rewind(self, found: Match) -> Grant | Shortage | None:
        """The prompt leaves a conversation inside its last reply: those rows serve nobody else and are given up.

        A recurrent state would have to be taken back with them: such a turn forks at an anchor instead.
        """
        if self.books.layout.recurrent:
            return None
        stop = found.length
        for s in found.holders:
            if s.tip is None or s.lease is not None or s.reply_from is None or self.books.conversations[s.tip].pinned:
                continue
            if self._ours(s) and s.reply_from - 1 <= stop < s.frontier and (s.held <= stop or self._fixes):
                got = self._continue(s, stop, stop)
                if got is not None:
                    return got
        return None

    def _ours(self, tip: Segment) -> bool:
        """A client that names its conversations keeps them apart: a child never takes its parent's place."""
        assert tip.tip is not None
        theirs = self.books.conversations[tip.tip].hint
        return theirs is None or self.wanted.hint is None or theirs == self.wanted.hint

    def fork(self, found: Match) -> Grant | Shortage:
        """A new conversation that shares whole blocks and copies the rest of the last one."""
        source = found.holders[0] if found.length and found.holders else None
        with protected(source):
            if source is None or not self.books.layout.recurrent:
                return self._fork(source, found.length if source is not None else 0)
            return self._fork_state(source, found.length)

    def _fork_state(self, source: Segment, stop: int) -> Grant | Shortage:
        """A fork that goes on from the state at `stop`; a refusal leaves no anchor behind that was not there."""
        new = stop not in source.anchors
        if new and not self.books.anchor(source):
            return self._fork(None, 0)
        self.price += self.books.layout.state_bytes if new else 0
        self.peak += self.books.layout.state_bytes if new else 0
        got = self._fork(source, stop)
        if new and isinstance(got, Shortage):
            self.books.drop_anchor(source, stop)
        return got

    def _fork(self, source: Segment | None, stop: int) -> Grant | Shortage:
        start = stop // BLOCK * BLOCK
        least = self.prompt + 1 - start
        fixed = self._fixed_rows(start, source)
        rows = fixed or leaf_rows(self.books, self.full - start, least, source)
        if rows is None:
            return shortage(self.books, least, source)
        leaf = self._new_leaf(at(source, start) if source is not None and start else None, start, rows)
        how = "fresh"
        if source is not None:
            self._copy(at(source, stop), leaf, start, stop, "fork")
            if self.books.layout.recurrent:
                self.books.give_state(source, stop, leaf)
                source.marks.add(stop)
            how = "forked"
        if self._fixes and fixed is None:
            how = "eager"
        conversation = self.books.begin(self.name, leaf, self.wanted.salt, self.now, self.wanted.hint)
        return self._lease(conversation, [leaf], stop, how, stop)

    # --- in the rows of a conversation

    def _continue(self, tip: Segment, stop: int, diverged: int) -> Grant | Shortage | None:
        """Leases `tip` from row `stop` on; None when that needs rows that others hold."""
        how = "adopted"
        if self._fixes:
            got = self._fixed(tip, stop, diverged, self._capacity(tip, stop))
            if got is not None:
                return got
            how = "eager"
        if tip.held > stop:
            return None
        assert tip.tip is not None
        conversation = self.books.conversations[tip.tip]
        rows = None
        if tip.end < self.prompt + 1 or tip.end < min(self.full, self.prompt + BLOCK // 4):
            least = self.prompt + 1 - tip.end
            rows = self._next_rows(tip, max(self.full - tip.end, tip.end // GROWTH))
            if rows is not None:
                how = "extended"
            else:
                rows = leaf_rows(self.books, self.full - tip.end, least, tip, tip.end // GROWTH)
            if rows is None and tip.end < self.prompt:
                return shortage(self.books, least, tip)
        self.books.cut(tip, stop)
        leaves = [tip]
        if rows is not None:
            how = "extended" if how == "adopted" else how
            tip = self._merged(tip, self.books.size(rows))
            leaves = [tip, self._new_leaf(tip, tip.end, rows)]
        self._anchor(tip)
        return self._lease(conversation, leaves, stop, how, diverged)

    def _merged(self, tip: Segment, beside: int) -> Segment:
        if tip.depth < DEPTH or self.books.layout.recurrent:
            return tip  # a merge copies rows; a recurrent state stays where it is
        merged, moved = merge(self.books, tip, beside)
        if moved:
            self.copied["merge"] = moved
            self.peak += self.books.size(merged.capacity)
        return merged

    # --- buffers of a fixed size

    @property
    def _fixes(self) -> bool:
        return self.wanted.fixed or self.wanted.capacity is not None

    def _buckets(self, rows: int) -> int:
        return round_up(max(1, rows), self.books.bucket)

    def _capacity(self, tip: Segment, stop: int) -> int | None:
        """Rows that `tip` is wanted at: what lasts the answer, or what it has where more than a bucket of rows would
        have to move. None where that is no number of buckets, or when another leaf behind it moves no row."""
        if self.wanted.capacity is not None:
            return self.wanted.capacity
        rows = self._buckets(self.full - tip.start)
        few = stop - tip.start <= self.books.bucket
        if tip.held <= stop and not few:
            return tip.capacity if tip.capacity % self.books.bucket == 0 and tip.capacity >= rows else None
        full = tip.held <= stop and tip.end < self.full
        return rows if few and not full else None

    def _fixed_rows(self, start: int, source: Segment | None) -> int | None:
        """Rows of a new leaf at `start` of the wanted size, if that is enough and can be had."""
        rows = self.wanted.capacity or (self._buckets(self.full - start) if self.wanted.fixed else None)
        if rows is None or start + rows < self.prompt + 1:
            return None
        return rows if make_room(self.books, self.books.bill(Allocate(rows)), source) else None

    def _next_rows(self, tip: Segment, rows: int) -> int | None:
        """Whole buckets for a leaf behind `tip`, if a turn that takes any number of them can have them."""
        rows = self._buckets(rows)
        had = self.wanted.fixed and make_room(self.books, self.books.bill(Allocate(rows)), tip)
        return rows if had else None

    def _fixed(self, tip: Segment, stop: int, diverged: int, rows: int | None) -> Grant | None:
        """Adopts, resizes or copies `tip` at `rows` rows; None when the wanted size is too small or not to be had."""
        if rows is None or tip.start + rows < self.prompt + 1:
            return None
        assert tip.tip is not None
        conversation = self.books.conversations[tip.tip]
        if tip.held <= stop and adoptable(tip.capacity, rows, self.books.bucket):
            self.books.cut(tip, stop)
            self._anchor(tip)
            return self._lease(conversation, [tip], stop, "adopted", diverged)
        way = Resize(tip.capacity, rows, stop - tip.start, tip.held - tip.start)
        price = self.books.bill(way)
        if tip.held > stop or price is None:
            return self._copied(conversation, tip, stop, diverged, rows)
        reserved = max(price, self._fallback(tip, stop))
        if not make_room(self.books, reserved, tip):
            return None
        return self._planned(conversation, tip, Plan(rows, stop, reserved), diverged, price)

    def _fallback(self, tip: Segment, stop: int) -> int:
        """Bytes that keep a planned resize free to degrade: another leaf, or a fork away from rows then held."""
        start = stop // BLOCK * BLOCK if stop < tip.frontier else tip.end
        return self.books.size(round_up(self.prompt + 1 - start)) if start < self.prompt + 1 else 0

    def _planned(self, conversation: Conversation, tip: Segment, plan: Plan, diverged: int, peak: int) -> Grant:
        self.price = self.books.size(plan.rows) - self.books.size(tip.capacity)
        self.peak = peak
        self._anchor(tip)
        self.books.reserved += plan.reserved
        grant = self._lease(conversation, [tip], plan.at, "resized", diverged)
        self.books.turns[self.turn].plan = plan
        return grant

    def _copied(self, conversation: Conversation, tip: Segment, stop: int, diverged: int, rows: int) -> Grant | None:
        """A whole padded copy: the rows that others hold stay where they are."""
        if not make_room(self.books, self.books.bill(Copy(stop - tip.start, rows)), tip):
            return None
        leaf = self._new_leaf(tip.parent, tip.start, rows)
        self._copy(tip, leaf, tip.start, stop, "copy")
        leaf.reply_from = tip.reply_from
        self.books.end_at(conversation, leaf)
        self.books.index(leaf, self.wanted.salt)
        self.books.drop_free(tip)
        return self._lease(conversation, [leaf], stop, "copied", diverged)

    # --- steps

    def _anchor(self, s: Segment) -> None:
        """Keeps the recurrent state at a segment's frontier, in exchange for older ones of the same conversation."""
        before = self.books.used
        if self.books.layout.recurrent and self.books.anchor(s):
            self.books.thin(s)
        self.price += self.books.used - before
        self.peak += max(0, self.books.used - before)

    def _new_leaf(self, parent: Segment | None, start: int, rows: int) -> Segment:
        self.price += self.books.size(rows)
        self.peak += self.books.size(rows)
        return self.books.allocate(parent, start, rows)

    def _copy(self, source: Segment, leaf: Segment, start: int, stop: int, reason: str) -> None:
        moved = self.books.copy(source, leaf, start, stop, reason)
        if moved:
            self.copied[reason] = moved

    def _lease(self, conversation: Conversation, leaves: list[Segment], stop: int, how: str, diverged: int) -> Grant:
        made = begin_turn(self.books, self.turn, conversation, leaves, self.prompt, how)
        made.fixed = self._fixes and how != "eager"
        conversation.used = self.now
        made.price = self.price
        count(self.books.totals.priced, how, self.price)
        copied = tuple(self.copied.items())
        return Grant(made.lease, conversation.id, stop, how, self.price, copied, diverged, peak=self.peak)


def begin_turn(
    books: Books, turn: int, conversation: Conversation, leaves: list[Segment], prompt: int, how: str
) -> Turn:
    first = leaves[0]
    base = links(first.parent, first.start) if first.parent is not None else ()
    made = Turn(turn, conversation, leaves, base, prompt, how)
    books.turns[turn] = made
    for s in leaves:
        books.lease(s, turn)
    books.wake(conversation)
    count(books.totals.admitted, how)
    return made


def executed(books: Books, grant: Grant) -> Grant:
    """The grant once its planned resize was made or degraded: what it came to, and the lease as it is then."""
    turn, totals = books.turns[grant.lease.turn], books.totals
    if turn.plan is None:
        return grant
    tip = turn.leaves[0]
    kept = grant.price - (books.size(turn.plan.rows) - books.size(tip.capacity))  # an anchor that it has already
    used, copied = books.used, dict(totals.copied)
    how = execute(books, turn.id)
    price = kept + books.used - used
    count(totals.priced, how, price - turn.price)
    turn.price = price
    moved = tuple((why, n - copied.get(why, 0)) for why, n in totals.copied.items() if n != copied.get(why))
    peak = grant.peak if how == grant.how else price
    return replace(grant, lease=turn.lease, how=how, price=price, peak=peak, copied=moved)


def execute(books: Books, turn: int) -> str:
    """Makes the resize that a grant planned, if its price and the holds still allow it; the way it went.

    A hold that came meanwhile degrades the grant to "eager": a fork away from the held rows, or another leaf where the
    buffers at hand are too short. Memory for that was set aside, so there is no error. The lease may have changed.
    """
    made = books.turns[turn]
    plan, made.plan = made.plan, None
    if plan is None:
        return made.how
    books.reserved -= plan.reserved
    tip = made.leaves[0]
    price = books.bill(Resize(tip.capacity, plan.rows, plan.at - tip.start, tip.held - tip.start))
    if tip.held > plan.at:
        _degrade(books, made)
        _fork_away(books, made, plan.at)
    elif price is None or price > books.available:
        _degrade(books, made)
        books.cut(tip, plan.at)
        _extend(books, made)
    else:
        books.cut(tip, plan.at)
        books.resize(tip, plan.rows)
        count(books.totals.copied, "resize", len(tip.tokens) * books.layout.row_bytes)
    return made.how


def call(books: Books, made: Turn, how: str) -> None:
    """The turn was met in another way than was said at first."""
    for old, sign in ((made.how, -1), (how, 1)):
        count(books.totals.admitted, old, sign)
        count(books.totals.priced, old, sign * made.price)
    made.how = how


def _degrade(books: Books, made: Turn) -> None:
    call(books, made, "eager")
    made.fixed = False


def _extend(books: Books, made: Turn) -> None:
    tip = made.leaves[0]
    if tip.end < made.prompt + 1:
        leaf = books.allocate(tip, tip.end, round_up(made.prompt + 1 - tip.end))
        books.lease(leaf, made.id)
        made.leaves.append(leaf)


def _fork_away(books: Books, made: Turn, stop: int) -> None:
    """The turn leaves rows that others hold now for a leaf of its own."""
    tip, start = made.leaves[0], stop // BLOCK * BLOCK
    salt = made.conversation.salt
    parent = tip if start > tip.start else tip.parent
    leaf = books.allocate(parent, start, round_up(made.prompt + 1 - start))
    books.copy(tip, leaf, start, stop, "fork")
    leaf.reply_from = tip.reply_from
    books.unlease(tip)
    books.lease(leaf, made.id)
    books.end_at(made.conversation, leaf)
    books.index(leaf, salt)
    books.drop_free(tip)
    made.leaves = [leaf]
    made.base = links(parent, start) if parent is not None else ()
