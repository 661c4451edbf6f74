"""The manifest file: ops appended and synced, or the whole of it replaced by a snapshot.

After any failure the file's end is unknown, so the next write replaces it: a snapshot never builds on a doubtful tail.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Sequence

from ..seams import Disk, File, append_all, replace
from . import manifest

NAME = "manifest"
_SLACK = 2_000
"""Ops the log may hold beyond twice a snapshot's before it is replaced."""


class Journal:
    """Writes the manifest of one directory. snapshot: yields the ops that stand for everything said so far.

    generation: how often the file was replaced.
    """

    def __init__(self, disk: Disk, path: str, snapshot: Callable[[], Iterable[manifest.Op]]) -> None:
        self._disk = disk
        self._path = os.path.join(path, NAME)
        self._snapshot = snapshot
        self._file: File | None = None
        self.generation = self._sequence = self._size = self._ops = 0

    @property
    def size(self) -> int:
        """Bytes of the manifest file."""
        return self._size

    @property
    def sound(self) -> bool:
        """The next ops can be appended; otherwise they replace the file."""
        return self._file is not None

    def after(self, generation: int) -> None:
        """The next write is a whole new file, of a later generation."""
        self.close()
        self.generation = generation

    def write(self, ops: Sequence[manifest.Op], live: int) -> None:
        """Makes `ops` durable before it returns. live: ops of a snapshot, to decide when the log has grown too long.

        The snapshot must not contain `ops` yet. An OSError means: nothing is known to be durable.
        """
        if self._file is None or self._ops + len(ops) > 2 * live + _SLACK:
            self._replace(ops)
        else:
            self._append(self._file, ops)

    def surplus(self, live: int) -> int:
        """Ops that a snapshot of `live` ops would save."""
        return self._ops - live

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _append(self, file: File, ops: Sequence[manifest.Op]) -> None:
        raw = manifest.encode_ops(ops, self._sequence)
        try:
            append_all(file, raw)
            file.datasync()
            self._check_size(self._size + len(raw))
        except OSError:
            self.close()
            raise
        self._advance(len(raw), len(ops))

    def _replace(self, ops: Sequence[manifest.Op]) -> None:
        self.close()
        every = [*self._snapshot(), *ops]
        raw = manifest.encode_header(self.generation + 1, 0) + manifest.encode_ops(every, 0)
        try:
            replace(self._disk, self._path, raw)
            self._file = self._disk.open_append(self._path)
        except OSError:
            self._discard_part()
            raise
        self.generation += 1
        self._sequence = self._size = self._ops = 0
        self._advance(len(raw), len(every))

    def _advance(self, size: int, ops: int) -> None:
        self._size += size
        self._sequence += ops
        self._ops += ops

    def _check_size(self, size: int) -> None:
        if self._disk.stat(self._path).size != size:
            raise OSError(errno.EIO, "the manifest is not what was written to it")

    def _discard_part(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.unlink(f"{self._path}.part")
