"""The bank's books: segments, turns, conversations and the memory budget. Pure state, no MLX, no trio.

Every change of memory is an order in `orders`, which the bank actor hands to the device in sequence. All lengths come
from segments' tokens and all bytes from the layout; nothing is stored twice.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from .layout import BLOCK, Layout, round_up
from .ops import Allocate, CopyRows, Drop, Link, ResizeLayer, RowOp
from .prefixes import END_SLACK, Match, Prefixes
from .segments import LeafSpan, Lease, Segment, chain_tokens, links

RESERVE = 256
"""Rows of answer reserved at admission: most answers fit, and an unused block is all that a short one wastes."""

DEPTH = 16
"""Segments of a chain at most; a longer one is merged, so that attention never reads many small pieces."""

GROWTH = 8
"""A new leaf of a long conversation gets an eighth of its rows, so that the number of segments stays logarithmic."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a turn asks for. tokens: the whole prompt. answer: rows its answer may need at most."""

    tokens: tuple[int, ...]
    answer: int
    salt: bytes = b""
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """How a turn got its rows.

    matched: rows it need not compute. how: the way. price: bytes newly allocated. copied: bytes by reason.
    diverged: the first prompt token that no kept row matched. restored: rows of `matched` that came from disk.
    """

    lease: Lease
    conversation: str
    matched: int
    how: str
    price: int
    copied: tuple[tuple[str, int], ...]
    diverged: int
    restored: int = 0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why not: bytes needed and available, conversations that run, and the longest prompt that fits now."""

    needed: int
    available: int
    holders: int
    largest_prompt: int


@dataclass(slots=True)
class Conversation:
    """A conversation that is kept. tip: the segment it ends in. used: when it last ran, seconds."""

    id: str
    tip: Segment
    salt: bytes
    used: float
    created: float
    pinned: bool = False
    hint: str | None = None


@dataclass(slots=True)
class Turn:
    """A running turn. leaves: the segments it may write, in order."""

    id: int
    conversation: Conversation
    leaves: list[Segment]
    base: tuple[Link, ...]
    prompt: int

    @property
    def frontier(self) -> int:
        return max(s.frontier for s in self.leaves if s is self.leaves[0] or s.tokens)

    @property
    def lease(self) -> Lease:
        return Lease(self.id, self.base, tuple(LeafSpan(s.id, s.start, s.end) for s in self.leaves))


@dataclass(slots=True)
class Totals:
    """Counters since the start, for metrics."""

    admitted: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    trimmed: int = 0
    refused: int = 0


class Ledger:
    """All books of one bank. Only its owner may call it.

    budget: bytes of rows at most. Refusals change nothing.
    """

    def __init__(self, layout: Layout, budget: int) -> None:
        self.layout = layout
        self.budget = budget
        self.orders: list[RowOp] = []
        self.segments: dict[int, Segment] = {}
        self.turns: dict[int, Turn] = {}
        self.conversations: dict[str, Conversation] = {}
        self.totals = Totals()
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._prefixes = Prefixes()
        self._used = 0
        self._next = 1

    @property
    def used(self) -> int:
        """Bytes of all buffers that exist or are ordered."""
        return self._used

    @property
    def available(self) -> int:
        return self.budget - self._used

    def take_orders(self) -> tuple[RowOp, ...]:
        """The orders since the last call, to be given to the device."""
        out, self.orders = tuple(self.orders), []
        return out

    # --- admission

    def longest(self, wanted: Wanted) -> int:
        """Tokens of the longest prefix of the prompt that is kept in memory, the last token never counted."""
        return self._prefixes.longest(wanted.tokens, len(wanted.tokens) - 1, wanted.salt).length

    def admit(self, turn: int, wanted: Wanted, conversation: str, now: float) -> Grant | Shortage:
        """Finds rows for a turn. `conversation` names it if it turns out to be new."""
        found = self._prefixes.longest(wanted.tokens, len(wanted.tokens) - 1, wanted.salt)
        for way in (self._go_on, self._rewind, self._fork):
            got = way(turn, wanted, found, conversation, now)
            if got is not None:
                break
        assert got is not None
        if isinstance(got, Shortage) and found.length:
            # Better computed again than refused: without the prefix to protect, more can be given up.
            return self._fork(turn, wanted, Match(0, ()), conversation, now)
        return got

    def _go_on(self, turn: int, wanted: Wanted, found: Match, _: str, now: float) -> Grant | Shortage | None:
        """The conversation ends on a prefix of the prompt: it goes on in its own rows."""
        tip = next((s for s in found.ends if s.frontier + END_SLACK >= found.length), None)
        if tip is None:
            return None
        return self._continue(turn, wanted, tip, tip.frontier, found.length, now)

    def _rewind(self, turn: int, wanted: Wanted, found: Match, _: str, now: float) -> Grant | Shortage | None:
        """The prompt leaves a conversation inside its last reply: those rows serve nobody else and are given up."""
        for s in found.holders:
            if s.tip is None or s.lease is not None or self.conversations[s.tip].pinned or s.reply_from is None:
                continue
            if s.reply_from - 1 <= found.length < s.frontier and s.held <= found.length:
                del s.tokens[found.length - s.start :]
                self._index(s, wanted.salt)
                return self._continue(turn, wanted, s, found.length, found.length, now)
        return None

    def _continue(
        self, turn: int, wanted: Wanted, tip: Segment, at: int, diverged: int, now: float
    ) -> Grant | Shortage:
        """Leases `tip` from its frontier `at`; the rows that do not fit it go to a new leaf at its end."""
        prompt, full = self._reach(wanted)
        assert tip.tip is not None
        conversation = self.conversations[tip.tip]
        leaves, how = [tip], "adopted"
        price = 0
        copied: dict[str, int] = {}
        if tip.end < prompt + 1 or tip.end < min(full, prompt + BLOCK // 4):
            size = self._affordable(full - tip.end, prompt + 1 - tip.end, tip.end, tip)
            if size is None and tip.end < prompt:
                return self._shortage(round_up(prompt + 1 - tip.end), tip)
            if size is not None:
                tip, moved = self._merge(tip, wanted.salt) if tip.depth >= DEPTH else (tip, 0)
                copied = {"merge": moved} if moved else {}
                leaves = [tip, self._allocate(tip, tip.end, size)]
                price, how = self.layout.capacity_bytes(size), "extended"
        return self._lease(turn, wanted, conversation, leaves, at, how, price, copied, diverged, now)

    def _fork(self, turn: int, wanted: Wanted, found: Match, name: str, now: float) -> Grant | Shortage:
        """A new conversation that shares whole blocks and copies the rest of the last one."""
        source = found.holders[0] if found.length and found.holders else None
        at = found.length if source is not None else 0
        start = at // BLOCK * BLOCK
        prompt, full = self._reach(wanted)
        size = self._affordable(full - start, prompt + 1 - start, start, source)
        if size is None:
            return self._shortage(round_up(prompt + 1 - start), source)
        parent = _at(source, start) if source is not None and start else None
        leaf = self._allocate(parent, start, size)
        copied: dict[str, int] = {}
        if source is not None and at > start:
            holder = _at(source, at)
            self.orders.append(CopyRows(holder.id, leaf.id, start, at))
            leaf.tokens = list(wanted.tokens[start:at])
            copied["fork"] = (at - start) * self.layout.row_bytes
        conversation = Conversation(name, leaf, wanted.salt, now, now, hint=wanted.hint)
        self.conversations[name] = conversation
        leaf.tip = name
        self._index(leaf, wanted.salt)
        how = "forked" if source is not None else "fresh"
        price = self.layout.capacity_bytes(size)
        return self._lease(turn, wanted, conversation, [leaf], at, how, price, copied, at, now)

    def _reach(self, wanted: Wanted) -> tuple[int, int]:
        """Positions the rows of the prompt, and of the prompt with its reserve, end at."""
        prompt = len(wanted.tokens)
        return prompt, prompt + min(wanted.answer, RESERVE)

    def _lease(
        self,
        turn: int,
        wanted: Wanted,
        conversation: Conversation,
        leaves: list[Segment],
        at: int,
        how: str,
        price: int,
        copied: dict[str, int],
        diverged: int,
        now: float,
    ) -> Grant:
        first = leaves[0]
        for s in leaves:
            s.lease = turn
        base = links(first.parent, first.start) if first.parent is not None else ()
        made = Turn(turn, conversation, leaves, base, len(wanted.tokens))
        self.turns[turn] = made
        conversation.used = now
        self._idle.pop(conversation.id, None)
        _count(self.totals.admitted, how, 1)
        for reason, moved in copied.items():
            _count(self.totals.copied, reason, moved)
        return Grant(made.lease, conversation.id, at, how, price, tuple(copied.items()), diverged)

    # --- a running turn

    def grow(self, turn: int, rows: int) -> Lease | Shortage:
        """Another leaf of at least `rows` rows for a turn whose leaves are full."""
        made = self.turns[turn]
        last = made.leaves[-1]
        size = self._affordable(rows + RESERVE, rows, last.end, last)
        if size is None:
            return self._shortage(round_up(rows), last)
        leaf = self._allocate(last, last.end, size)
        leaf.lease = turn
        made.leaves.append(leaf)
        return made.lease

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
                    self._index(s, made.conversation.salt)
        if rest:
            raise AssertionError(f"turn {turn} wrote {len(rest)} rows past its leaves")

    def release(self, turn: int, keep: int, now: float) -> None:
        """The lease comes back; rows past `keep` (undelivered) are given up. Unused leaves are dropped."""
        made = self.turns.pop(turn)
        conversation, tip = made.conversation, made.leaves[0]
        for s in made.leaves:
            s.lease = s.tip = None
        for s in reversed(made.leaves):
            del s.tokens[max(0, max(keep, s.held) - s.start) :]
            if s.tokens or s is made.leaves[0]:
                tip = s if s.start >= tip.start else tip
                self._index(s, conversation.salt)
            elif s.free:
                self._drop(s)
        tip.tip, conversation.tip = conversation.id, tip
        tip.reply_from = min(made.prompt, tip.frontier)
        conversation.used = now
        if tip.tokens:
            self._idle[conversation.id] = None
        else:
            self.forget(conversation.id)

    # --- keeping and giving up

    def forget(self, conversation: str) -> None:
        """Drops an idle conversation: its own rows go, rows others use stay."""
        gone = self.conversations.pop(conversation)
        self._idle.pop(conversation, None)
        gone.tip.tip = None
        self._drop_free(gone.tip)

    def fork(self, conversation: str, at: int | None, name: str, now: float) -> Conversation | Shortage:
        """A new idle conversation over the first `at` rows of another (all by default). Nothing is computed."""
        tip = self.conversations[conversation].tip
        at = tip.frontier if at is None else max(0, min(at, tip.frontier))
        start = at // BLOCK * BLOCK
        source = _at(tip, at) if at else tip
        if not self._make_room(self.layout.capacity_bytes(BLOCK), source, hard=True):
            return self._shortage(BLOCK, source)
        leaf = self._allocate(_at(tip, start) if start else None, start, BLOCK)
        if at > start:
            self.orders.append(CopyRows(source.id, leaf.id, start, at))
            leaf.tokens = source.tokens[start - source.start : at - source.start]
            _count(self.totals.copied, "fork", (at - start) * self.layout.row_bytes)
        old = self.conversations[conversation]
        made = Conversation(name, leaf, old.salt, now, now, hint=old.hint)
        leaf.tip = name
        self.conversations[name] = made
        self._idle[name] = None
        self._index(leaf, old.salt)
        return made

    def owned_bytes(self, conversation: Conversation) -> int:
        """Bytes that would go if this conversation were dropped."""
        total, at = 0, conversation.tip
        while at is not None and len(at.children) <= (at is not conversation.tip) and not at.holds:
            if at is not conversation.tip and at.tip is not None:
                break
            total += self.layout.capacity_bytes(at.capacity)
            if at.parent is None:
                break
            at = at.parent
        return total

    def trim(self, conversation: str) -> int:
        """Gives back the whole unused blocks of an idle conversation's tip, one layer at a time. Bytes gained."""
        return self._shrink(self.conversations[conversation].tip)

    def _shrink(self, s: Segment) -> int:
        """Moves a segment to buffers of the blocks it needs. The peak is one layer; 0 when that is not available."""
        target = max(BLOCK, round_up(len(s.tokens)))
        biggest = max((layer.capacity_bytes(target) for layer in self.layout.layers), default=0)
        if target >= s.capacity or s.lease is not None or biggest > self.available:
            return 0
        self.orders += [ResizeLayer(s.id, i, target, s.frontier) for i in range(len(self.layout.layers))]
        gained = self.layout.capacity_bytes(s.capacity) - self.layout.capacity_bytes(target)
        s.capacity = target
        self._used -= gained
        _count(self.totals.copied, "trim", len(s.tokens) * self.layout.row_bytes)
        self.totals.trimmed += 1
        return gained

    def _cut_unowned(self, s: Segment) -> None:
        """Rows past the last hold of a segment where no conversation ends serve nobody."""
        if s.tip is None and s.lease is None and s.held < s.frontier:
            del s.tokens[s.held - s.start :]
            self._prefixes.update(s, self._prefixes.salt(s))
        if s.tip is None:
            self._shrink(s)

    def idle_slack(self, now: float, age: float) -> list[str]:
        """Idle conversations that own unused blocks and have not run for `age` seconds."""
        return [
            c.id
            for c in map(self.conversations.__getitem__, self._idle)
            if now - c.used >= age and c.tip.capacity > max(BLOCK, round_up(len(c.tip.tokens)))
        ]

    def _affordable(self, wished: int, least: int, position: int, needed: Segment | None) -> int | None:
        """Rows of a new leaf at `position`: generous if memory allows, else what is wished, else the least."""
        grown = max(wished, position // GROWTH)
        for rows in dict.fromkeys(round_up(max(1, r)) for r in (grown, wished, least)):
            if self._make_room(self.layout.capacity_bytes(rows), needed, hard=rows == round_up(max(1, least))):
                return rows
        return None

    def _make_room(self, needed: int, keep: Segment | None, hard: bool) -> bool:
        """Whether `needed` bytes are available, after reclaiming if `hard`. Never touches `keep`'s chain."""
        if needed <= self.available:
            return True
        if not hard or needed > self.available + self._reclaimable(keep):
            return False
        if keep is not None:
            keep.holds["admission"] = keep.frontier
        self._reclaim(needed, keep)
        if keep is not None:
            del keep.holds["admission"]
        return needed <= self.available

    def _kept(self, keep: Segment | None) -> set[int]:
        return {s.id for s in keep.ancestors()} if keep is not None else set()

    def _reclaimable(self, keep: Segment | None) -> int:
        """Bytes that dropping every idle conversation that nobody needs would free."""
        kept = self._kept(keep)
        for turn in self.turns.values():
            for s in turn.leaves:
                kept.update(a.id for a in s.ancestors())
        for c in self.conversations.values():
            if c.pinned:
                kept.update(a.id for a in c.tip.ancestors())
        for s in self.segments.values():
            if s.holds:
                kept.update(a.id for a in s.ancestors())
        return sum(self.layout.capacity_bytes(s.capacity) for s in self.segments.values() if s.id not in kept)

    def _reclaim(self, needed: int, keep: Segment | None) -> None:
        kept = self._kept(keep)
        for name in list(self._idle):
            if needed <= self.available:
                return
            if self.conversations[name].tip.id not in kept:
                self.trim(name)
        for s in list(self.segments.values()):
            if needed <= self.available:
                return
            self._cut_unowned(s)
        for name in list(self._idle):
            if needed <= self.available:
                return
            c = self.conversations[name]
            if not c.pinned and c.tip.id not in kept and not c.tip.holds:
                self.forget(name)
                self.totals.dropped += 1

    def _shortage(self, rows: int, keep: Segment | None) -> Shortage:
        self.totals.refused += 1
        free = self.available + self._reclaimable(keep)
        fit = max(0, free // max(1, self.layout.block_bytes)) * BLOCK
        return Shortage(self.layout.capacity_bytes(rows), max(0, free), len(self.turns), max(0, fit - 1))

    # --- segments

    def _allocate(self, parent: Segment | None, start: int, capacity: int) -> Segment:
        made = Segment(self._next, parent, start, capacity)
        self._next += 1
        self.segments[made.id] = made
        self._used += self.layout.capacity_bytes(capacity)
        if parent is not None:
            parent.children.add(made)
        self.orders.append(Allocate(made.id, start, capacity))
        return made

    def _drop(self, s: Segment) -> None:
        self._prefixes.remove(s)
        del self.segments[s.id]
        self._used -= self.layout.capacity_bytes(s.capacity)
        if s.parent is not None:
            s.parent.children.discard(s)
        self.orders.append(Drop(s.id))

    def _drop_free(self, s: Segment | None) -> None:
        while s is not None and s.free:
            above = s.parent
            self._drop(s)
            s = above

    def _merge(self, tip: Segment, salt: bytes) -> tuple[Segment, int]:
        """Copies the newest segments of a chain into one, so that sizes stay geometric: the new tip and bytes copied.

        Where that cannot be afforded the chain stays as it is."""
        path = list(tip.ancestors())
        upto, rows = 1, tip.end - tip.start
        while upto < len(path) - 1 and (path[upto].end - path[upto].start <= 2 * rows or upto < 2):
            rows = tip.end - path[upto].start
            upto += 1
        first = path[upto - 1]
        if not self._make_room(self.layout.capacity_bytes(rows), tip, hard=True):
            return tip, 0
        made = self._allocate(first.parent, first.start, rows)
        for s, stop in zip(
            reversed(path[:upto]), [p.start for p in reversed(path[: upto - 1])] + [tip.frontier], strict=True
        ):
            self.orders.append(CopyRows(s.id, made.id, s.start, min(stop, s.frontier)))
            made.tokens += s.tokens[: stop - s.start]
        name, made.reply_from = tip.tip, tip.reply_from
        assert name is not None
        made.tip, tip.tip = name, None
        self.conversations[name].tip = made
        self._drop_free(tip)
        self._index(made, salt)
        return made, len(made.tokens) * self.layout.row_bytes

    def _index(self, s: Segment, salt: bytes) -> None:
        if s.tokens:
            self._prefixes.update(s, salt)
        else:
            self._prefixes.remove(s)

    def tokens_of(self, conversation: str) -> list[int]:
        tip = self.conversations[conversation].tip
        return chain_tokens(tip, tip.frontier)


def _at(segment: Segment, stop: int) -> Segment:
    """The segment of the chain that holds row `stop - 1`."""
    return next(s for s in segment.ancestors() if s.start < stop)


def _count(counts: dict[str, int], key: str, by: int) -> None:
    counts[key] = counts.get(key, 0) + by
