"""What the stager is asked and told, and what it needs of the bank.

Save: the bank takes a hold on a chain's rows, asks `Save`, and lets the hold go when the answer comes: until then the
stager reads rows in place through `reader`. The answer is a report, never an error for a disk that failed; rows that
did not make it are dirty, and the bank saves them again with the next turn. One save runs for each owner; a later one
waits for it, and an even later one replaces the waiting one.

Restore: the bank makes a segment with room, asks `Restore` with keys from the rows store, and moves the frontier to
`report.rows`. Blocks are written whole and in order, into rows past the frontier only.

The bank implements `RowsReader` and `RowsWriter`; both speak of absolute block numbers and positions, and may suspend
while the device thread works. Arrays may be views of live buffers: rows under a hold do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from onecopy.runtime.core import Ask, Message
from onecopy.runtime.store import Place, Tensors


class RowsReader(Protocol):
    """Reads rows under a hold. segment: the leaf of a chain; the reader finds the ancestor that has the rows."""

    async def read_block(self, segment: int, block: int) -> Tensors:
        """Rows `[256 * block, 256 * block + 256)` by tensor name. Raises OnecopyError when the segment is gone."""
        ...

    async def read_anchor(self, segment: int, at: int) -> Tensors:
        """The recurrent state at `at` and the rows of the partial block before it, by tensor name."""
        ...


class RowsWriter(Protocol):
    """Writes restored rows past a segment's frontier. Arrays are only valid during the call."""

    async def place(self, segment: int, block: int) -> Place | None:
        """The memory of a whole block past the frontier, to be filled from any thread while the restore lasts. None:
        there is no such memory; its rows come by `write_block`."""
        ...

    async def write_block(self, segment: int, block: int, tensors: Tensors) -> None: ...
    async def write_anchor(self, segment: int, at: int, tensors: Tensors) -> None: ...


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended.

    rows: how many leading rows are on disk now, the anchor's counted. complete: all that was asked is. keys: of the
    blocks on disk, for the next save's `known`. blocks: new ones. written: bytes of what was new. state: bytes of all.
    windows: how many times bytes were staged. error: why it is not complete. anchor: key of the state at the end, if it
    was asked for and is on disk.
    """

    rows: int
    complete: bool
    keys: tuple[bytes, ...]
    blocks: int
    written: int
    state: int
    windows: int
    seconds: float
    error: str | None = None
    anchor: bytes | None = None


@dataclass(frozen=True, slots=True)
class Save(Ask[SaveReport]):
    """Puts on disk what of `tokens` is not there yet.

    owner: conversation, as shown in logs and `/health`. tokens: all of the state's, from position 0. segment: the leaf.
    anchor: also the state at the end with its partial block. known: `keys` of this conversation's last report. used:
    Unix seconds when it last ran, None for now: an older one never makes room by taking a younger one's. again: also
    write what was on disk and has made room for others since. waypoints: positions on the way whose recurrent
    states are to be there too, and who reads each.
    """

    owner: str
    tokens: tuple[int, ...]
    segment: int
    reader: RowsReader
    salt: bytes = b""
    anchor: bool = True
    known: tuple[bytes, ...] = ()
    used: int | None = None
    again: bool = True
    waypoints: tuple[tuple[int, RowsReader], ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """rows: leading rows that are in the segment now, counted from position 0. anchor: its state was written too."""

    rows: int
    anchor: bool
    blocks: int
    read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Restore(Ask[RestoreReport]):
    """Fills `segment` from disk. keys: of blocks `first`, `first` + 1, …; anchor: (position, key), after all of them.

    Ends at the first block that is not there any more; what was written before it counts.
    """

    owner: str
    segment: int
    first: int
    keys: tuple[bytes, ...]
    writer: RowsWriter
    anchor: tuple[int, bytes] | None = None


@dataclass(frozen=True, slots=True)
class CancelSave(Message):
    """Ends the owner's saves at the next record. Their askers get a report of what was written."""

    control: ClassVar[bool] = True
    owner: str


@dataclass(frozen=True, slots=True)
class Forgotten(Message):
    """The owner is no more: rows of it that are not on disk are nobody's loss."""

    due: ClassVar[bool] = True
    owner: str


@dataclass(frozen=True, slots=True)
class Flush(Ask[tuple[str, ...]]):
    """Waits until no save is left, for at most `seconds`; answered with the owners whose rows did not make it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class KeysInFlight(Ask[frozenset[bytes]]):
    """Keys of the records that saves under way have written or will write: ends of nothing yet."""

    control: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class StagerStatistics(Ask[dict[str, Any]]):
    """Saves and restores so far, the permit and its use, owners in work and dirty ones, `persisting`, `why_not`."""

    control: ClassVar[bool] = True
