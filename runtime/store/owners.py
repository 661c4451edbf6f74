"""Whose a record is: a salt is no part of it, but its key shows which one it was made with."""

from __future__ import annotations

from collections.abc import Iterable

from .content import TOKENS
from .index import Entry
from .keys import anchor_key, block_key
from .packs import Packs
from .record import HEADER_BYTES, Kind, decode_header
from .safetensors import array_of, decode_head, head_bytes

_HEAD = 64 << 10
"""Bytes read first: enough for the header and the token ids of most payloads."""


def owner_of(packs: Packs, entry: Entry, fingerprint: bytes, salts: Iterable[bytes]) -> bytes | None:
    """The one of `salts` that `entry` was written under, None when it is none of them. Reads a few KiB.

    Raises OSError; a damaged record belongs to nobody.
    """
    try:
        tokens = _tokens(packs, entry)
    except ValueError:
        return None
    make = block_key if entry.kind is Kind.BLOCK else anchor_key
    return next((salt for salt in salts if make(entry.parent, tokens, fingerprint, salt) == entry.key), None)


def _tokens(packs: Packs, entry: Entry) -> tuple[int, ...]:
    """A record's token ids. The payload's checksum is not looked at: a wrong id makes another key."""
    raw = packs.read(entry.pack, entry.offset, HEADER_BYTES + _HEAD)
    header = decode_header(raw)
    start = raw[HEADER_BYTES:]
    if (size := head_bytes(start[:8], header.length)) > len(start):
        start = packs.read(entry.pack, entry.offset + HEADER_BYTES, size)
    info = decode_head(start, header.length).infos[TOKENS]
    begin, end = (size + at for at in info.data_offsets)
    data = packs.read(entry.pack, entry.offset + HEADER_BYTES + begin, end - begin)
    return tuple(array_of(info, data).tolist())
