"""One record of a pack: a block of rows, or an anchor with the partial block's rows (its trailer).

A record is judged by its own bytes alone: magic and version first, then the header's checksum, then the payload's.
The layout byte by byte is in docs/store.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import xxhash

from ..rows.layout import BLOCK
from .keys import KEY_BYTES

MAGIC = b"OCROWS\r\n"
VERSION = 1
ALIGN = 64
"""Records start at multiples of this many bytes in a pack, so a scan can find the next one behind damage."""

_HEAD = struct.Struct("<8sHBBIQQ32s32s32sQQ16s16s")
_SUM_BYTES = 16
HEADER_BYTES = _HEAD.size + _SUM_BYTES
MAX_PAYLOAD = 1 << 40


class Kind(IntEnum):
    """What a record holds. ANCHOR: state at `start + rows`, with the rows `[start, start + rows)` as its trailer."""

    BLOCK = 1
    ANCHOR = 2


class BadRecord(ValueError):
    """The bytes are not an intact record."""


class OtherVersion(ValueError):
    """The bytes claim a record format that this build does not read: older, newer, or none (0)."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says about itself.

    start: absolute position of its first row, a multiple of 256. rows: 256 for a block, 0 to 255 for an anchor.
    length: payload bytes. created: unix seconds. checksum: xxh3-128 of the payload.
    """

    kind: Kind
    key: bytes
    parent: bytes
    fingerprint: bytes
    start: int
    rows: int
    length: int
    created: int
    checksum: bytes

    @property
    def at(self) -> int:
        """The position just past this record's rows."""
        return self.start + self.rows

    @property
    def total(self) -> int:
        """Bytes in the pack, padding not counted."""
        return HEADER_BYTES + self.length


def encode_header(header: Header) -> bytes:
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        header.kind,
        0,
        header.rows,
        header.length,
        header.start,
        header.key,
        header.parent,
        header.fingerprint,
        header.created,
        0,
        header.checksum,
        bytes(16),
    )
    return head + xxhash.xxh3_128_digest(head)


def decode_header(raw: bytes | memoryview) -> Header:
    """Reads a header. Raises OtherVersion, or BadRecord for every other header that was not written whole."""
    if len(raw) < HEADER_BYTES or raw[:8] != MAGIC:
        raise BadRecord("no record here")
    head = raw[: _HEAD.size]
    (_, version, kind, _, rows, length, start, key, parent, print_, created, _, checksum, _) = _HEAD.unpack(head)
    if version != VERSION:
        raise OtherVersion(f"record format {version}, this build reads {VERSION}")
    if xxhash.xxh3_128_digest(head) != raw[_HEAD.size : HEADER_BYTES]:
        raise BadRecord("header checksum")
    _check_sizes(kind, rows, length, start)
    return Header(Kind(kind), key, parent, print_, start, rows, length, created, checksum)


def encode_record(
    kind: Kind, key: bytes, parent: bytes, fingerprint: bytes, start: int, rows: int, payload: bytes, created: int
) -> tuple[Header, bytes]:
    """Header and payload, padded to the alignment. Raises ValueError for an empty payload or impossible rows."""
    raw = record_room(len(payload))
    raw[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    return seal_record(kind, key, parent, fingerprint, start, rows, raw, len(payload), created), bytes(raw)


def record_room(length: int) -> memoryview:
    """Memory for a record of `length` bytes of payload, which goes behind `HEADER_BYTES`. Its padding is zero."""
    room = np.empty(padded(HEADER_BYTES + length), "u1")
    room[HEADER_BYTES + length :] = 0
    return room.data


def seal_record(
    kind: Kind,
    key: bytes,
    parent: bytes,
    fingerprint: bytes,
    start: int,
    rows: int,
    raw: memoryview,
    length: int,
    created: int,
) -> Header:
    """Writes the header of a record whose payload is in `raw` already. Raises ValueError as `encode_record`."""
    _check_sizes(kind, rows, length, start)
    if {len(key), len(parent), len(fingerprint)} != {KEY_BYTES}:
        raise BadRecord("keys and fingerprints have 32 bytes")
    checksum = xxhash.xxh3_128_digest(raw[HEADER_BYTES : HEADER_BYTES + length])
    header = Header(kind, key, parent, fingerprint, start, rows, length, created, checksum)
    raw[:HEADER_BYTES] = encode_header(header)
    return header


def decode_record(raw: bytes | memoryview) -> tuple[Header, memoryview]:
    """Header and verified payload of the record that starts `raw`. Raises OtherVersion or BadRecord."""
    header = decode_header(raw)
    payload = memoryview(raw)[HEADER_BYTES : header.total]
    if len(payload) != header.length or xxhash.xxh3_128_digest(payload) != header.checksum:
        raise BadRecord("payload checksum")
    return header, payload


def padded(total: int) -> int:
    """Bytes a record of `total` bytes takes in a pack."""
    return total + -total % ALIGN


_ROWS: dict[int, range] = {Kind.BLOCK: range(BLOCK, BLOCK + 1), Kind.ANCHOR: range(BLOCK)}


def _check_sizes(kind: int, rows: int, length: int, start: int) -> None:
    if rows not in _ROWS.get(kind, ()) or start % BLOCK or not 0 < length <= MAX_PAYLOAD:
        raise BadRecord("impossible kind, rows, start or length")
