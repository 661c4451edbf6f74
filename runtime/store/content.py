"""What goes into the store and comes out of it: records with their tokens and tensors, and answers to questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .record import HEADER_BYTES, Header, Kind, record_room, seal_record
from .safetensors import Array, BadImage, Tensors, decode, encode_head, encode_into, info_of

TOKENS = "tokens"
"""Name of the tensor that carries a record's own token ids."""


@dataclass(frozen=True, slots=True)
class Record:
    """What to keep. A block has 256 tokens; an anchor has the 0 to 255 tokens of its trailer.

    key, parent: from `keys`. start: absolute position of the first token. tensors: any safetensors dtype, views are
    fine: they are read when the record is written. metadata: strings that travel with the payload. used: Unix seconds
    when its conversation last ran, None for now: what is older than all that is kept makes room for nothing.
    """

    kind: Kind
    key: bytes
    parent: bytes
    start: int
    tokens: Sequence[int]
    tensors: Tensors
    metadata: Mapping[str, str] = field(default_factory=dict)
    used: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What the disk has of some tokens. keys: of the leading whole blocks. anchors: (position, key), latest first."""

    keys: tuple[bytes, ...]
    anchors: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """One record read back and verified. tensors: read-only views, the token ids taken out of them."""

    kind: Kind
    key: bytes
    parent: bytes
    start: int
    tokens: tuple[int, ...]
    tensors: Tensors
    metadata: Mapping[str, str]
    fingerprint: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of reading everything. bad: damaged and quarantined. skipped: of another version. unread: disk errors."""

    good: int
    bad: int
    skipped: int
    unread: int
    size: int


def encode_content(record: Record, fingerprint: bytes, model: str, created: int) -> tuple[Header, memoryview]:
    """The record's header and its padded bytes. Reads the tensors. Raises ValueError for what is no record."""
    if TOKENS in record.tensors:
        raise ValueError(f"a tensor cannot be called {TOKENS!r}")
    about = {"format": "onecopy.rows", "kind": record.kind.name.lower(), "model": model}
    tensors = {TOKENS: np.asarray(record.tokens, dtype="<u4"), **record.tensors}
    head = encode_head({name: info_of(array) for name, array in tensors.items()}, {**about, **record.metadata})
    length, rows = len(head) + sum(array.nbytes for array in tensors.values()), len(record.tokens)
    raw = record_room(length)
    encode_into(raw[HEADER_BYTES : HEADER_BYTES + length], head, tensors.values())
    names = (record.kind, record.key, record.parent, fingerprint, record.start)
    return seal_record(*names, rows, raw, length, created), raw


def decode_content(header: Header, payload: memoryview) -> Stored:
    """A verified payload as tensors. Raises BadImage when it is not one of ours."""
    image = decode(payload)
    tensors = dict(image.tensors)
    tokens = tensors.pop(TOKENS, None)
    if tokens is None or tokens.shape != (header.rows,):
        raise BadImage("no token ids")
    return stored(header, tokens, tensors, image.metadata)


def stored(header: Header, tokens: Array, tensors: Tensors, metadata: Mapping[str, str]) -> Stored:
    """A record that was read and verified."""
    return Stored(
        header.kind,
        header.key,
        header.parent,
        header.start,
        tuple(tokens.tolist()),
        tensors,
        metadata,
        header.fingerprint,
        header.total,
    )
