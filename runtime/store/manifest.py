"""The manifest's bytes: a header, then an append-only log of frames with sequence numbers and checksums.

A record the manifest does not name does not exist. Reading stops at the first frame that is not whole, in sequence
and known: what was acknowledged lies before it. The layout byte by byte is in docs/store.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from .keys import KEY_BYTES
from .record import BadRecord, Kind, OtherVersion

MAGIC = b"OCMANI\r\n"
VERSION = 1

_HEADER = struct.Struct("<8sHHIQQ")
_FRAME = struct.Struct("<2sBBIQ")
_ADD = struct.Struct("<BBHIQQQQII32s32s")
_TIME = struct.Struct("<Q")
_WORD = struct.Struct("<I")
_SUM_BYTES = 16
_MAX_BODY = 1 << 26
HEADER_BYTES = _HEADER.size + _SUM_BYTES
ADD_BYTES = _FRAME.size + _SUM_BYTES + _ADD.size
"""Manifest bytes that naming one record takes."""


class Tag(IntEnum):
    ADD = 1
    DROP = 2
    TOUCH = 3
    QUARANTINE = 4
    PACKS = 5
    MODEL = 6


@dataclass(frozen=True, slots=True)
class Add:
    """A record exists at `offset` of `pack`. A later Add of the same key moves it there.

    start, rows, kind, parent: as in the record. length: bytes of header and payload. used: unix seconds. model: id.
    """

    key: bytes
    parent: bytes
    kind: Kind
    pack: int
    offset: int
    length: int
    start: int
    rows: int
    used: int
    model: int


@dataclass(frozen=True, slots=True)
class Drop:
    """These records exist no more."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Touch:
    """These records were used at `used` (unix seconds)."""

    used: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """These records were found damaged: they exist no more, and are counted."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Packs:
    """The packs there are, and the number of the next one: numbers are never used twice."""

    next: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """Stands for a fingerprint in later Adds."""

    id: int
    fingerprint: bytes
    name: str


Op = Add | Drop | Touch | Quarantine | Packs | Model


@dataclass(frozen=True, slots=True)
class Log:
    """What a manifest said. good: bytes up to its last whole frame. damaged: whole frames follow behind a bad one."""

    generation: int
    ops: tuple[Op, ...]
    sequence: int
    good: int
    damaged: bool


def encode_header(generation: int, sequence: int) -> bytes:
    head = _HEADER.pack(MAGIC, VERSION, 0, 0, generation, sequence)
    return head + xxhash.xxh3_128_digest(head)


def encode_ops(ops: Iterable[Op], sequence: int) -> bytes:
    """Frames for `ops`, numbered from `sequence` on."""
    return b"".join(_frame(op, number) for number, op in enumerate(ops, sequence))


def decode_log(raw: bytes) -> Log:
    """Reads a whole manifest file. Raises OtherVersion, or BadRecord when not even the header is intact."""
    generation, first = _decode_header(raw)
    frames = list(_frames(raw, HEADER_BYTES, first))
    good = frames[-1][1] if frames else HEADER_BYTES
    sequence = first + len(frames)
    return Log(generation, tuple(op for op, _ in frames), sequence, good, _frame_follows(raw, good, sequence))


def _decode_header(raw: bytes) -> tuple[int, int]:
    if len(raw) < HEADER_BYTES or raw[:8] != MAGIC:
        raise BadRecord("no manifest here")
    _, version, _, _, generation, sequence = _HEADER.unpack_from(raw)
    if version != VERSION:
        raise OtherVersion(f"manifest format {version}, this build reads {VERSION}")
    if xxhash.xxh3_128_digest(raw[: _HEADER.size]) != raw[_HEADER.size : HEADER_BYTES]:
        raise BadRecord("manifest header checksum")
    return generation, sequence


def _frame(op: Op, sequence: int) -> bytes:
    tag, body = _encode(op)
    head = _FRAME.pack(b"OM", tag, 0, len(body), sequence)
    return head + xxhash.xxh3_128_digest(head + body) + body


def _frames(raw: bytes, at: int, sequence: int) -> Iterator[tuple[Op, int]]:
    while (found := _read_frame(raw, at)) is not None and found[1] == sequence:
        op, _, at = found
        sequence += 1
        yield op, at


def _read_frame(raw: bytes, at: int) -> tuple[Op, int, int] | None:
    """(op, sequence, end) of the whole frame at `at`, or None."""
    body_at = at + _FRAME.size + _SUM_BYTES
    if body_at > len(raw):
        return None
    mark, tag, _, size, sequence = _FRAME.unpack_from(raw, at)
    if mark != b"OM" or not 0 < size <= min(_MAX_BODY, len(raw) - body_at):
        return None
    head, body = raw[at : at + _FRAME.size], raw[body_at : body_at + size]
    if xxhash.xxh3_128_digest(head + body) != raw[at + _FRAME.size : body_at]:
        return None
    op = _decode(tag, body)
    return None if op is None else (op, sequence, body_at + size)


def _frame_follows(raw: bytes, at: int, sequence: int) -> bool:
    """Whether a later frame is whole: then the bad one is damage, and not the torn end of a last write."""
    while (at := raw.find(b"OM", at + 1)) >= 0:
        found = _read_frame(raw, at)
        if found is not None and found[1] > sequence:
            return True
    return False


def _encode(op: Op) -> tuple[Tag, bytes]:
    match op:
        case Add():
            return Tag.ADD, _encode_add(op)
        case Drop(keys):
            return Tag.DROP, b"".join(keys)
        case Touch(used, keys):
            return Tag.TOUCH, _TIME.pack(used) + b"".join(keys)
        case Quarantine(keys):
            return Tag.QUARANTINE, b"".join(keys)
        case Packs(number, numbers):
            return Tag.PACKS, b"".join(map(_WORD.pack, (number, *numbers)))
        case Model(id, fingerprint, name):
            return Tag.MODEL, _WORD.pack(id) + fingerprint + name.encode()


def _encode_add(op: Add) -> bytes:
    sizes = (op.pack, op.offset, op.length, op.start, op.used, op.rows, op.model)
    return _ADD.pack(op.kind, 0, 0, *sizes, op.key, op.parent)


def _decode(tag: int, body: bytes) -> Op | None:
    """The op, or None for a tag or size this build does not know."""
    reader = _READERS.get(tag)
    try:
        return None if reader is None else reader(body)
    except (ValueError, struct.error):
        return None


def _read_add(body: bytes) -> Op:
    kind, _, _, pack, offset, length, start, used, rows, model, key, parent = _ADD.unpack(body)
    return Add(key, parent, Kind(kind), pack, offset, length, start, rows, used, model)


def _read_packs(body: bytes) -> Op:
    first, *numbers = (word for (word,) in _WORD.iter_unpack(body))
    return Packs(first, tuple(numbers))


def _read_model(body: bytes) -> Op:
    (id,) = _WORD.unpack_from(body)
    print_ = body[_WORD.size : _WORD.size + KEY_BYTES]
    return Model(id, print_, body[_WORD.size + KEY_BYTES :].decode())


def _keys(body: bytes) -> tuple[bytes, ...]:
    if len(body) % KEY_BYTES:
        raise ValueError("ragged key list")
    return tuple(body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES))


_READERS: dict[int, Callable[[bytes], Op]] = {
    Tag.ADD: _read_add,
    Tag.DROP: lambda body: Drop(_keys(body)),
    Tag.TOUCH: lambda body: Touch(_TIME.unpack_from(body)[0], _keys(body[_TIME.size :])),
    Tag.QUARANTINE: lambda body: Quarantine(_keys(body)),
    Tag.PACKS: _read_packs,
    Tag.MODEL: _read_model,
}
