"""Pack files: a short header, then records at multiples of 64 bytes. One pack is appended to, the others only read.

A pack that met a write error is never written again: what the system cached of it may be lost although a later sync
succeeds. Its good part stays readable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterator

import numpy as np
import xxhash

from ..seams import Disk, File, append_all
from .record import ALIGN, HEADER_BYTES, MAGIC, BadRecord, Header, OtherVersion, decode_header, decode_record, padded

PACK_MAGIC = b"OCPACK\r\n"
VERSION = 1
START = 64
"""Bytes of a pack's header: where its first record lies."""

_HEADER = struct.Struct("<8sHHI32x")
_NAME = re.compile(r"rows-(\d{8,10})\.pack")
_SCAN = 1 << 20


def pack_name(number: int) -> str:
    return f"rows-{number:08d}.pack"


def encode_pack_header(number: int) -> bytes:
    head = _HEADER.pack(PACK_MAGIC, VERSION, 0, number)
    return head + xxhash.xxh3_128_digest(head)


def is_pack(raw: bytes | memoryview, number: int) -> bool:
    """Whether a file that starts with `raw` is pack `number` of this format."""
    return raw[:START] == encode_pack_header(number)


class Packs:
    """The pack files of one directory. sizes: bytes by pack number, this process's own view.

    Every method but the readers (`load`, `scan`) mutates and must not run twice at a time. OSErrors pass through.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self.sizes: dict[int, int] = {}
        self.highest = 0
        self.active: int | None = None
        self._file: File | None = None
        self._unsynced = self._unnamed = False

    def look(self) -> None:
        """Finds the pack files there are. Names that do not look like ours, or are no packs inside, are left alone.

        highest: the highest number any file name takes, packs or not.
        """
        numbers = [int(match[1]) for name in self._disk.listdir(self._path) if (match := _NAME.fullmatch(name))]
        self.highest = max(numbers, default=0)
        self.sizes = {n: self._disk.stat(self.file(n)).size for n in numbers if is_pack(self.read(n, 0, START), n)}

    def file(self, number: int) -> str:
        return os.path.join(self._path, pack_name(number))

    def read(self, number: int, offset: int, n: int) -> memoryview:
        """At most `n` bytes, fewer at the end of the pack.

        Opens the file each time, so that a pack removed meanwhile is a FileNotFoundError and never another file.
        """
        file = self._disk.open_read(self.file(number))
        try:
            buffer = np.empty(max(0, min(n, file.size() - offset)), "u1").data
            return buffer[: file.pread_into(offset, buffer)]
        finally:
            file.close()

    def load(self, number: int, offset: int, total: int) -> tuple[Header, memoryview]:
        """Header and verified payload. Raises OSError, BadRecord or OtherVersion."""
        return decode_record(self.read(number, offset, total))

    def scan(self, number: int) -> Iterator[tuple[int, Header | OtherVersion]]:
        """Every intact record of a pack with its offset, and every record of another version.

        Behind damage it goes on at the next record: a bad one costs itself, not its neighbours.
        """
        size, at = self._disk.stat(self.file(number)).size, START
        while at < size:
            try:
                header = decode_header(self.read(number, at, HEADER_BYTES))
                self.load(number, at, header.total)
                yield at, header
                at += padded(header.total)
            except OtherVersion as other:
                yield at, other
                at = self._next_magic(number, at + ALIGN, size)
            except BadRecord:
                at = self._next_magic(number, at + ALIGN, size)

    def resume(self, number: int, end: int) -> None:
        """Continues pack `number` behind `end`; what lies there was never named and is cut off."""
        file = self._disk.open_append(self.file(number))
        if file.size() != end:
            file.truncate(end)
        self._file, self.active, self.sizes[number] = file, number, end
        self._unsynced = True

    def begin(self, number: int) -> None:
        """Closes the active pack and starts a new one."""
        self.sync()
        self.close()
        path = self.file(number)
        file = self._disk.open_append(path)
        try:
            append_all(file, encode_pack_header(number))
        except OSError:
            file.close()
            self._discard(path)
            raise
        self._file, self.active, self.sizes[number] = file, number, START
        self._unsynced = self._unnamed = True

    def append(self, raw: bytes | memoryview) -> tuple[int, int]:
        """Writes one record; returns (pack, offset).

        On an error the pack is cut back to its whole records; when even that fails it is closed (`active` is None)
        and what was not yet synced counts as not written.
        """
        if self._file is None or self.active is None:
            raise OSError(errno.EBADF, "no pack is open")
        number, offset = self.active, self.sizes[self.active]
        self._unsynced = True
        try:
            append_all(self._file, raw)
        except OSError:
            self._cut(self._file, offset)
            raise
        self.sizes[number] = offset + len(raw)
        return number, offset

    def sync(self) -> None:
        """Makes all that was appended durable, the pack's name too. On an error the pack is closed for good."""
        if self._file is None or self.active is None or not self._unsynced:
            return
        try:
            self._file.datasync()
            if self._unnamed:
                self._disk.sync_dir(self._path)
            self._check_still_there()
        except OSError:
            self.close()
            raise
        self._unsynced = self._unnamed = False

    def close(self) -> None:
        """Stops appending to the active pack."""
        if self._file is not None:
            self._file.close()
        self._file = self.active = None
        self._unsynced = self._unnamed = False

    def remove(self, number: int) -> None:
        """Deletes a pack. One that is already gone is fine."""
        if number == self.active:
            self.close()
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(self.file(number))
        self.sizes.pop(number, None)

    def _cut(self, file: File, size: int) -> None:
        try:
            file.truncate(size)
        except OSError:
            self.close()

    def _check_still_there(self) -> None:
        """A file somebody removed takes writes and syncs without a word."""
        if self.active is not None and self._disk.stat(self.file(self.active)).size < self.sizes[self.active]:
            raise OSError(errno.EIO, f"{pack_name(self.active)} is shorter than what was written to it")

    def _discard(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self._disk.unlink(path)

    def _next_magic(self, number: int, at: int, size: int) -> int:
        """Offset of the next thing that looks like a record, at a multiple of 64; `size` when there is none."""
        while at < size:
            chunk = self.read(number, at, _SCAN)
            if not chunk:
                break
            found = next((i for i in range(0, len(chunk), ALIGN) if chunk[i : i + 8] == MAGIC), None)
            if found is not None:
                return at + found
            at += len(chunk) + -len(chunk) % ALIGN
        return size
