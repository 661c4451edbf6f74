import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.store import manifest
from onecopy.runtime.store.manifest import Add, Drop, Model, Op, Packs, Quarantine, Touch, decode_log, encode_ops
from onecopy.runtime.store.record import BadRecord, Kind, OtherVersion

keys = st.binary(min_size=32, max_size=32)
some_keys = st.lists(keys, min_size=1, max_size=3).map(tuple)
u32, u63 = st.integers(0, 2**32 - 1), st.integers(0, 2**63)
adds = st.builds(Add, keys, keys, st.sampled_from(Kind), u32, u63, u63, u63, u32, u63, u32)
ops = st.one_of(
    adds,
    st.builds(Drop, some_keys),
    st.builds(Touch, u63, some_keys),
    st.builds(Quarantine, some_keys),
    st.builds(Packs, u32, st.lists(u32, max_size=4).map(tuple)),
    st.builds(Model, u32, keys, st.text(max_size=20)),
)
logs = st.lists(ops, max_size=6)


def written(entries: list[Op], first: int = 7) -> bytes:
    return manifest.encode_header(3, first) + encode_ops(entries, first)


@given(logs)
def test_a_log_reads_back_as_written(entries: list[Op]) -> None:
    raw = written(entries)
    log = decode_log(raw)
    assert list(log.ops) == entries
    assert (log.generation, log.sequence, log.good, log.damaged) == (3, 7 + len(entries), len(raw), False)


@given(logs, st.data())
def test_a_log_cut_anywhere_keeps_exactly_its_whole_frames(entries: list[Op], data: st.DataObject) -> None:
    raw = written(entries)
    cut = data.draw(st.integers(manifest.HEADER_BYTES, len(raw)))
    log = decode_log(raw[:cut] + b"\xff" * data.draw(st.integers(0, 100)))
    whole = [n for n in range(len(entries) + 1) if len(written(entries[:n])) <= cut]
    assert list(log.ops) == entries[: whole[-1]]
    assert log.good == len(written(entries[: whole[-1]]))
    assert not log.damaged


@given(logs.filter(bool), st.data())
def test_a_flipped_bit_ends_the_log_there_and_is_known_as_damage_when_frames_follow(
    entries: list[Op], data: st.DataObject
) -> None:
    raw = bytearray(written(entries))
    bit = data.draw(st.integers(manifest.HEADER_BYTES * 8, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    hit = next(n for n in range(len(entries)) if len(written(entries[: n + 1])) > bit // 8)
    log = decode_log(bytes(raw))
    assert list(log.ops) == entries[:hit]
    assert log.damaged == (hit < len(entries) - 1)


def test_a_frame_out_of_sequence_ends_the_log() -> None:
    drop = Drop((bytes(32),))
    raw = manifest.encode_header(1, 5) + encode_ops([drop], 5) + encode_ops([drop], 5)
    assert len(decode_log(raw).ops) == 1


def test_an_unknown_op_ends_the_log() -> None:
    frame = bytearray(encode_ops([Drop((bytes(32),))], 0))
    assert manifest._read_frame(bytes(frame), 0) is not None
    assert manifest._decode(99, b"x") is None


@pytest.mark.parametrize("raw", [b"", bytes(48), bytes(4096), b"OCMANI\r\n"])
def test_zeros_and_stumps_are_no_manifest(raw: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_log(raw)


def test_a_manifest_of_another_version_says_so() -> None:
    raw = bytearray(written([]))
    raw[8] = 9
    with pytest.raises(OtherVersion):
        decode_log(bytes(raw))


@given(st.binary(max_size=400))
def test_any_bytes_are_a_log_or_a_bad_one(raw: bytes) -> None:
    assert manifest.decode_log(written([]) + raw).ops == ()
