"""The machine's file system behind the `Disk` seam."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat as modes
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar, TypeVarTuple

import trio

from .background import Background
from .disk import FileStat, Readable, StrPath

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_UNKNOWN = {errno.ENOTSUP, errno.ENOTTY, errno.EINVAL}
_data_sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
_MOST = 1 << 30  # Linux moves at most 2 GiB - 4 KiB in one call; macOS refuses 2 GiB and more.
_PIECES = 1024  # IOV_MAX of Linux and macOS.


def _sync(fd: int, ordinary: Callable[[int], None] = os.fsync) -> None:
    """Durable on the medium. File systems that do not know F_FULLFSYNC (some network ones) get an ordinary fsync."""
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(fd, _FULL_SYNC)
            return
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    ordinary(fd)


def _at_once(views: Sequence[memoryview]) -> Sequence[memoryview]:
    """The leading views that one call may fill: so many, and so many bytes, as every system takes."""
    if len(views) <= _PIECES and sum(map(len, views)) <= _MOST:
        return views
    ends = list(accumulate(len(view) for view in views[:_PIECES]))
    whole = bisect_right(ends, _MOST)
    return list(views[:whole]) or [views[0][:_MOST]]


def _behind(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of views when their first `done` bytes are filled."""
    for i, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[i + 1 :]]
        done -= len(view)
    return []


class RealFile:
    """An open file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def pread(self, offset: int, n: int) -> bytes:
        buffer = bytearray(max(0, min(n, self.size() - offset)))
        got = self.pread_into(offset, buffer)
        return bytes(memoryview(buffer)[:got])

    def pread_into(self, offset: int, buffer: bytearray | memoryview) -> int:
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view):
            got = os.preadv(self._open(), [view[done : done + _MOST]], offset + done)
            if not got:
                break
            done += got
        return done

    def pread_into_all(self, offset: int, buffers: Sequence[memoryview]) -> int:
        done, left = 0, buffers
        while left:
            got = os.preadv(self._open(), _at_once(left), offset + done)
            if not got:
                break
            done += got
            left = _behind(left, got)
        return done

    def append(self, data: Readable) -> int:
        return os.write(self._open(), memoryview(data).cast("B")[:_MOST])

    def sync(self) -> None:
        _sync(self._open())

    def datasync(self) -> None:
        _sync(self._open(), _data_sync)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._open(), size)

    def size(self) -> int:
        return os.fstat(self._open()).st_size

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        if self._fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._fd


class RealDisk:
    """threads: worker threads at most for `in_thread`."""

    def __init__(self, threads: int = 4) -> None:
        self._locks: dict[str, int] = {}
        self._threads = threads
        self._limiter: trio.CapacityLimiter | None = None
        self._background = Background("onecopy-disk")

    def open_read(self, path: StrPath) -> RealFile:
        return RealFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def open_append(self, path: StrPath) -> RealFile:
        return RealFile(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def rename(self, source: StrPath, target: StrPath) -> None:
        os.replace(source, target)

    def unlink(self, path: StrPath) -> None:
        os.unlink(path)

    def listdir(self, path: StrPath) -> list[str]:
        return sorted(os.listdir(path))

    def mkdir(self, path: StrPath) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        if parent != os.path.abspath(path):
            self.mkdir(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if not os.path.isdir(path):
            raise NotADirectoryError(f"not a directory: {os.fspath(path)}")

    def exists(self, path: StrPath) -> bool:
        return os.path.exists(path)

    def stat(self, path: StrPath) -> FileStat:
        found = os.stat(path)
        return FileStat(
            found.st_size, found.st_mtime, modes.S_IMODE(found.st_mode), is_dir=modes.S_ISDIR(found.st_mode)
        )

    def sync_dir(self, path: StrPath) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: StrPath) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def lock(self, path: StrPath) -> bool:
        key = os.path.abspath(path)
        if key in self._locks:
            return False
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._locks[key] = fd
        return True

    def lock_owner(self, path: StrPath) -> int | None:
        try:
            file = self.open_read(path)
        except FileNotFoundError:
            return None
        try:
            text = file.pread(0, 32).strip()
        finally:
            file.close()
        return int(text) if text.isdigit() else None

    def unlock(self, path: StrPath) -> None:
        fd = self._locks.pop(os.path.abspath(path), None)
        if fd is not None:
            os.ftruncate(fd, 0)
            os.close(fd)

    async def in_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        if self._limiter is None:
            self._limiter = trio.CapacityLimiter(self._threads)
        return await trio.to_thread.run_sync(fn, *args, limiter=self._limiter)

    async def in_background(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        return await self._background.run(fn, *args)
