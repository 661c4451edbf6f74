"""A record read straight into the memory its tensors belong in: no copy between the disk and the rows.

What is read is judged as always, by the checksum of every byte. A record that fails leaves zeros behind, because rows
past a frontier are read, and weighed by nothing, as long as they are finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import xxhash

from ..seams import File
from .content import TOKENS, Stored, stored
from .record import HEADER_BYTES, BadRecord, Header, decode_header
from .safetensors import Array, BadImage, Head, Tensors, decode_head, head_bytes, info_of

FIRST = 16 << 10
"""Bytes read to learn what a record holds: its header and, for most models, all of its payload's."""
PORTION = 1 << 20
"""Bytes that are read before they are summed: few enough that the processor's caches still have them then."""


def load_placed(file: File, offset: int, total: int, key: bytes, room: Tensors) -> Stored | None:
    """Reads a record, `key`, of `total` bytes at `offset` into `room`: writable arrays, named as the record's tensors.

    None, and nothing written, when the record's tensors are not the room's in name, shape and dtype, or the room is not
    contiguous along its last two axes. Raises OSError, OtherVersion, BadRecord or BadImage; the room is zero then, or
    as it was when nothing had been read into it.
    """
    header, head = _opening(file, offset, total)
    if header.key != key:
        raise BadRecord("another record's bytes")
    content = decode_head(memoryview(head)[HEADER_BYTES:], header.length)
    tokens = np.empty(header.rows, "<u4")
    arrays = _in_order(content, {TOKENS: tokens, **room})
    if arrays is None:
        return None
    size = HEADER_BYTES + content.size
    try:
        _read(file, offset + size, header, head[HEADER_BYTES:size], arrays)
    except (OSError, ValueError):
        for array in room.values():
            array[...] = 0
        raise
    return stored(header, tokens, room, content.metadata)


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


def _in_order(content: Head, room: Mapping[str, Array]) -> list[Array] | None:
    """The room's arrays in the order of the record's, or None when they are not the same."""
    if content.infos.keys() != room.keys():
        return None
    for name, info in content.infos.items():
        try:
            place = info_of(room[name])
        except BadImage:
            return None
        if (place.dtype, place.shape) != (info.dtype, info.shape) or not _flat(room[name]):
            return None
    return [room[name] for name, _ in sorted(content.infos.items(), key=lambda item: item[1].data_offsets)]


def _flat(array: Array) -> bool:
    part = array[0] if array.ndim > 2 and len(array) else array
    return part.flags.c_contiguous


def _read(file: File, at: int, header: Header, head: bytes, arrays: list[Array]) -> None:
    """Fills arrays with what lies at `at`, behind the payload's own head. Raises OSError or BadRecord."""
    checksum = xxhash.xxh3_128(head)
    for portion, size in _portions(piece for array in arrays for piece in _pieces(array)):
        if file.pread_into_all(at, portion) != size:
            raise BadRecord("the record is cut short")
        for piece in portion:
            checksum.update(piece)
        at += size
    if checksum.digest() != header.checksum:
        raise BadRecord("payload checksum")


def _pieces(array: Array) -> list[memoryview]:
    parts = array if array.ndim > 2 else (array,)
    return [part.data.cast("B") for part in parts if part.size]


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
