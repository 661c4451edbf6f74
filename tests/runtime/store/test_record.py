import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.store.record import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    BadRecord,
    Kind,
    OtherVersion,
    decode_header,
    decode_record,
    encode_header,
    encode_record,
    padded,
)

KEY, PARENT, PRINT = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32


def block(payload: bytes = b"rows") -> bytes:
    return encode_record(Kind.BLOCK, KEY, PARENT, PRINT, 512, 256, payload, 1_700_000_000)[1]


@given(st.binary(min_size=1, max_size=500), st.integers(0, 255), st.integers(0, 2**20))
def test_a_record_reads_back_as_written(payload: bytes, rows: int, index: int) -> None:
    header, raw = encode_record(Kind.ANCHOR, KEY, PARENT, PRINT, index * 256, rows, payload, 5)
    got, body = decode_record(raw)
    assert (got, bytes(body), got.at) == (header, payload, index * 256 + rows)
    assert len(raw) == padded(header.total)
    assert len(raw) % 64 == 0


@given(st.binary(min_size=1, max_size=200), st.data())
def test_no_single_damaged_bit_is_accepted(payload: bytes, data: st.DataObject) -> None:
    header, raw = encode_record(Kind.BLOCK, KEY, PARENT, PRINT, 0, 256, payload, 0)
    damaged = bytearray(raw)
    bit = data.draw(st.integers(0, header.total * 8 - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises((BadRecord, OtherVersion)):
        decode_record(bytes(damaged))


@given(st.integers(0, HEADER_BYTES + 3))
def test_a_record_cut_short_is_refused(size: int) -> None:
    with pytest.raises(BadRecord):
        decode_record(block(b"rows")[:size])


@given(st.binary(max_size=400))
def test_any_bytes_are_a_bad_record_or_another_version(raw: bytes) -> None:
    with pytest.raises((BadRecord, OtherVersion)):
        decode_record(raw)


@pytest.mark.parametrize("size", [0, HEADER_BYTES, 4096])
def test_zeros_are_never_a_record(size: int) -> None:
    with pytest.raises(BadRecord):
        decode_record(bytes(size))


def test_zeros_with_a_matching_checksum_are_never_a_record() -> None:
    head = bytes(HEADER_BYTES - 16)
    with pytest.raises(BadRecord):
        decode_header(head + xxhash.xxh3_128_digest(head))


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, 0, 65535])
def test_another_version_is_told_apart_from_damage(version: int) -> None:
    raw = bytearray(block())
    raw[len(MAGIC) : len(MAGIC) + 2] = struct.pack("<H", version)
    with pytest.raises(OtherVersion, match=str(version)):
        decode_record(bytes(raw))


@pytest.mark.parametrize(("kind", "rows", "start"), [(1, 255, 0), (2, 256, 0), (1, 256, 100), (3, 256, 0), (0, 0, 0)])
def test_impossible_sizes_are_refused_even_with_right_checksums(kind: int, rows: int, start: int) -> None:
    header, _ = encode_record(Kind.BLOCK, KEY, PARENT, PRINT, 0, 256, b"x", 0)
    with pytest.raises(BadRecord):
        decode_header(encode_header(replace(header, kind=kind, rows=rows, start=start)))  # type: ignore[arg-type]


def test_an_empty_payload_is_refused() -> None:
    with pytest.raises(BadRecord):
        block(b"")


def test_a_header_with_another_payload_is_refused() -> None:
    with pytest.raises(BadRecord, match="payload"):
        decode_record(block(b"aaaa")[:HEADER_BYTES] + b"bbbb")
