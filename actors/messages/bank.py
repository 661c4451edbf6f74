"""What the bank is asked and told. Replies are plain values; a refusal is an error of the one tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecopy.runtime.core import Ask, Message, Ref, Reply
from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.rows.ledger import Grant, Wanted
from onecopy.runtime.rows.segments import Lease
from onecopy.runtime.store import Found

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

    keep: the conversation's length in rows; later rows were never delivered.
    """

    due = True
    turn: int
    keep: int


@dataclass(frozen=True, slots=True)
class LaneLost(Message):
    """The lane crashed: every lease it worked on is void, rows past the last commit are given up."""

    due = True


@dataclass(frozen=True, slots=True)
class Kept:
    """A conversation as the bank knows it. tokens: rows it has. owned: bytes that go when it goes."""

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
    """Drops an idle conversation. Conflict while it runs."""

    conversation: str


@dataclass(frozen=True, slots=True)
class BankStatistics(Ask[dict[str, Any]]):
    control = True


@dataclass(frozen=True, slots=True)
class Park(Ask[Kept]):
    """Everything of an idle conversation goes to disk and its memory is freed. Conflict while it runs."""

    conversation: str


@dataclass(frozen=True, slots=True)
class Parked(Message):
    """From the bank to itself: a conversation is on disk to its last whole block, or could not be put there."""

    due = True
    conversation: str
    reply: Reply[Kept]
    error: OnecopyError | None


@dataclass(frozen=True, slots=True)
class LookedUp(Message):
    """From the bank to itself: what the disk has of a prompt; None when it could not be asked."""

    due = True
    ask: Admit
    reply: Reply[Grant]
    found: Found | None


@dataclass(frozen=True, slots=True)
class Restored(Message):
    """From the bank to itself: a granted turn's rows came from disk, or did not (None)."""

    due = True
    ask: Admit
    reply: Reply[Grant]
    grant: Grant
    keys: tuple[bytes, ...]
    report: RestoreReport | None


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """From the bank to itself: a save ended. segment: whose rows were held for it."""

    due = True
    conversation: str
    segment: int
    report: SaveReport | None
