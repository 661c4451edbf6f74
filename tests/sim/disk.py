"""The `Disk` protocol on a simulated medium, with faults, processes and power cuts under a seed."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

import trio
from onecopy.runtime.seams import FileStat, Readable, StrPath

from tests.sim.medium import Medium, Node, Write

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class PowerCut(Exception):
    """The machine is off. Every call raises this until `cut` switches it on again."""


@dataclass(slots=True)
class Faults:
    """What goes wrong, and how often: probabilities per call, drawn from `rng`. May be changed at any time.

    eio: reads, appends and syncs fail. enospc: appends fail. short: appends take fewer bytes than given.
    readonly: every change fails with EROFS. cut_after: calls until the machine goes off; None for never.
    """

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    eio: float = 0.0
    enospc: float = 0.0
    short: float = 0.0
    readonly: bool = False
    cut_after: int | None = None

    def hits(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance


class SimDisk:
    """One process's view of a medium. `beside` makes the view of another process on the same machine.

    capacity: bytes the medium holds. rate: bytes a second at which `in_thread` calls move data, in trio time; None
    takes no time. clock: Unix seconds, for mtimes. Files can be renamed, directories cannot.
    """

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        capacity: int = 1 << 40,
        rate: float | None = None,
        pid: int = 1,
        clock: Callable[[], float] = lambda: 0.0,
        medium: Medium | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.medium = medium or Medium(capacity)
        self.rate = rate
        self.pid = pid
        self.clock = clock
        self.life = 0
        self.moved = 0

    # The Disk protocol

    def open_read(self, path: StrPath) -> SimFile:
        self.step()
        return SimFile(self, self._file(_key(path)))

    def open_append(self, path: StrPath) -> SimFile:
        self.step(writes=True)
        key = _key(path)
        if key not in self.medium.names:
            self._directory(posixpath.dirname(key))
            self.medium.change({key: Node(is_dir=False, mtime=self.clock())})
        return SimFile(self, self._file(key))

    def rename(self, source: StrPath, target: StrPath) -> None:
        self.step(writes=True)
        old, new = _key(source), _key(target)
        node = self._file(old)
        self._directory(posixpath.dirname(new))
        if new in self.medium.names:
            self._file(new)
        if old != new:
            self.medium.change({new: node, old: None})

    def unlink(self, path: StrPath) -> None:
        self.step(writes=True)
        self._file(_key(path))
        self.medium.change({_key(path): None})

    def listdir(self, path: StrPath) -> list[str]:
        self.step()
        key = _key(path)
        self._directory(key)
        inside = (name for name in self.medium.names if posixpath.dirname(name) == key and name != key)
        return sorted(map(posixpath.basename, inside))

    def mkdir(self, path: StrPath) -> None:
        self.step()
        self._mkdir(_key(path))

    def exists(self, path: StrPath) -> bool:
        self.step()
        return _key(path) in self.medium.names

    def stat(self, path: StrPath) -> FileStat:
        self.step()
        node = self._node(_key(path))
        return FileStat(len(node.live), node.mtime, 0o700 if node.is_dir else 0o600, node.is_dir)

    def sync_dir(self, path: StrPath) -> None:
        self.step()
        key = _key(path)
        self._directory(key)
        self.fail_at_times(key)
        self.medium.sync_names(key)

    def free_bytes(self, path: StrPath) -> int:
        self.step()
        self._node(_key(path))
        return self.medium.room

    def lock(self, path: StrPath) -> bool:
        key = _key(path)
        if key in self.medium.locks:
            return False
        node = self.open_append(path).node
        node.change(Write(0, None))
        node.change(Write(0, f"{self.pid}\n".encode()))
        self.medium.locks[key] = self.pid
        return True

    def lock_owner(self, path: StrPath) -> int | None:
        self.step()
        node = self.medium.names.get(_key(path))
        text = bytes(node.live).strip() if node else b""
        return int(text) if text.isdigit() else None

    def unlock(self, path: StrPath) -> None:
        key = _key(path)
        if self.medium.locks.get(key) == self.pid:
            del self.medium.locks[key]
            self._file(key).change(Write(0, None))

    async def in_background(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        return await self.in_thread(fn, *args)

    async def in_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        await trio.lowlevel.checkpoint()
        before = self.moved
        try:
            return fn(*args)
        finally:
            if self.rate is not None:
                with trio.CancelScope(shield=True):
                    await trio.sleep((self.moved - before) / self.rate)

    # For tests

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Calls of a checker: no faults, and they bring no cut nearer."""
        faults, calls = self.faults, self.medium.calls
        self.faults = Faults()
        try:
            yield
        finally:
            self.faults, self.medium.calls = faults, calls

    def beside(self, pid: int) -> SimDisk:
        """The same disk, seen by another process."""
        return SimDisk(self.faults, rate=self.rate, pid=pid, clock=self.clock, medium=self.medium)

    def cut(self, rng: random.Random) -> None:
        """Power off and on. Unsynced writes and names meet their fates; files and locks of all processes are gone."""
        self.faults.cut_after = None
        self.medium.cut(rng)

    def restart(self) -> None:
        """This process ends and begins anew: its open files and locks go, the page cache stays."""
        self.life += 1
        for key in [key for key, pid in self.medium.locks.items() if pid == self.pid]:
            del self.medium.locks[key]

    def corrupt(self, path: StrPath, offset: int, data: bytes) -> None:
        """Overwrites bytes behind everyone's back, in the cache and on the medium."""
        node = self._file(_key(path))
        for content in (node.live, node.durable):
            content[offset : offset + len(data)] = data[: max(0, len(content) - offset)]

    # For SimFile

    @property
    def era(self) -> tuple[int, int]:
        """Changes whenever open files become invalid."""
        return self.medium.generation, self.life

    def step(self, *, writes: bool = False) -> None:
        """Counts one call; this is where the power goes."""
        medium, cut_after = self.medium, self.faults.cut_after
        medium.off = medium.off or (cut_after is not None and medium.calls >= cut_after)
        self.powered()
        medium.calls += 1
        if writes and self.faults.readonly:
            raise oserror(errno.EROFS, "write")

    def powered(self) -> None:
        if self.medium.off:
            raise PowerCut

    def fail_at_times(self, what: str) -> None:
        if self.faults.hits(self.faults.eio):
            raise oserror(errno.EIO, what)

    def _node(self, key: str) -> Node:
        if key not in self.medium.names:
            raise oserror(errno.ENOENT, key)
        return self.medium.names[key]

    def _file(self, key: str) -> Node:
        node = self._node(key)
        if node.is_dir:
            raise oserror(errno.EISDIR, key)
        return node

    def _directory(self, key: str) -> None:
        if not self._node(key).is_dir:
            raise oserror(errno.ENOTDIR, key)

    def _mkdir(self, key: str) -> None:
        if key in self.medium.names:
            return self._directory(key)
        if self.faults.readonly:
            raise oserror(errno.EROFS, key)
        self._mkdir(posixpath.dirname(key))
        return self.medium.change({key: Node(is_dir=True, mtime=self.clock())})


class SimFile:
    """An open file of a SimDisk. After a cut or a restart it is closed."""

    def __init__(self, disk: SimDisk, node: Node) -> None:
        self.node = node
        self._disk = disk
        self._era: tuple[int, int] | None = disk.era

    def pread(self, offset: int, n: int) -> bytes:
        self._step()
        self._disk.fail_at_times("read")
        data = bytes(self.node.live[offset : offset + max(0, n)])
        self._disk.moved += len(data)
        return data

    def pread_into(self, offset: int, buffer: bytearray | memoryview) -> int:
        view = memoryview(buffer).cast("B")
        data = self.pread(offset, len(view))
        view[: len(data)] = data
        return len(data)

    def pread_into_all(self, offset: int, buffers: Sequence[memoryview]) -> int:
        data = self.pread(offset, sum(map(len, buffers)))
        at = 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return at

    def append(self, data: Readable) -> int:
        self._step(writes=True)
        self._disk.fail_at_times("append")
        taken = self._room_for(bytes(data))
        self.node.change(Write(len(self.node.live), taken))
        self.node.mtime = self._disk.clock()
        self._disk.moved += len(taken)
        return len(taken)

    def sync(self) -> None:
        self._step()
        try:
            self._disk.fail_at_times("sync")
        except OSError:
            self.node.sync_failed()
            raise
        self.node.sync()

    def datasync(self) -> None:
        self.sync()

    def truncate(self, size: int) -> None:
        self._step(writes=True)
        end = len(self.node.live)
        self.node.change(Write(size, None) if size <= end else Write(end, bytes(size - end)))

    def size(self) -> int:
        self._usable()
        return len(self.node.live)

    def close(self) -> None:
        self._era = None

    def _room_for(self, data: bytes) -> bytes:
        """The part of `data` that fits and that this call takes."""
        faults, room = self._disk.faults, self._disk.medium.room
        if data and (not room or faults.hits(faults.enospc)):
            raise oserror(errno.ENOSPC, "append")
        taken = data[:room]
        return taken[: faults.rng.randrange(1, len(taken))] if len(taken) > 1 and faults.hits(faults.short) else taken

    def _step(self, *, writes: bool = False) -> None:
        self._disk.step(writes=writes)
        self._usable()

    def _usable(self) -> None:
        self._disk.powered()
        if self._era != self._disk.era:
            raise oserror(errno.EBADF, "closed file")


def oserror(code: int, what: str) -> OSError:
    """The OSError subclass Python uses for `code`."""
    return OSError(code, os.strerror(code), what)


def _key(path: StrPath) -> str:
    return posixpath.normpath("/" + os.fspath(path).lstrip("/"))
