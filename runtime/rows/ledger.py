"""The bank's ledger: what the bank asks of its books. Pure state, no MLX, no trio.

Every change of memory is an order in `orders`, which the bank actor hands to the device in sequence. All lengths come
from segments' tokens and all bytes from the layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import admission
from .admission import DEPTH, GROWTH, RESERVE
from .books import BeforeDrop, Books, at
from .grants import Conversation, Grant, Shortage, Totals, Turn, Wanted
from .laws import broken_laws, laws
from .layout import BLOCK, Layout, round_up
from .ops import Drop, DropAnchor, RowOp, Trim
from .prefixes import Prefixes
from .pricing import Allocate, Rounding, exact
from .reclaim import make_room, protected, shortage, tidy
from .segments import Lease, Segment, chain_tokens

__all__ = [
    "DEPTH",
    "GROWTH",
    "RESERVE",
    "Conversation",
    "Grant",
    "Ledger",
    "Shortage",
    "Totals",
    "Turn",
    "Wanted",
]


class Ledger:
    """All books of one bank. Only its owner may call it.

    budget: bytes of rows at most. Refusals change nothing. rounding: what the allocator hands out for a size.
    bucket: rows by which buffers of a fixed size come. before_drop: asked before an idle conversation that is not on
    disk is given up; False keeps it for now, because a save has begun.
    """

    def __init__(
        self,
        layout: Layout,
        budget: int,
        *,
        rounding: Rounding = exact,
        bucket: int = BLOCK,
        before_drop: BeforeDrop | None = None,
    ) -> None:
        self._books = Books(layout, budget, rounding, bucket, before_drop)

    # --- numbers

    @property
    def layout(self) -> Layout:
        return self._books.layout

    @property
    def budget(self) -> int:
        return self._books.budget

    @property
    def orders(self) -> list[RowOp]:
        return self._books.orders

    @property
    def segments(self) -> dict[int, Segment]:
        return self._books.segments

    @property
    def turns(self) -> dict[int, Turn]:
        return self._books.turns

    @property
    def conversations(self) -> dict[str, Conversation]:
        return self._books.conversations

    @property
    def totals(self) -> Totals:
        return self._books.totals

    @property
    def used(self) -> int:
        """Bytes of all buffers and anchors that exist or are ordered."""
        return self._books.used

    @property
    def available(self) -> int:
        return self._books.available

    @property
    def _prefixes(self) -> Prefixes:
        return self._books.prefixes

    def take_orders(self) -> tuple[RowOp, ...]:
        """The orders since the last call, to be given to the device."""
        out, self._books.orders = tuple(self._books.orders), []
        return out

    def abandon(self) -> tuple[RowOp, ...]:
        """Orders that give back every buffer and state there is: these books are closed, and nobody reads on.

        What was ordered and not yet taken was never made, but what it gives back is still there.
        """
        pending = [op for op in self.take_orders() if isinstance(op, Drop | DropAnchor)]
        kept = (a for s in self.segments.values() for a in s.anchors.values())
        marked = (mark.anchor for t in self.turns.values() for mark in t.marks)
        anchors = (*self._books.states, *kept, *marked)
        gone: tuple[RowOp, ...] = (*pending, *map(Drop, self.segments), *map(DropAnchor, anchors), Trim())
        self.segments.clear()
        self._books.states.clear()
        return gone

    def audit(self) -> list[str]:
        """The conservation laws that do not hold, as sentences; empty when the books are right."""
        return broken_laws(self._books)

    def laws(self) -> Iterator[str | None]:
        """`audit` bit by bit: None after each thing looked at. Not to be gone on with once the books have changed."""
        return laws(self._books)

    # --- admission

    def longest(self, wanted: Wanted) -> int:
        """Tokens of the longest prefix of the prompt that a turn could go on from in memory, never the last token."""
        found = self._prefixes.longest(wanted.tokens, len(wanted.tokens) - 1, wanted.salt)
        return admission.resumable(self._books, found, wanted).length

    def admit(self, turn: int, wanted: Wanted, conversation: str, now: float) -> Grant | Shortage:
        """Finds rows for a turn. `conversation` names it if it turns out to be new."""
        return admission.admit(self._books, turn, wanted, conversation, now)

    def execute(self, turn: int) -> str:
        """Makes the resize that a turn's grant planned, if holds still allow it, and answers how it went: never an
        error. Call it after `admit`; the turn's lease is read from `turns` afterwards."""
        return admission.execute(self._books, turn)

    def executed(self, grant: Grant) -> Grant:
        """`execute` for a grant, and the grant as it is then."""
        return admission.executed(self._books, grant)

    def from_disk(self, turn: int) -> None:
        """Rows of a turn came from disk: that is how it was met."""
        admission.call(self._books, self.turns[turn], "restored")

    # --- a running turn

    def grow(self, turn: int, rows: int) -> Lease | Shortage:
        """Another leaf of at least `rows` rows for a turn whose leaves are full."""
        made = self.turns[turn]
        last = made.leaves[-1]
        size = self._buckets(made, rows, last)
        made.fixed = size is not None
        if size is None:
            size = admission.leaf_rows(self._books, rows + RESERVE, rows, last, last.end // GROWTH)
        if size is None:
            return shortage(self._books, rows, last)
        leaf = self._books.allocate(last, last.end, size)
        self._books.lease(leaf, turn)
        made.leaves.append(leaf)
        return made.lease

    def _buckets(self, made: Turn, rows: int, last: Segment) -> int | None:
        """Rows of another leaf for a turn whose leaves have a fixed size, if they can be had."""
        size = round_up(max(rows + RESERVE, last.end // GROWTH), self._books.bucket)
        had = made.fixed and make_room(self._books, self._books.bill(Allocate(size)), last)
        return size if had else None

    def commit(self, turn: int, tokens: tuple[int, ...]) -> None:
        """Rows for `tokens` were written at the turn's frontier."""
        made = self.turns[turn]
        rest = list(tokens)
        for s in made.leaves:
            room = s.end - s.frontier
            if room and rest:
                before = len(s.tokens) // BLOCK
                s.tokens += rest[:room]
                del rest[:room]
                if len(s.tokens) // BLOCK != before:
                    self._books.index(s, made.conversation.salt)
        if rest:
            raise AssertionError(f"turn {turn} wrote {len(rest)} rows past its leaves")
        self._books.reach_marks(made)

    def unmark(self, turn: int, upto: int) -> Lease:
        """Rows up to a position come without a round that computes them: no states are kept there. The lease then."""
        self._books.unmark(self.turns[turn], upto)
        return self.turns[turn].lease

    def release(self, turn: int, keep: int, now: float) -> None:
        """The lease comes back; rows past `keep` (undelivered) are given up. Unused leaves are dropped."""
        made, books = self.turns.pop(turn), self._books
        books.unmark(made)
        if made.plan is not None:
            books.reserved -= made.plan.reserved
            keep = made.leaves[0].frontier  # nothing was written, so nothing is undelivered
        for s in made.leaves:
            books.unlease(s)
        for s in reversed(made.leaves):
            books.cut(s, max(keep, s.held))
            books.index(s, made.conversation.salt)
            if s.free and not s.tokens:
                books.drop(s)
        tip = next((s for s in reversed(made.leaves) if s.tokens), made.leaves[0])
        books.end_at(made.conversation, tip)
        tip.reply_from = min(made.prompt, tip.frontier)
        made.conversation.used = now
        books.rest(made.conversation)
        if not tip.tokens:
            books.forget(made.conversation)

    def doubt(self, turn: int) -> None:
        """A round of this turn failed: recurrent states may have seen more rows than were committed."""
        for s in self.turns[turn].leaves if self.layout.recurrent and turn in self.turns else ():
            s.live = False

    # --- keeping and giving up

    def hold(self, conversation: str, holder: str, upto: int | None = None) -> int:
        """Rows of a conversation below `upto` (all by default) must stay until `unhold` of the segment answered."""
        end = self._end(self.conversations[conversation])
        upto = end.frontier if upto is None else min(upto, end.frontier)
        s = at(end, upto) if upto else end
        s.holds[holder] = upto
        return s.id

    def unhold(self, segment: int, holder: str) -> None:
        """The hold goes, and with it what only the hold kept. Unknown ones are ignored."""
        if segment in self.segments:
            self.segments[segment].holds.pop(holder, None)

    def keep_state(self, segment: int) -> int | None:
        """The recurrent state at a segment's frontier stays readable under an anchor's id until `drop_state`.

        None when the state is not the one there, or there is no room for another one.
        """
        s = self.segments[segment]
        if not s.live or self.available < self.layout.state_bytes:
            return None
        return self._books.keep_state(s)

    def drop_state(self, anchor: int) -> None:
        """Unknown ones are ignored."""
        self._books.drop_state(anchor)

    def forget(self, conversation: str) -> None:
        """Drops an idle conversation: its own rows go, rows others use stay."""
        self._books.forget(self.conversations[conversation])

    def fork(self, conversation: str, stop: int | None, name: str, now: float) -> Conversation | Shortage:
        """A new idle conversation over the first `stop` rows of another (all by default). Nothing is computed."""
        books, old = self._books, self.conversations[conversation]
        stop = old.tip.frontier if stop is None else max(0, min(stop, old.tip.frontier))
        start = stop // BLOCK * BLOCK
        source = at(old.tip, stop) if stop else old.tip
        with protected(source):
            if not make_room(books, books.bill(Allocate(BLOCK)), source):
                return shortage(books, BLOCK, source)
            leaf = books.allocate(at(source, start) if start else None, start, BLOCK)
            books.copy(source, leaf, start, stop, "fork")
            if self.layout.recurrent:
                leaf.live = stop in source.anchors or (stop == source.frontier and books.anchor(source))
                if leaf.live:
                    books.give_state(source, stop, leaf)
        made = books.begin(name, leaf, old.salt, now, old.hint)
        books.rest(made)
        return made

    def trim(self, conversation: str) -> int:
        """Gives back the whole unused blocks of an idle conversation's tip, one layer at a time. Bytes gained."""
        return tidy(self._books, self.conversations[conversation].tip)

    def idle_slack(self, now: float, age: float) -> list[str]:
        """Idle conversations that own unused blocks and have not run for `age` seconds, longest unused first."""
        out = []
        for name in self._books.slack:
            if now - self.conversations[name].used < age:
                break
            out.append(name)
        return out

    def owned_bytes(self, conversation: Conversation) -> int:
        """Bytes that would go if this conversation were dropped."""
        total, s, below = 0, conversation.tip, 0
        while len(s.children) == below and not s.holds and (s.tip is None or s is conversation.tip):
            total += self._books.weight(s)
            if s.parent is None:
                break
            s, below = s.parent, 1
        return total

    def tokens_of(self, conversation: str) -> list[int]:
        tip = self.conversations[conversation].tip
        return chain_tokens(tip, tip.frontier)

    def _end(self, conversation: Conversation) -> Segment:
        """Where the rows of a conversation end now, which a running turn may have moved on."""
        turn = self.turns.get(conversation.tip.lease) if conversation.tip.lease is not None else None
        written = [s for s in turn.leaves if s.tokens] if turn is not None else []
        return written[-1] if written else conversation.tip
