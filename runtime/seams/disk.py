"""The disk, as a seam: what a store needs of a file system, and nothing else.

Calls are synchronous. They run inline where that is short, and through `in_thread` where it is not. Durability is
spelled out: bytes are durable after `sync`, a name (created, renamed, removed) after `sync_dir` of its directory.
Failures are OSErrors, as the operating system gives them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
StrPath = str | os.PathLike[str]
Readable = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FileStat:
    """size: bytes. mtime: Unix seconds of the last write. mode: permission bits, such as 0o600."""

    size: int
    mtime: float
    mode: int
    is_dir: bool


class File(Protocol):
    """An open file. Reads are positioned, writes go to the end."""

    def pread(self, offset: int, n: int) -> bytes:
        """At most `n` bytes at `offset`; fewer only at the end of the file."""
        ...

    def pread_into(self, offset: int, buffer: bytearray | memoryview) -> int:
        """Fills `buffer` (writable, contiguous) from `offset`; returns the bytes read, fewer only at the end."""
        ...

    def pread_into_all(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """As `pread_into`, filling one buffer of bytes after another."""
        ...

    def append(self, data: Readable) -> int:
        """Writes at the end and returns how many bytes it took, which may be fewer. See `append_all`."""
        ...

    def sync(self) -> None:
        """Makes contents and size durable (F_FULLFSYNC on macOS). After an error, unsynced bytes may be lost for good:
        a later success says nothing about them."""
        ...

    def datasync(self) -> None:
        """As `sync`, without metadata that is not needed to read the bytes back."""
        ...

    def truncate(self, size: int) -> None:
        """Cuts the file to `size` bytes."""
        ...

    def size(self) -> int: ...
    def close(self) -> None: ...


class Disk(Protocol):
    """A file system. Files are made 0600 and directories 0700."""

    def open_read(self, path: StrPath) -> File:
        """Raises FileNotFoundError when it is missing."""
        ...

    def open_append(self, path: StrPath) -> File:
        """Opens for append and read; makes the file when it is missing."""
        ...

    def rename(self, source: StrPath, target: StrPath) -> None:
        """Atomic; replaces `target`."""
        ...

    def unlink(self, path: StrPath) -> None: ...

    def listdir(self, path: StrPath) -> list[str]:
        """Names, sorted."""
        ...

    def mkdir(self, path: StrPath) -> None:
        """Makes a directory and its missing parents; one that exists is fine and keeps its mode."""
        ...

    def exists(self, path: StrPath) -> bool: ...
    def stat(self, path: StrPath) -> FileStat: ...

    def sync_dir(self, path: StrPath) -> None:
        """Makes the names in directory `path` durable."""
        ...

    def free_bytes(self, path: StrPath) -> int:
        """Bytes an ordinary user can still write on the file system of `path`."""
        ...

    def lock(self, path: StrPath) -> bool:
        """Takes the exclusive lock file `path` and writes the process id into it. False: another holder has it.

        The operating system lets go of it when the holder ends, however it ends.
        """
        ...

    def lock_owner(self, path: StrPath) -> int | None:
        """Process id written in the lock file; None when there is none."""
        ...

    def unlock(self, path: StrPath) -> None:
        """Lets go of a lock taken by this object. Not held: nothing."""
        ...

    async def in_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Runs `fn(*args)`, which makes disk calls, without holding up the event loop. It always runs to its end."""
        ...

    async def in_background(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """As `in_thread`, one call after another and behind all that the machine has to do: for what nobody awaits."""
        ...


def append_all(file: File, data: Readable) -> None:
    """Appends all of `data`, over as many writes as it takes."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.append(view) :]


def read_all(disk: Disk, path: StrPath) -> bytes:
    """The whole file."""
    file = disk.open_read(path)
    try:
        return file.pread(0, file.size())
    finally:
        file.close()


def replace(disk: Disk, path: StrPath, data: Readable) -> None:
    """Writes `path` whole and durable: after a power cut it holds the old bytes or the new ones."""
    target = os.fspath(path)
    part = f"{target}.part"
    if disk.exists(part):
        disk.unlink(part)
    file = disk.open_append(part)
    try:
        append_all(file, data)
        file.sync()
    finally:
        file.close()
    disk.rename(part, target)
    disk.sync_dir(os.path.dirname(target) or ".")
