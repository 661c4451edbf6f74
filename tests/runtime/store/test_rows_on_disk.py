"""The engine, case by case. What happens when power goes or a disk fails is in test_crash.py."""

import logging
import os
from pathlib import Path

import pytest
from onecopy.runtime.errors import StoreUnusable
from onecopy.runtime.seams import RealDisk, append_all
from onecopy.runtime.store import ReadOnly, block_keys, fingerprint
from onecopy.runtime.store.packs import START

from tests.sim.disk import SimDisk
from tests.support.rows import PATH, PRINT, open_store, records_of, same, talk


def pack_bytes_of(disk: SimDisk, number: int = 1) -> bytes:
    return bytes(disk.medium.names[f"{PATH}/rows-{number:08d}.pack"].live)


def test_what_is_put_reads_back_bit_for_bit_also_after_a_restart() -> None:
    disk = SimDisk()
    records = records_of(talk(1, 700), anchor=True)
    store = open_store(disk)
    assert store.put(records) == tuple(r.key for r in records)
    assert all(same(store, r) for r in records)
    store.close()
    again = open_store(disk)
    assert again.recovered == "read"
    assert all(same(again, r) for r in records)


def test_a_put_over_several_packs_acknowledges_all_of_it() -> None:
    disk = SimDisk()
    store = open_store(disk, quota=4_000_000)
    records = records_of(talk(1, 256 * 20), width=16)
    assert store.put(records) == tuple(r.key for r in records)
    assert store.statistics()["packs"] > 3
    store.close()
    assert all(same(open_store(disk, read_only=True), r) for r in records)


def test_shared_blocks_are_stored_once() -> None:
    store = open_store(SimDisk())
    parent = talk(1, 1024)
    store.put(records_of(parent))
    before = store.statistics()["written_bytes"]
    assert len(store.put(records_of([*parent, *talk(2, 256)]))) == 1
    assert len(store.put(records_of([*parent[:512], *talk(3, 256)]))) == 1
    assert store.statistics()["written_bytes"] - before == before // 2


def test_find_counts_leading_blocks_and_lists_anchors_latest_first() -> None:
    store = open_store(SimDisk())
    tokens = talk(1, 1100)
    for n in (100, 700, 1000):
        store.put(records_of(tokens[:n], anchor=True))
    found = store.find(tokens, b"")
    assert len(found.keys) == 3
    assert [at for at, _ in found.anchors] == [1000, 700, 100]
    assert [at for at, _ in store.find(tokens[:999], b"").anchors] == [700, 100]


def test_a_missing_block_ends_the_prefix() -> None:
    store = open_store(SimDisk())
    records = records_of(talk(1, 1024))
    store.put(records)
    store.drop([records[1].key])
    assert store.have(r.key for r in records) == 1
    store.put(records)
    assert store.have(r.key for r in records) == 4


def test_another_salt_or_model_finds_nothing() -> None:
    disk = SimDisk()
    store = open_store(disk)
    tokens = talk(1, 512)
    store.put(records_of(tokens, b"key-1", anchor=True))
    assert len(store.find(tokens, b"key-1").keys) == 2
    assert store.find(tokens, b"key-2") == store.find(tokens, b"")
    assert not store.find(tokens, b"").keys
    store.close()
    other = open_store(disk, fingerprint=fingerprint({"weights": "other"}))
    assert not other.find(tokens, b"key-1").keys


def test_an_edit_writes_only_what_differs() -> None:
    store = open_store(SimDisk())
    tokens = talk(1, 1024)
    store.put(records_of(tokens))
    edited = [*tokens[:600], 1, *tokens[601:]]
    assert len(store.put(records_of(edited))) == 2
    assert len(store.find(tokens, b"").keys) == len(store.find(edited, b"").keys) == 4


def test_a_damaged_record_is_quarantined_counted_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimDisk()
    store = open_store(disk)
    records = records_of(talk(1, 768))
    store.put(records)
    disk.corrupt(f"{PATH}/rows-00000001.pack", pack_bytes_of(disk).find(records[1].key) + 1000, b"\x00\x01\x02\x03")
    assert store.read(records[1].key) is None
    assert store.statistics()["quarantined"] == 1
    assert store.have(r.key for r in records) == 1
    assert store.put(records) == (records[1].key,)
    assert all(same(store, r) for r in records)
    assert "quarantined" in caplog.text


def test_quarantine_survives_a_restart() -> None:
    disk = SimDisk()
    store = open_store(disk)
    (record,) = records_of(talk(1, 256))
    store.put([record])
    disk.corrupt(f"{PATH}/rows-00000001.pack", START + 300, b"damage")
    store.read(record.key)
    store.close()
    assert open_store(disk).locate(record.key) is None


@pytest.mark.parametrize("version", [0, 2, 999])
def test_records_of_another_version_are_skipped_one_by_one_and_replaced_by_the_next_save(
    version: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimDisk()
    store = open_store(disk)
    records = records_of(talk(1, 1024))
    store.put(records)
    for record in records[:2]:
        at = pack_bytes_of(disk).find(record.key) - 32
        disk.corrupt(f"{PATH}/rows-00000001.pack", at + 8, version.to_bytes(2, "little"))
    with caplog.at_level(logging.WARNING, "onecopy.store"):
        assert [store.read(r.key) is None for r in records] == [True, True, False, False]
    assert len(caplog.records) == 1
    assert store.statistics()["skipped"] == 2
    assert len(store.put(records)) == 2
    assert store.have(r.key for r in records) == 4
    assert all(same(store, r) for r in records)


def test_a_lost_manifest_is_rebuilt_from_the_packs() -> None:
    disk = SimDisk()
    store = open_store(disk, model="tiny")
    records = records_of(talk(1, 700), anchor=True)
    store.put(records)
    store.close()
    disk.unlink(f"{PATH}/manifest")
    again = open_store(disk)
    assert again.recovered == "rebuilt"
    assert all(same(again, r) for r in records)
    assert {c.model for c in again.conversations()} == {"tiny"}


def test_rebuilding_passes_over_damage_and_other_versions(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimDisk()
    store = open_store(disk)
    records = records_of(talk(1, 1536))
    store.put(records)
    store.close()
    disk.unlink(f"{PATH}/manifest")
    place = [pack_bytes_of(disk).find(r.key) - 32 for r in records]
    disk.corrupt(f"{PATH}/rows-00000001.pack", place[1] + 64, b"damaged header")
    disk.corrupt(f"{PATH}/rows-00000001.pack", place[2] + 700, b"damaged payload")
    disk.corrupt(f"{PATH}/rows-00000001.pack", place[4] + 8, b"\x07")
    again = open_store(disk)
    assert [same(again, r) for r in records] == [True, False, False, True, False, True]
    assert "record format 7" in caplog.text


def test_a_manifest_damaged_in_the_middle_loses_nothing_and_brings_nothing_back() -> None:
    disk = SimDisk()
    store = open_store(disk)
    dropped, *records = records_of(talk(1, 1024))
    store.put([dropped])
    store.drop([dropped.key])
    for record in records:
        store.put([record])
    store.close()
    at = bytes(disk.medium.names[f"{PATH}/manifest"].live).find(records[1].key)
    disk.corrupt(f"{PATH}/manifest", at, b"bit rot")
    again = open_store(disk)
    assert again.recovered == "rebuilt"
    assert all(same(again, r) for r in records)
    assert again.locate(dropped.key) is None


def test_a_manifest_of_a_later_format_is_not_a_reason_to_lose_rows() -> None:
    disk = SimDisk()
    store = open_store(disk)
    records = records_of(talk(1, 512))
    store.put(records)
    store.close()
    disk.corrupt(f"{PATH}/manifest", 8, b"\x09")
    assert all(same(open_store(disk), r) for r in records)


def test_a_vanished_pack_is_a_miss_and_not_an_error() -> None:
    disk = SimDisk()
    store = open_store(disk)
    records = records_of(talk(1, 512))
    store.put(records)
    disk.unlink(f"{PATH}/rows-00000001.pack")
    assert store.read(records[0].key) is None
    assert store.locate(records[0].key) is None
    store.close()
    assert open_store(disk).lost == 1


def test_a_disk_error_is_forgiven_once_and_then_the_record_goes() -> None:
    disk = SimDisk()
    store = open_store(disk)
    (record,) = records_of(talk(1, 256))
    store.put([record])
    disk.faults.eio = 1.0
    assert store.read(record.key) is None
    assert store.locate(record.key) is not None
    assert store.read(record.key) is None
    disk.faults.eio = 0.0
    assert store.put([record]) == (record.key,)


def test_a_long_log_is_replaced_by_a_snapshot_that_says_the_same() -> None:
    disk = SimDisk()
    store = open_store(disk, wall=iter(range(10**6, 10**9, 100)).__next__)
    records = records_of(talk(1, 512))
    store.put(records)
    for _ in range(2200):
        store.note_use([records[0].key])
    store.commit()
    store.note_use([records[1].key])
    store.commit()
    store.close()
    assert disk.stat(f"{PATH}/manifest").size < 2000
    again = open_store(disk)
    assert all(same(again, r) for r in records)


# -- quota, floor, sweep ----------------------------------------------------------------------------------------


def test_an_owner_is_known_by_hashing_the_tokens_again() -> None:
    store = open_store(SimDisk())
    for n, salt in ((512, b"one"), (700, b"two"), (100, b"")):
        store.put(records_of(talk(n, n), salt, anchor=n % 256 > 0))
    store.put(records_of(talk(9, 512), b"one", print_=fingerprint({"weights": "other"})))

    def owned(*salts: bytes) -> set[tuple[int, bytes]]:
        return {(c.tokens, salt) for c, salt in store.owned(salts)}

    assert owned(b"one", b"two", b"") == {(512, b"one"), (700, b"two"), (100, b"")}
    assert owned(b"two") == {(700, b"two")}
    assert owned(b"three") == set()
    assert owned(b"two", b"one") == {(512, b"one"), (700, b"two")}


def test_a_dropped_conversation_leaves_what_others_share() -> None:
    store = open_store(SimDisk())
    shared = talk(1, 512)
    ours, theirs = records_of([*shared, *talk(2, 600)], anchor=True), records_of([*shared, *talk(3, 600)], anchor=True)
    store.put([*ours, *theirs])
    assert len(store.conversations()) == 2
    assert store.drop_conversation(ours[-1].key) == 3
    assert all(same(store, r) for r in theirs)
    (left,) = store.conversations()
    assert (left.tip, left.tokens, left.whole) == (theirs[-1].key, 1112, True)


# -- directories and neighbours -----------------------------------------------------------------------------------


def test_a_second_process_reads_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimDisk(pid=11)
    first = open_store(disk)
    records = records_of(talk(1, 512))
    first.put(records)
    second = open_store(disk.beside(22))
    assert (second.read_only, second.owner) == (True, 11)
    assert "process 11" in caplog.text
    assert all(same(second, r) for r in records)
    with pytest.raises(ReadOnly):
        second.put(records_of(talk(2, 256)))
    first.put(records_of(talk(3, 256)))
    assert not open_store(disk.beside(22)).locate(records_of(talk(2, 256))[0].key)


def test_a_reader_whose_records_are_swept_away_misses_and_goes_on() -> None:
    disk = SimDisk(pid=11)
    first = open_store(disk, quota=2_000_000)
    records = records_of(talk(1, 1024), width=16)
    first.put(records)
    second = open_store(disk.beside(22))
    first.drop(r.key for r in records)
    first.put(records_of(talk(2, 1024), width=16))
    while first.sweep_step(dead=0.01).more:
        pass
    assert [second.read(r.key) for r in records[:2]] == [None, None]


def test_the_lock_of_a_dead_process_is_taken_over() -> None:
    disk = SimDisk(pid=11)
    store = open_store(disk)
    records = records_of(talk(1, 256))
    store.put(records)
    disk.restart()
    again = open_store(disk.beside(22))
    assert not again.read_only
    assert same(again, records[0])


def test_foreign_files_are_left_alone() -> None:
    disk = SimDisk()
    open_store(disk).close()
    foreign = {"notes.txt": b"mine", "growing.tmp": b"half", "rows-00000007.pack": b"not a pack", "rows-x.pack": b""}
    for name, data in foreign.items():
        append_all(disk.open_append(f"{PATH}/{name}"), data)
    store = open_store(disk, quota=700_000)
    for seed in range(6):
        store.put(records_of(talk(seed, 512), width=16))
    while store.sweep_step(dead=0.01).more:
        pass
    assert {n: bytes(disk.medium.names[f"{PATH}/{n}"].live) for n in foreign} == foreign


def test_another_models_rows_are_left_alone() -> None:
    disk = SimDisk()
    first = open_store(disk)
    records = records_of(talk(1, 512))
    first.put(records)
    first.close()
    second = open_store(disk, fingerprint=fingerprint({"weights": "second"}))
    second.put(records_of(talk(1, 512), print_=second.fingerprint))
    second.close()
    assert all(same(open_store(disk), r) for r in records)


def test_a_path_that_is_a_file_is_a_clear_error() -> None:
    disk = SimDisk()
    append_all(disk.open_append(PATH), b"a file")
    with pytest.raises(StoreUnusable, match=r"cannot use /store: .*[Nn]ot a directory"):
        open_store(disk)


def test_a_read_only_disk_is_a_clear_error() -> None:
    disk = SimDisk()
    disk.faults.readonly = True
    with pytest.raises(StoreUnusable, match="cannot use /store"):
        open_store(disk)


def test_a_directory_removed_while_running_is_made_anew_and_saving_goes_on() -> None:
    disk = SimDisk()
    store = open_store(disk)
    first, second = records_of(talk(1, 256)), records_of(talk(2, 256))
    store.put(first)
    for name in disk.listdir(PATH):
        disk.unlink(f"{PATH}/{name}")
    assert store.read(first[0].key) is None
    assert store.put([*first, *second]) == (first[0].key, second[0].key)
    assert same(store, first[0])
    store.close()
    assert same(open_store(disk), second[0])


def test_a_pack_removed_under_the_writer_is_noticed_before_anything_is_acknowledged() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.put(records_of(talk(1, 256)))
    disk.unlink(f"{PATH}/rows-00000001.pack")
    records = records_of(talk(2, 256))
    with pytest.raises(OSError, match="No such file"):
        store.put(records)
    assert store.put(records) == (records[0].key,)
    assert same(store, records[0])


def test_files_are_private_on_a_real_disk(tmp_path: Path) -> None:
    path = tmp_path / "made" / "store"
    store = open_store(RealDisk(), str(path))
    records = records_of(talk(1, 700), anchor=True)
    store.put(records)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {f.stat().st_mode & 0o777 for f in path.iterdir()} == {0o600}
    assert all(same(store, r) for r in records)
    store.close()
    assert sorted(os.listdir(path)) == ["lock", "manifest", "rows-00000001.pack"]


def test_verify_reads_everything_and_reports() -> None:
    disk = SimDisk()
    store = open_store(disk)
    records = records_of(talk(1, 1024))
    store.put(records)
    disk.corrupt(f"{PATH}/rows-00000001.pack", pack_bytes_of(disk).find(records[3].key) + 500, b"????")
    seen: list[tuple[int, int]] = []
    result = store.verify(lambda done, total: seen.append((done, total)))
    assert (result.good, result.bad, result.skipped, result.unread) == (3, 1, 0, 0)
    assert seen[-1] == (result.size, result.size)
    assert store.have(block_keys(talk(1, 1024), PRINT, b"")) == 3
