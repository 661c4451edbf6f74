"""What a turn asks of the books and what it gets: plain values, and the records of who runs and who is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .ops import Link
from .segments import LeafSpan, Lease, Mark, Segment


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a turn asks for. tokens: the whole prompt. answer: rows its answer may need at most.

    fixed: its leaf is wanted in whole buckets that last the answer, for a forward compiled at the buffers' size.
    capacity: the same at exactly so many rows; None takes what comes. starts: positions in the prompt at which messages
    start, ascending: where a recurrent state is worth keeping.
    """

    tokens: tuple[int, ...]
    answer: int
    salt: bytes = b""
    hint: str | None = None
    capacity: int | None = None
    fixed: bool = False
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """How a turn got its rows.

    matched: rows it need not compute. how: the way. price: bytes held more. copied: bytes by reason.
    diverged: the first prompt token that no kept row matched. restored: rows of `matched` that came from disk.
    peak: bytes needed at the worst moment, beyond what was held before. written: bytes that saves of this conversation
    wrote since it was last granted.
    A resize is only planned here: `executed` makes it or degrades it, and answers with the grant as it is then.
    """

    lease: Lease
    conversation: str
    matched: int
    how: str
    price: int
    copied: tuple[tuple[str, int], ...]
    diverged: int
    restored: int = 0
    peak: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why not: bytes needed and available, conversations that run, and the longest prompt that fits now.

    pending: bytes that come back when the saves that were asked for are done.
    """

    needed: int
    available: int
    holders: int
    largest_prompt: int
    pending: int = 0


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation that is kept. tip: the segment it ends in. used: when it last ran, seconds.

    A pinned one is never given up; `on_pin` tells the books.
    """

    id: str
    tip: Segment
    salt: bytes
    used: float
    created: float
    on_pin: Callable[[Segment, int], None]
    hint: str | None = None
    _pinned: bool = False

    @property
    def pinned(self) -> bool:
        return self._pinned

    @pinned.setter
    def pinned(self, on: bool) -> None:
        if on != self._pinned:
            self._pinned = on
            self.on_pin(self.tip, 1 if on else -1)


@dataclass(frozen=True, slots=True)
class Plan:
    """A resize that is granted and not yet made: capacity in rows, where the rows end, bytes set aside for it."""

    rows: int
    at: int
    reserved: int


@dataclass(slots=True, eq=False)
class Turn:
    """A running turn. leaves: the segments it may write, in order. how: the way it was met.

    price: bytes held more for it. fixed: it wanted its buffers at a fixed size and has its last leaf at one.
    marks: where states are to be kept, in order, with bytes set aside for each.
    """

    id: int
    conversation: Conversation
    leaves: list[Segment]
    base: tuple[Link, ...]
    prompt: int
    how: str
    plan: Plan | None = None
    price: int = 0
    fixed: bool = False
    marks: tuple[Mark, ...] = ()

    @property
    def frontier(self) -> int:
        return max(s.frontier for s in self.leaves if s is self.leaves[0] or s.tokens)

    @property
    def lease(self) -> Lease:
        leaves = tuple(LeafSpan(s.id, s.start, s.end) for s in self.leaves)
        return Lease(self.id, self.base, leaves, self.fixed, self.marks)


@dataclass(slots=True)
class Totals:
    """Counters since the start, for metrics. admitted: turns by way. priced: bytes held more for them, by way.

    copied: bytes by reason. dropped: conversations given up. waited: turns that had to wait for memory.
    """

    admitted: dict[str, int] = field(default_factory=dict)
    priced: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    trimmed: int = 0
    waited: int = 0
    refused: int = 0


def count(counts: dict[str, int], key: str, by: int = 1) -> None:
    counts[key] = counts.get(key, 0) + by
