"""Segments: contiguous runs of rows, and the tree they form. Pure state, no MLX, no trio.

A segment's length is the number of its tokens; its frontier, its bytes and its chain are derived from that.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Protocol

from .ops import Chain, Link


class Owner(Protocol):
    """Who keeps sums over segments, and so hears of holds and saves."""

    def held(self, segment: Segment) -> None: ...

    def unheld(self, segment: Segment) -> None: ...

    def on_disk(self, segment: Segment) -> None: ...


class Holds(MutableMapping[str, int]):
    """ "Rows up to n must stay", by holder. A holder's first entry holds the segment, its removal lets it go."""

    __slots__ = ("_segment", "_upto")

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._upto: dict[str, int] = {}

    def __getitem__(self, holder: str) -> int:
        return self._upto[holder]

    def __setitem__(self, holder: str, upto: int) -> None:
        new = holder not in self._upto
        self._upto[holder] = upto
        if new and self._segment.owner is not None:
            self._segment.owner.held(self._segment)

    def __delitem__(self, holder: str) -> None:
        del self._upto[holder]
        if self._segment.owner is not None:
            self._segment.owner.unheld(self._segment)

    def __iter__(self) -> Iterator[str]:
        return iter(self._upto)

    def __len__(self) -> int:
        return len(self._upto)


@dataclass(slots=True, eq=False)
class Segment:
    """Rows `[start, frontier)` inside `[start, end)`, all positions absolute; `parent` holds everything before `start`.

    lease: the turn that may write past the frontier. holds: "rows up to n must stay", by holder (saves, pins).
    tip: the conversation that ends here. reply_from: where the last reply began, None before the first.
    saved: rows known to be on disk, counted from position 0. anchors: anchor ids by position; marks: those of them
    where another prompt left this one, which are kept while the rows are.
    live: a recurrent layout's state in these buffers is the one at the frontier.
    forks: how many children start at a position. locks: reasons in this subtree why it cannot be given up.
    Children, leases and locks are changed by the books alone, which keep sums of them.
    """

    id: int
    parent: Segment | None
    start: int
    capacity: int
    owner: Owner | None = None
    tokens: list[int] = field(default_factory=list)
    children: set[Segment] = field(default_factory=set)
    holds: Holds = field(init=False)
    lease: int | None = None
    tip: str | None = None
    reply_from: int | None = None
    anchors: dict[int, int] = field(default_factory=dict)
    marks: set[int] = field(default_factory=set)
    live: bool = True
    forks: dict[int, int] = field(default_factory=dict)
    locks: int = 0
    _saved: int = 0

    def __post_init__(self) -> None:
        self.holds = Holds(self)

    @property
    def saved(self) -> int:
        return self._saved

    @saved.setter
    def saved(self, rows: int) -> None:
        self._saved = rows
        if self.owner is not None:
            self.owner.on_disk(self)

    @property
    def frontier(self) -> int:
        return self.start + len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + self.capacity

    @property
    def held(self) -> int:
        """Rows below this position belong to others too: children that start there, saves and pins."""
        return max((self.start, *self.forks, *self.holds.values()))

    @property
    def free(self) -> bool:
        """Nobody needs this segment: no children, no lease, no holds, no conversation ends here."""
        return not self.children and self.lease is None and not self.holds and self.tip is None

    def adopt(self, child: Segment) -> None:
        self.children.add(child)
        self.forks[child.start] = self.forks.get(child.start, 0) + 1

    def disown(self, child: Segment) -> None:
        self.children.discard(child)
        self.forks[child.start] -= 1
        if not self.forks[child.start]:
            del self.forks[child.start]

    def ancestors(self) -> Iterator[Segment]:
        """This segment, its parent, and so on to the root."""
        at: Segment | None = self
        while at is not None:
            yield at
            at = at.parent

    @property
    def depth(self) -> int:
        return sum(1 for _ in self.ancestors())


def links(segment: Segment, stop: int) -> tuple[Link, ...]:
    """The chain that reads rows `[0, stop)` through `segment`, each ancestor only up to its child's start."""
    out = []
    for at in segment.ancestors():
        if stop > at.start or at.parent is None:
            out.append(Link(at.id, at.start, stop))
        stop = min(stop, at.start)
    return tuple(reversed(out))


def chain_tokens(segment: Segment, stop: int) -> list[int]:
    """Token ids of rows `[0, stop)`."""
    parts: list[list[int]] = []
    for at in segment.ancestors():
        parts.append(at.tokens[: max(0, stop - at.start)])
        stop = min(stop, at.start)
    return [t for part in reversed(parts) for t in part]


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a prompt whose recurrent state is to be kept, under the anchor's id.

    parts: another prompt left this one here; otherwise a message starts.
    """

    position: int
    anchor: int
    parts: bool = False


@dataclass(frozen=True, slots=True)
class LeafSpan:
    """A segment a turn may write: absolute rows `[start, end)` of its buffers."""

    segment: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one conversation's rows: what lies before, and the leaves in order.

    fixed: the last leaf's buffers have the fixed size that a compiled verify was granted; otherwise it runs eagerly.
    marks: where the prompt's rows are to stop for a moment, in order, so that a recurrent state is kept.
    """

    turn: int
    base: tuple[Link, ...]
    leaves: tuple[LeafSpan, ...]
    fixed: bool = False
    marks: tuple[Mark, ...] = ()

    @property
    def end(self) -> int:
        """Rows past this position need growth."""
        return self.leaves[-1].end

    def room(self, position: int) -> int:
        """Rows that can be written at `position` before the leaf it falls in ends."""
        return next((s.end - position for s in self.leaves if s.start <= position < s.end), 0)

    def chain(self, position: int) -> Chain:
        """The chain of a strip that begins at `position`: everything before it, and the leaf it is written to."""
        out = list(self.base)
        for span in self.leaves:
            if span.start <= position < span.end:
                return Chain((*out, Link(span.segment, span.start, position)), span.end)
            out.append(Link(span.segment, span.start, span.end))
        raise IndexError(f"position {position} lies in no leaf of turn {self.turn}")
