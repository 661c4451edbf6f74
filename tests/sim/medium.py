"""What a machine's disk really holds: bytes and names that are volatile until synced, and what a power cut leaves.

Bytes are volatile until their file is synced, names until their directory is. A cut applies, drops, tears (at a
512-byte sector) or zero-fills each write that was not synced, and keeps or loses each name change. A write whose
sync failed stays readable and never becomes durable, as on Linux.
"""

from __future__ import annotations

import posixpath
import random
from dataclasses import dataclass, field

SECTOR = 512


@dataclass(slots=True, eq=False)
class Write:
    """An unsynced change of one file: bytes at an offset, or (data None) a cut to `offset` bytes."""

    offset: int
    data: bytes | None
    lost: bool = False

    def on(self, content: bytearray, data: bytes | None) -> None:
        if self.data is None:
            del content[self.offset :]
        elif data is not None:
            content.extend(bytes(max(0, self.offset - len(content))))
            content[self.offset : self.offset + len(data)] = data

    def survive(self, content: bytearray, rng: random.Random) -> None:
        """What a cut leaves of it. Mutates `content`."""
        fate = rng.choice(("dropped", "applied", "torn", "zeros"))
        if self.lost or fate == "dropped":
            return
        if self.data is None or fate == "applied":
            self.on(content, self.data)
        elif fate == "zeros":
            self.on(content, bytes(len(self.data)))
        else:
            self.on(content, self.data[: self._torn(len(self.data), rng)])

    def _torn(self, length: int, rng: random.Random) -> int:
        edges = [at - self.offset for at in range(self.offset // SECTOR * SECTOR, self.offset + length, SECTOR)]
        return max(0, rng.choice(edges))


@dataclass(slots=True, eq=False)
class Node:
    """A file (content live and on the medium, changes between them in order) or a directory."""

    is_dir: bool
    mtime: float = 0.0
    live: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Write] = field(default_factory=list)

    def change(self, write: Write) -> None:
        write.on(self.live, write.data)
        self.pending.append(write)

    def sync(self) -> None:
        for write in self.pending:
            if not write.lost:
                write.on(self.durable, write.data)
        self.pending = [write for write in self.pending if write.lost]

    def sync_failed(self) -> None:
        for write in self.pending:
            write.lost = True

    def cut(self, rng: random.Random) -> None:
        for write in self.pending:
            write.survive(self.durable, rng)
        self.pending.clear()
        self.live = bytearray(self.durable)


Names = dict[str, Node | None]  # one atomic change: what each path is from then on


@dataclass(slots=True)
class Medium:
    """Shared by every process of the simulated machine. Paths are absolute and normal; "/" always exists.

    names: as processes see them. durable: as on the medium. changes: between the two, in order.
    locks: path to the process id that holds it. off: the power is gone. generation: power cycles so far.
    calls: how many calls reached the medium.
    """

    capacity: int
    names: dict[str, Node] = field(default_factory=lambda: {"/": Node(is_dir=True)})
    durable: dict[str, Node] = field(default_factory=dict)
    changes: list[Names] = field(default_factory=list)
    locks: dict[str, int] = field(default_factory=dict)
    off: bool = False
    generation: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        self.durable.update(self.names)

    @property
    def room(self) -> int:
        """Bytes left. Removed files count as freed at once."""
        return max(0, self.capacity - sum(len(node.live) for node in set(self.names.values())))

    def change(self, change: Names) -> None:
        """Changes names at once for all to see, and durably some day."""
        _apply(self.names, change)
        self.changes.append(change)

    def sync_names(self, directory: str) -> None:
        """Makes the changes in `directory` durable, with every earlier change of the same paths."""
        paths: set[str] = set()
        rest: list[Names] = []
        chosen: list[Names] = []
        for change in reversed(self.changes):
            here = any(posixpath.dirname(path) == directory for path in change)
            if here or paths & change.keys():
                paths |= change.keys()
                chosen.append(change)
            else:
                rest.append(change)
        for change in reversed(chosen):
            _apply(self.durable, change)
        self.changes = rest[::-1]

    def cut(self, rng: random.Random) -> None:
        """Cuts the power and switches the machine on again: what remains is what the medium held, and luck."""
        for change in self.changes:
            if rng.random() < 0.5:
                _apply(self.durable, change)
        self.changes.clear()
        _drop_orphans(self.durable)
        for node in dict.fromkeys(self.durable.values()):
            node.cut(rng)
        self.names = dict(self.durable)
        self.locks.clear()
        self.generation += 1
        self.off = False


def _apply(names: dict[str, Node], change: Names) -> None:
    for path, node in change.items():
        if node is None:
            names.pop(path, None)
        else:
            names[path] = node


def _drop_orphans(names: dict[str, Node]) -> None:
    """Removes what is below a directory that did not survive. Mutates `names`."""
    for path in sorted(names):
        parent = posixpath.dirname(path)
        if parent not in names or not names[parent].is_dir:
            del names[path]
