"""A record read straight into the memory its tensors belong in: no copy between the disk and the rows.

What is read is judged as always, by the checksum of every byte. A record that fails leaves zeros behind, because rows
past a frontier are read, and weighed by nothing, as long as they are finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import xxhash

from ..seams import File
from .content import TOKENS, Stored, stored
from .record import HEADER_BYTES, BadRecord, Header, decode_header
from .safetensors import Array, BadImage, Info, Tensors, decode_head, dtype_name, head_bytes

FIRST = 16 << 10
"""Bytes read to learn what a record holds: its header and, for most models, all of its payload's."""
PORTION = 1 << 20
"""Bytes that are read before they are summed: few enough that the processor's caches still have them then."""


@dataclass(frozen=True, slots=True)
class Place:
    """Writable memory of one record. arrays: named as its tensors. pieces: the bytes of each, in order; none where they
    are not contiguous along the last two axes.
    """

    arrays: Tensors
    pieces: Mapping[str, Sequence[memoryview]]

    @classmethod
    def of(cls, arrays: Tensors) -> Self:
        return cls(arrays, {name: pieces_of(array) for name, array in arrays.items()})


@dataclass(frozen=True, slots=True)
class Laid:
    """How a payload's tensors follow each other. size: bytes before the first."""

    infos: tuple[tuple[str, Info], ...]
    metadata: Mapping[str, str]
    size: int


def pieces_of(array: Array) -> list[memoryview]:
    """An array's bytes: all of them, or those of each part along its first axis if it has more than two."""
    parts = array if array.ndim > 2 else (array,)
    return [part.data.cast("B") for part in parts if part.size and part.flags.c_contiguous]


def load_placed(file: File, offset: int, total: int, key: bytes, place: Place) -> Stored | None:
    """Reads a record, `key`, of `total` bytes at `offset` into its place.

    None, and nothing written, when the record's tensors are not the place's in name, shape and dtype, or have no pieces
    there. Raises OSError, OtherVersion, BadRecord or BadImage; the place is zero then, or as it was when nothing had
    been read into it.
    """
    header, head = _opening(file, offset, total)
    if header.key != key:
        raise BadRecord("another record's bytes")
    size = HEADER_BYTES + head_bytes(head[HEADER_BYTES : HEADER_BYTES + 8], header.length)
    content = _laid(head[HEADER_BYTES:size], header.length)
    tokens = np.empty(header.rows, "<u4")
    pieces = _in_order(content, place, tokens)
    if pieces is None:
        return None
    try:
        _read(file, offset + size, header, head[HEADER_BYTES:size], pieces)
    except (OSError, ValueError):
        for array in place.arrays.values():
            array[...] = 0
        raise
    return stored(header, tokens, place.arrays, content.metadata)


@lru_cache(maxsize=8)
def _laid(head: bytes, total: int) -> Laid:
    """Read once: all blocks of a conversation begin alike."""
    found = decode_head(memoryview(head), total)
    infos = sorted(found.infos.items(), key=lambda item: item[1].data_offsets)
    return Laid(tuple(infos), found.metadata, found.size)


def _opening(file: File, offset: int, total: int) -> tuple[Header, bytes]:
    """The record's header, and its bytes up to the tensors' at least."""
    head = file.pread(offset, min(FIRST, total))
    header = decode_header(head)
    if header.total != total:
        raise BadRecord("another length than the manifest's")
    needed = HEADER_BYTES + head_bytes(head[HEADER_BYTES : HEADER_BYTES + 8], header.length)
    if needed > len(head):
        head += file.pread(offset + len(head), needed - len(head))
    return header, head


def _in_order(content: Laid, place: Place, tokens: Array) -> list[memoryview] | None:
    """What the record's tensors are read into, in their order; None when the place's arrays are not the same."""
    if len(content.infos) != len(place.arrays) + 1:
        return None
    found = list[memoryview]()
    for name, info in content.infos:
        array = tokens if name == TOKENS else place.arrays.get(name)
        if array is None or not _alike(array, info):
            return None
        pieces = pieces_of(array) if name == TOKENS else place.pieces[name]
        if array.size and not pieces:
            return None
        found += pieces
    return found


def _alike(array: Array, info: Info) -> bool:
    try:
        return [*array.shape] == info.shape and dtype_name(array) == info.dtype
    except BadImage:
        return False


def _read(file: File, at: int, header: Header, head: bytes, pieces: list[memoryview]) -> None:
    """Fills pieces with what lies at `at`, behind the payload's own head. Raises OSError or BadRecord."""
    checksum = xxhash.xxh3_128(head)
    for portion, size in _portions(pieces):
        if file.pread_into_all(at, portion) != size:
            raise BadRecord("the record is cut short")
        for piece in portion:
            checksum.update(piece)
        at += size
    if checksum.digest() != header.checksum:
        raise BadRecord("payload checksum")


def _portions(pieces: Iterable[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """Pieces as they are read, a portion or one larger piece at a time, and the bytes of each."""
    portion, size = list[memoryview](), 0
    for piece in pieces:
        if portion and size + len(piece) > PORTION:
            yield portion, size
            portion, size = [], 0
        portion.append(piece)
        size += len(piece)
    if portion:
        yield portion, size
