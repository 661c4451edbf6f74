"""Power cuts, failing disks and kills at every step, by seed; and proof that this harness sees planted faults."""

import random

import pytest
from onecopy.runtime.store import StoreFull
from onecopy.runtime.store.journal import Journal
from onecopy.runtime.store.packs import Packs
from onecopy.runtime.store.shelf import Shelf

from tests.sim.disk import PowerCut, SimDisk, SimFile
from tests.support.rows import PATH, open_store, records_of, same, talk
from tests.support.store_runs import StoreRun, Violation


@pytest.mark.parametrize("seed", range(60))
def test_acknowledged_records_survive_power_cuts(seed: int) -> None:
    StoreRun(seed).run()


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_acknowledged_records_survive_power_cuts_on_a_failing_disk(seed: int) -> None:
    StoreRun(seed, faulty=True).run()


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_the_quota_and_the_index_hold_through_cuts_and_evictions(seed: int) -> None:
    StoreRun(seed, quota=300_000, faulty=seed % 2 == 0).run()


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("seed", range(3000, 3030))
def test_imported_conversations_survive_power_cuts(seed: int, faulty: bool) -> None:
    StoreRun(seed, imports=True, faulty=faulty).run()


@pytest.mark.parametrize(
    ("seed", "quota", "faulty"),
    [(7821, None, True), (9033, None, True), (6687, 280_000, True), (7023, 280_000, True), (6523, 300_000, False)],
)
def test_seeds_that_found_something_stay_good(seed: int, quota: int | None, faulty: bool) -> None:
    StoreRun(seed, quota=quota, faulty=faulty).run(30)


def test_a_cut_at_every_single_call_of_a_put_leaves_a_loadable_store() -> None:
    first, second = records_of(talk(1, 700), anchor=True, width=1), records_of(talk(2, 700), anchor=True, width=1)
    calls, acknowledged = 0, False
    while not acknowledged:
        disk = SimDisk()
        store = open_store(disk)
        store.put(first)
        disk.faults.cut_after = disk.medium.calls + calls
        try:
            acknowledged = len(store.put(second)) == 3
        except PowerCut:
            disk.cut(random.Random(calls))
            store = open_store(disk)
        disk.faults.cut_after = None
        assert all(same(store, r) for r in first)
        assert store.verify().bad == 0
        calls += 1
    assert calls > 10


def test_a_full_disk_leaves_no_half_record_and_saving_resumes_once_there_is_room() -> None:
    disk = SimDisk(capacity=150_000)
    store = open_store(disk)
    kept, more = records_of(talk(1, 1024)), records_of(talk(2, 8192))
    store.put(kept)
    for _ in range(3):
        with pytest.raises(OSError, match=r"stay free|No space"):
            store.put(more)
    assert all(same(store, r) for r in kept)
    assert store.verify().bad == 0
    disk.medium.capacity = 10_000_000
    store.put(more)
    assert all(same(store, r) for r in [*kept, *more])
    assert store.statistics()["write_failures"] >= 3


def test_a_write_that_runs_out_of_space_midway_is_cut_back() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.put(records_of(talk(1, 256)))
    before = disk.stat(f"{PATH}/rows-00000001.pack").size
    disk.faults.enospc, disk.faults.short = 1.0, 1.0
    with pytest.raises(OSError, match="No space"):
        store.put(records_of(talk(2, 256)))
    assert disk.stat(f"{PATH}/rows-00000001.pack").size == before
    disk.faults.enospc = 0.0
    assert len(store.put(records_of(talk(2, 256)))) == 1


def test_what_fitted_before_the_disk_filled_is_kept() -> None:
    disk = SimDisk(capacity=60_000)
    store = open_store(disk, floor=20_000)
    records = records_of(talk(1, 2048))
    with pytest.raises(StoreFull):
        store.put(records)
    assert store.have(r.key for r in records) >= 2
    store.close()
    assert open_store(disk).have(r.key for r in records) >= 2


def test_after_a_failed_sync_the_same_file_is_never_trusted_again() -> None:
    disk = SimDisk()
    store = open_store(disk)
    records = records_of(talk(1, 512))
    store.put(records[:1])
    disk.faults.eio = 1.0
    with pytest.raises(OSError, match="Input/output"):
        store.put(records[1:])
    disk.faults.eio = 0.0
    assert store.put(records[1:]) == (records[1].key,)
    disk.cut(random.Random(1))
    assert all(same(open_store(disk), r) for r in records)


# -- planted faults -----------------------------------------------------------------------------------------------


class UnsyncedFile(SimFile):
    def sync(self) -> None:
        self._step()


class UnsyncedDisk(SimDisk):
    def open_append(self, path):  # type: ignore[no-untyped-def]
        return UnsyncedFile(self, super().open_append(path).node)


class NamelessDisk(SimDisk):
    def sync_dir(self, path) -> None:  # type: ignore[no-untyped-def]
        self.step()


def caught(seeds: range, **how: object) -> bool:
    for seed in seeds:
        try:
            StoreRun(seed, **how).run()  # type: ignore[arg-type]
        except Violation:
            return True
    return False


@pytest.mark.parametrize("disk", [UnsyncedDisk, NamelessDisk])
def test_a_store_that_does_not_sync_is_caught(disk: type[SimDisk]) -> None:
    assert caught(range(60), make=disk)


def test_acknowledging_before_the_data_is_durable_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packs, "sync", lambda self: None)
    assert caught(range(60))


def test_acknowledging_before_the_manifest_is_durable_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Shelf.commit

    def early(self: Shelf) -> tuple[bytes, ...]:
        try:
            return whole(self)
        except OSError:
            return tuple(add.key for add in self._pending)

    def unsynced(self: Journal, file: SimFile, ops: object) -> None:
        sync, SimFile.sync = SimFile.sync, SimFile._step  # type: ignore[method-assign]
        try:
            append(self, file, ops)  # type: ignore[arg-type]
        finally:
            SimFile.sync = sync  # type: ignore[method-assign]

    append = Journal._append
    monkeypatch.setattr(Journal, "_append", unsynced)
    assert caught(range(60))
    monkeypatch.setattr(Shelf, "commit", early)
    assert caught(range(60), faulty=True)


def test_forgetting_to_check_the_payload_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack cut back wrongly after a failed append shows as entries without their data."""
    monkeypatch.setattr(Packs, "_cut", lambda self, file, size: None)
    assert caught(range(1000, 1060), faulty=True)
