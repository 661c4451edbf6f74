"""Records that are read straight into the memory of the rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onecopy.runtime.seams import RealDisk, append_all
from onecopy.runtime.store import Kind, Record, placed
from onecopy.runtime.store.content import encode_content
from onecopy.runtime.store.placed import FIRST, Place, load_placed
from onecopy.runtime.store.record import BadRecord, OtherVersion
from onecopy.runtime.store.safetensors import BadImage

from tests.sim.disk import SimDisk
from tests.support.rows import PRINT

KEY, ABOVE = b"k" * 32, b"a" * 32
ROWS, HEADS, WIDTH = 256, 3, 8


def tensors(layers: int = 2, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        f"{i}.{name}": rng.normal(size=(HEADS, ROWS // (4 if name == "pooled" else 1), WIDTH)).astype(dtype)
        for i in range(layers)
        for name in ("k", "v", "pooled")
    }


def block_bytes(rows: dict[str, np.ndarray]) -> bytes:
    record = Record(Kind.BLOCK, KEY, ABOVE, 512, tuple(range(256)), rows)
    header, raw = encode_content(record, PRINT, "model", 1)
    return bytes(raw)[: header.total]


def room_like(rows: dict[str, np.ndarray], spare: int = 100) -> dict[str, np.ndarray]:
    """Views into larger buffers, as a segment's block is: contiguous for each head, not in all."""
    return {
        name: np.full((a.shape[0], a.shape[1] + spare, *a.shape[2:]), np.nan, a.dtype)[:, spare // 2 :][:, : a.shape[1]]
        for name, a in rows.items()
    }


@pytest.fixture(params=["sim", "real"])
def disk(request: pytest.FixtureRequest) -> Any:
    return SimDisk() if request.param == "sim" else RealDisk()


def file_of(disk: Any, path: Path, raw: bytes, before: int = 64) -> Any:
    where = str(path / "pack") if isinstance(disk, RealDisk) else "/pack"
    file = disk.open_append(where)
    append_all(file, bytes(before) + raw)
    return file


def test_a_block_arrives_in_its_place_bit_for_bit(disk: Any, tmp_path: Path) -> None:
    rows = tensors()
    room, raw = room_like(rows), block_bytes(rows)
    stored = load_placed(file_of(disk, tmp_path, raw), 64, len(raw), KEY, Place.of(room))
    assert stored is not None
    assert stored.tensors is room
    assert all(np.array_equal(room[name], rows[name]) for name in rows)
    assert (stored.key, stored.parent, stored.start, stored.tokens) == (KEY, ABOVE, 512, tuple(range(256)))
    assert (stored.kind, stored.size, stored.fingerprint) == (Kind.BLOCK, len(raw), PRINT)


def test_more_layers_than_one_first_read_names_and_than_one_call_fills(disk: Any, tmp_path: Path) -> None:
    rows = tensors(layers=150)
    room, raw = room_like(rows, 2), block_bytes(rows)
    assert raw.index(b'"149.') > FIRST
    assert load_placed(file_of(disk, tmp_path, raw), 64, len(raw), KEY, Place.of(room)) is not None
    assert all(np.array_equal(room[name], rows[name]) for name in rows)


def test_what_lies_beside_a_block_is_not_touched(disk: Any, tmp_path: Path) -> None:
    rows, raw = tensors(1), block_bytes(tensors(1))
    wide = {name: np.full((HEADS, a.shape[1] + 20, WIDTH), 5.0, np.float32) for name, a in rows.items()}
    room = {name: a[:, 10 : a.shape[1] - 10] for name, a in wide.items()}
    assert load_placed(file_of(disk, tmp_path, raw), 64, len(raw), KEY, Place.of(room)) is not None
    assert all((a[:, :10] == 5).all() and (a[:, -10:] == 5).all() for a in wide.values())


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "more", "strided"])
def test_another_room_than_the_records_stays_as_it_was(change: str, disk: Any, tmp_path: Path) -> None:
    rows, raw = tensors(1), block_bytes(tensors(1))
    room = {name: np.full(a.shape, 3, a.dtype) for name, a in rows.items()}
    match change:
        case "name":
            room["0.other"] = room.pop("0.k")
        case "shape":
            room["0.k"] = np.full((HEADS, ROWS, WIDTH + 1), 3, np.float32)
        case "dtype":
            room["0.k"] = room["0.k"].astype(np.float64)
        case "more":
            room["9.k"] = room["0.k"].copy()
        case "strided":
            room["0.k"] = np.full((HEADS, ROWS, WIDTH * 2), 3, np.float32)[:, :, ::2]
    assert load_placed(file_of(disk, tmp_path, raw), 64, len(raw), KEY, Place.of(room)) is None
    assert all((a == 3).all() for a in room.values())


def test_damage_anywhere_is_seen_and_leaves_no_number_behind(disk: Any, tmp_path: Path) -> None:
    rows, raw = tensors(1), block_bytes(tensors(1))
    for k, at in enumerate([0, 9, 40, 150, 190, 200, 300, 700, *range(1000, len(raw), 4999), len(raw) - 1]):
        bad = bytearray(raw)
        bad[at] ^= 0x40
        room = {name: np.zeros(a.shape, a.dtype) for name, a in rows.items()}
        (tmp_path / str(k)).mkdir()
        file = file_of(RealDisk(), tmp_path / str(k), bytes(bad))
        with pytest.raises((BadRecord, OtherVersion, BadImage)):
            if load_placed(file, 64, len(raw), KEY, Place.of(room)) is None:
                raise BadRecord("left to the ordinary way, which reads it anew and judges it")
        file.close()
        assert not any(a.any() for a in room.values()), at


def test_a_pack_that_ends_early_is_a_bad_record(disk: Any, tmp_path: Path) -> None:
    rows, raw = tensors(1), block_bytes(tensors(1))
    room = room_like(rows)
    with pytest.raises(BadRecord, match="cut short"):
        load_placed(file_of(disk, tmp_path, raw[:-100]), 64, len(raw), KEY, Place.of(room))
    assert not any(a.any() for a in room.values())


@pytest.mark.parametrize("portion", [1, 9000, 20_000])
def test_a_record_that_comes_in_portions_is_judged_as_a_whole(
    portion: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed, "PORTION", portion)
    rows, raw = tensors(), block_bytes(tensors())
    room = room_like(rows)
    assert load_placed(file_of(RealDisk(), tmp_path, raw), 64, len(raw), KEY, Place.of(room)) is not None
    assert all(np.array_equal(room[name], rows[name]) for name in rows)
    for k, at in enumerate(range(2000, len(raw), 7001)):
        bad = bytearray(raw)
        bad[at] ^= 1
        (tmp_path / str(k)).mkdir()
        with pytest.raises(BadRecord, match="checksum"):
            load_placed(file_of(RealDisk(), tmp_path / str(k), bytes(bad)), 64, len(raw), KEY, Place.of(room))
        assert not any(a.any() for a in room.values())


def test_a_pack_that_ends_between_portions_leaves_no_number_behind(
    disk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed, "PORTION", 1)
    rows, raw = tensors(1), block_bytes(tensors(1))
    room = room_like(rows)
    with pytest.raises(BadRecord, match="cut short"):
        load_placed(file_of(disk, tmp_path, raw[: -rows["0.pooled"].nbytes]), 64, len(raw), KEY, Place.of(room))
    assert not any(a.any() for a in room.values())


def test_columns_that_are_not_next_to_each_other_are_no_room(disk: Any, tmp_path: Path) -> None:
    flat = {"flat": np.ones((ROWS, WIDTH), np.float32)}
    raw, room = block_bytes(flat), {"flat": np.full((ROWS, WIDTH * 2), 3, np.float32)[:, ::2]}
    assert load_placed(file_of(disk, tmp_path, raw), 64, len(raw), KEY, Place.of(room)) is None
    assert (room["flat"] == 3).all()


def test_records_that_begin_alike_are_still_judged_each_by_its_own_bytes(tmp_path: Path) -> None:
    one, two = tensors(1), {name: a + 1 for name, a in tensors(1).items()}
    raw = block_bytes(one)
    bad = bytearray(block_bytes(two))
    bad[len(bad) // 2] ^= 1
    file = file_of(RealDisk(), tmp_path, raw + bytes(bad) + block_bytes(two))
    rooms = [room_like(one) for _ in range(3)]
    assert load_placed(file, 64, len(raw), KEY, Place.of(rooms[0])) is not None
    with pytest.raises(BadRecord, match="payload checksum"):
        load_placed(file, 64 + len(raw), len(raw), KEY, Place.of(rooms[1]))
    assert load_placed(file, 64 + 2 * len(raw), len(raw), KEY, Place.of(rooms[2])) is not None
    for room, right in zip(rooms, (one, {name: a * 0 for name, a in one.items()}, two), strict=True):
        assert all(np.array_equal(room[name], right[name]) for name in right)


def test_another_records_bytes_are_not_believed(disk: Any, tmp_path: Path) -> None:
    rows, raw = tensors(1), block_bytes(tensors(1))
    file, room = file_of(disk, tmp_path, raw), room_like(rows)
    with pytest.raises(BadRecord, match="another record"):
        load_placed(file, 64, len(raw), b"x" * 32, Place.of(room))
    with pytest.raises(BadRecord, match="another length"):
        load_placed(file, 64, len(raw) - 8, KEY, Place.of(room))
    assert all(np.isnan(a).all() for a in room.values())
