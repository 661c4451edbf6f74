"""Conversations that left memory and are on disk: their names, so that a parked session keeps its id. Pure state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ledger import Conversation

from .messages.bank import Kept

MOST = 4096
"""Names remembered: past that, and after a restart, a conversation on disk is known by its key alone."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What the disk has of a conversation in memory.

    keys: of its leading blocks there. anchor: of the state behind them, when it is there. rows: how many those make.
    older: of the states before that one that stay, of a recurrent model, the latest first.
    """

    keys: tuple[bytes, ...]
    anchor: bytes | None = None
    rows: int = 0
    older: tuple[bytes, ...] = ()

    @property
    def tip(self) -> bytes:
        """Key of the last record; empty when there is none."""
        return self.anchor or (self.keys[-1] if self.keys else b"")

    def upto(self, saved: int) -> OnDisk:
        """What of it still holds when only the first `saved` rows are as they were written."""
        whole = min(self.rows, saved) // BLOCK
        return self if self.rows <= saved else OnDisk(self.keys[:whole], None, whole * BLOCK)


class Away:
    """Names by tip and tips by name, oldest first. A name is taken when its conversation comes back to memory."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: dict[str, Kept] = {}
        self._names: dict[bytes, str] = {}

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: str) -> Kept | None:
        return self._kept.get(name)

    def add(self, gone: Conversation, disk: OnDisk) -> None:
        """The conversation has left memory. One of which the disk has nothing is gone for good."""
        if not disk.tip:
            return
        self.remove(gone.id)
        self.remove(self._names.get(disk.tip, ""))
        self._kept[gone.id] = Kept(
            gone.id, disk.rows, 0, False, False, gone.used, gone.created, 0, gone.salt, gone.hint, True, disk.tip
        )
        self._names[disk.tip] = gone.id
        while len(self._kept) > self._most:
            self.remove(next(iter(self._kept)))

    def remove(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            del self._names[kept.tip]

    def named(self, tips: Sequence[bytes], salt: bytes) -> str | None:
        """The name of the conversation that ends in one of these records, the last that has one."""
        for tip in reversed(tips):
            name = self._names.get(tip)
            if name is not None and self._kept[name].salt == salt:
                return name
        return None
