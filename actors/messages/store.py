"""What the rows store is asked and told.

The bank asks `Lookup` at admission: which leading blocks and which anchors of a prompt are on disk. It hands the keys
to the stager (`Restore`), which reads them with `Read`. The stager asks `Plan` and `Put` for a save. `Condemn` is for a
bank whose first forward on restored rows failed. Nobody else writes to the directory.

Errors as answers: NotPersisting (a disk error, a full disk or quota, a second process's directory), and what any ask
may raise (Overloaded, ActorStopped, DeadlineExceeded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from onecopy.runtime.core import Ask, Message
from onecopy.runtime.store import Conversation, Found, Place, Record, Stored


@dataclass(frozen=True, slots=True)
class Lookup(Ask[Found]):
    """What is on disk of these tokens: keys of leading whole blocks, anchors latest first.

    pin: seconds for which what was found is kept from eviction, long enough to restore it.
    """

    tokens: tuple[int, ...]
    salt: bytes = b""
    pin: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """What a save of some tokens has to write.

    keys: of all whole blocks. missing: indices of those not on disk, in order. anchor: key of the anchor at the end,
    None when it is there already or was not asked for. present: bytes on disk of what is there. end: key of the anchor
    at the end, there or not; None when it was not asked for.
    """

    keys: tuple[bytes, ...]
    missing: tuple[int, ...]
    anchor: bytes | None
    present: int
    end: bytes | None = None


@dataclass(frozen=True, slots=True)
class Plan(Ask[Planned]):
    """known: keys of leading blocks from an earlier plan or report of the same tokens, so they are not hashed again."""

    tokens: tuple[int, ...]
    salt: bytes
    anchor: bool
    known: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Put(Ask[int]):
    """Writes records; answered with the bytes written once all of them are durable. Those present cost nothing."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Read(Ask[tuple[Stored, ...]]):
    """Records in a row, verified, up to the first that cannot be had: not there, damaged, of another version,
    unreadable; that one will be written anew.

    places: for each, memory to read it to, or None. When its tensors are like the place's arrays the record is read
    right there, and the answer's `tensors` are these very arrays; one that fails leaves its place zero.
    wanted: asked before each record, from the thread that reads; no further one is read when it says no, nor when the
    asker has left.
    """

    keys: tuple[bytes, ...]
    places: tuple[Place | None, ...]
    wanted: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class Touch(Message):
    """These records were in use at `used` (Unix seconds, None for now): the last key of a chain is enough."""

    keys: tuple[bytes, ...]
    used: int | None = None


@dataclass(frozen=True, slots=True)
class Condemn(Message):
    """These records read well but cannot be computed on. They go, and the next save replaces them."""

    keys: tuple[bytes, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Supersede(Message):
    """These records served a state that a later one on disk has replaced. They go."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DropConversation(Ask[int]):
    """Forgets a conversation up to where another shares it; answered with the number of records."""

    tip: bytes


@dataclass(frozen=True, slots=True)
class ListConversations(Ask[tuple[Conversation, ...]]):
    """All conversations on disk, last used first."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A conversation on disk and the salt of whoever it belongs to."""

    conversation: Conversation
    salt: bytes


@dataclass(frozen=True, slots=True)
class ListOwned(Ask[tuple[Owned, ...]]):
    """This model's whole conversations on disk that belong to one of these salts, last used first."""

    salts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Export(Ask[bytes]):
    """A conversation as one safetensors image. NotFound when it is not on disk from its beginning."""

    tip: bytes


@dataclass(frozen=True, slots=True)
class Import(Ask[bytes]):
    """Takes an exported image in, for the owner of `salt`; answered with its tip.

    BadRequest when it is no such image or another model's.
    """

    data: bytes
    salt: bytes


@dataclass(frozen=True, slots=True)
class StoreStatistics(Ask[dict[str, Any]]):
    """The actor's and the engine's counters; `persisting` and `why_not` tell the state for `/health`."""

    control: ClassVar[bool] = True
