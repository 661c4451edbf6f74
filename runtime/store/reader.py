"""Records read one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from ..seams import Disk, File
from .content import Stored, decode_content
from .index import Entry
from .placed import Place, load_placed
from .record import BadRecord, decode_record


class Reader:
    """Opens each pack once: a disk is fastest when it sees one reader go forward through one file.

    where: a pack's path by its number. A pack that is deleted meanwhile is read on, or a FileNotFoundError, and never
    another file. For one thread at a time, as a context manager.
    """

    def __init__(self, disk: Disk, where: Callable[[int], str]) -> None:
        self._disk = disk
        self._where = where
        self._files: dict[int, File] = {}
        self._open = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def load(self, entry: Entry, place: Place | None = None) -> Stored:
        """Reads and verifies one record. Raises OSError, OtherVersion, BadRecord or BadImage.

        place: read right there if the record's tensors are like its arrays; they are the answer's `tensors` then.
        """
        file = self._file(entry.pack)
        if place is not None:
            stored = load_placed(file, entry.offset, entry.length, entry.key, place)
            if stored is not None:
                return stored
        raw = np.empty(entry.length, "u1").data
        header, payload = decode_record(raw[: file.pread_into(entry.offset, raw)])
        if header.key != entry.key:
            raise BadRecord("another record's bytes")
        return decode_content(header, payload)

    def _file(self, number: int) -> File:
        if number not in self._files:
            file = self._disk.open_read(self._where(number))
            self._open.callback(file.close)
            self._files[number] = file
        return self._files[number]


def read_run(
    reader: Reader,
    entries: Sequence[Entry],
    places: Sequence[Place | None],
    wanted: Callable[[], bool] = lambda: True,
) -> tuple[list[Stored], OSError | ValueError | None]:
    """The leading records that can be read, each into its place if it has one, and why the next one could not.

    wanted: asked before each record whether anybody still waits, from the thread that reads; no further one is if not.
    """
    found = list[Stored]()
    with reader:
        try:
            for entry, place in zip(entries, places, strict=False):
                if not wanted():
                    break
                found.append(reader.load(entry, place))
        except (OSError, ValueError) as error:
            return found, error
    return found, None
