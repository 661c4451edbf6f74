"""Real files that are slow or fail on request."""

from __future__ import annotations

import errno
import os
import threading
import time

from onecopy.runtime.seams.disk import Readable, StrPath
from onecopy.runtime.seams.real_disk import RealDisk, RealFile


class FaultyFile(RealFile):
    def __init__(self, fd: int, disk: FaultyDisk) -> None:
        super().__init__(fd)
        self._disk = disk

    def append(self, data: Readable) -> int:
        self._disk.before_write(memoryview(data).nbytes)
        return super().append(data)


class FaultyDisk(RealDisk):
    """speed: bytes a second that writes take, None for no limit. fail: errno of every write. written: bytes so far.

    open: while it is not set, writes wait.
    """

    def __init__(self, speed: float | None = None) -> None:
        super().__init__()
        self.speed = speed
        self.fail: int | None = None
        self.written = 0
        self.refused = 0
        self.open = threading.Event()
        self.open.set()

    def before_write(self, n: int) -> None:
        self.open.wait(60)
        if self.fail is not None:
            self.refused += 1
            raise OSError(self.fail, os.strerror(self.fail))
        self.written += n
        if self.speed is not None:
            time.sleep(n / self.speed)

    def open_append(self, path: StrPath) -> RealFile:
        if self.fail in (errno.EACCES, errno.EROFS) and not os.path.exists(path):
            raise OSError(self.fail, os.strerror(self.fail))
        return FaultyFile(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), self)
