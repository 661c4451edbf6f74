"""What the bank is asked and told. Replies are plain values; a refusal is an error of the one tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecopy.runtime.core import Ask, Message, Ref, Reply
from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ledger import Grant, Wanted
from onecopy.runtime.rows.segments import Lease

from .stager import RestoreReport, SaveReport


@dataclass(frozen=True, slots=True)
class Admit(Ask[Grant]):
    """Rows for a turn. Answered when they are there; `asker` hears `Waiting` while the turn is queued."""

    turn: int
    wanted: Wanted
    conversation: str
    asker: Ref


@dataclass(frozen=True, slots=True)
class Grow(Ask[Lease | None]):
    """Another leaf of at least `rows` rows for a turn whose leaves are full; None when no memory can be had."""

    due = True
    turn: int
    rows: int


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """After a round: the tokens whose rows are now written, by turn."""

    due = True
    written: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Release(Message):
    """A lease comes back, or a turn that waited for one has left.

    keep: the conversation's length in rows; later rows were never delivered. broken: its round failed.
    """

    due = True
    turn: int
    keep: int
    broken: bool = False


@dataclass(frozen=True, slots=True)
class LaneLost(Message):
    """The lane crashed: every lease it worked on is void, rows past the last commit are given up."""

    due = True


@dataclass(frozen=True, slots=True)
class Kept:
    """A conversation as the bank knows it. tokens: rows it has. owned: bytes that go when it goes.

    parked: its rows are on disk only. tip: key of its last record on disk, empty when there is none.
    """

    id: str
    tokens: int
    owned: int
    running: bool
    pinned: bool
    used: float
    created: float
    depth: int
    salt: bytes
    hint: str | None
    parked: bool = False
    tip: bytes = b""


@dataclass(frozen=True, slots=True)
class ListKept(Ask[tuple[Kept, ...]]):
    control = True


@dataclass(frozen=True, slots=True)
class Find(Ask[Kept]):
    """One conversation, or NotFound."""

    conversation: str


@dataclass(frozen=True, slots=True)
class Tokens(Ask[tuple[int, ...]]):
    """The token ids of a conversation's rows, or NotFound."""

    conversation: str


@dataclass(frozen=True, slots=True)
class Pin(Ask[Kept]):
    conversation: str
    on: bool


@dataclass(frozen=True, slots=True)
class Fork(Ask[Kept]):
    """A new idle conversation that shares the first `at` rows. Conflict while a turn runs past them."""

    conversation: str
    at: int | None
    name: str


@dataclass(frozen=True, slots=True)
class Forget(Ask[None]):
    """Drops an idle conversation, in memory and on disk. Conflict while it runs."""

    conversation: str


@dataclass(frozen=True, slots=True)
class BankStatistics(Ask[dict[str, Any]]):
    control = True


@dataclass(frozen=True, slots=True)
class Preserve(Ask[Kept]):
    """Puts an idle conversation on disk to its last row; forget: and frees its memory. Conflict while it runs.

    A conversation that is parked already is answered as it is.
    """

    conversation: str
    forget: bool


@dataclass(frozen=True, slots=True)
class Source:
    """What the disk has of a prompt. keys: of its leading blocks. anchor: (position, key) of a state behind them."""

    keys: tuple[bytes, ...] = ()
    anchor: tuple[int, bytes] | None = None

    @property
    def rows(self) -> int:
        return self.anchor[0] if self.anchor is not None else len(self.keys) * BLOCK

    @property
    def tips(self) -> tuple[bytes, ...]:
        return (*self.keys, self.anchor[1]) if self.anchor is not None else self.keys


NOTHING = Source()


@dataclass(frozen=True, slots=True)
class LookedUp(Message):
    """From the bank to itself: what the disk has of a prompt, nothing when it could not be asked."""

    due = True
    ask: Admit
    reply: Reply[Grant]
    source: Source


@dataclass(frozen=True, slots=True)
class Restored(Message):
    """From the bank to itself: a granted turn's rows came from disk, or did not (None)."""

    due = True
    ask: Admit
    reply: Reply[Grant]
    grant: Grant
    source: Source
    report: RestoreReport | None


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """From the bank to itself: a save ended. segment: whose rows were held for it. state: the anchor taken for it.

    waypoints: the anchors of the states on the way that went with it.
    """

    due = True
    conversation: str
    segment: int
    report: SaveReport | None
    state: int | None = None
    waypoints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Preserved(Message):
    """From the bank to itself: a conversation is on disk to its last row, or could not be put there."""

    due = True
    saved: Saved
    reply: Reply[Kept]
    forget: bool
    error: OnecopyError | None
