"""Room on disk: the quota, the floor, what goes first, and the sweep."""

from dataclasses import replace

import pytest
from onecopy.runtime.store import StoreFull, fingerprint

from tests.sim.disk import SimDisk
from tests.support.rows import DAY, open_store, records_of, same, talk


def test_the_quota_holds_over_models_and_restarts_and_the_coldest_chain_goes_first() -> None:
    disk, now = SimDisk(), [DAY]
    chains = {seed: records_of(talk(seed, 1024), width=16) for seed in range(12)}
    quota = 1_200_000
    for seed, records in chains.items():
        now[0] += 100
        print_ = fingerprint({"weights": str(seed % 2)})
        store = open_store(disk, wall=lambda: now[0], quota=quota, fingerprint=print_)
        store.put(records)
        assert store.statistics()["disk_bytes"] <= quota
        store.close()
    kept = [open_store(disk, read_only=True).have(r.key for r in records) for records in chains.values()]
    assert kept[-1] == 4
    assert kept[0] == 0
    assert kept == sorted(kept)


def test_a_chain_is_evicted_from_its_tail() -> None:
    disk, now = SimDisk(), [DAY]
    store = open_store(disk, wall=lambda: now[0], quota=700_000)
    old = records_of(talk(1, 1536), width=16)
    store.put(old)
    now[0] += 100
    store.put(records_of(talk(2, 1024), width=16))
    present = [store.locate(r.key) is not None for r in old]
    assert 0 < sum(present) < 6
    assert present == sorted(present, reverse=True)


def test_using_a_chain_saves_it() -> None:
    disk, now = SimDisk(), [DAY]
    store = open_store(disk, wall=lambda: now[0], quota=700_000)
    first, second = (records_of(talk(seed, 512), width=16) for seed in (1, 2))
    store.put(first)
    now[0] += 100
    store.put(second)
    now[0] += 100
    store.note_use([r.key for r in first])
    store.put(records_of(talk(3, 1536), width=16))
    assert store.have(r.key for r in first) == 2
    assert store.have(r.key for r in second) < 2


def test_what_was_used_long_ago_makes_no_room_by_taking_what_was_used_since() -> None:
    now = [DAY]
    store = open_store(SimDisk(), wall=lambda: now[0], quota=700_000)
    young = records_of(talk(1, 1536), width=16)
    store.put(young)
    now[0] += 100
    old = [replace(r, used=int(DAY) - 100) for r in records_of(talk(2, 1024), width=16)]
    with pytest.raises(StoreFull) as full:
        store.put(old)
    assert full.value.lasting
    assert store.have(r.key for r in young) == 6
    store.put([replace(r, used=None) for r in old])
    assert store.have(r.key for r in old) == 4


def test_pinned_chains_stay_while_room_is_made() -> None:
    disk, now = SimDisk(), [DAY]
    store = open_store(disk, wall=lambda: now[0], quota=700_000)
    old = records_of(talk(1, 512), width=16)
    store.put(old)
    store.pin([old[-1].key])
    for seed in range(2, 8):
        now[0] += 100
        store.put(records_of(talk(seed, 512), width=16))
    assert store.have(r.key for r in old) == 2
    store.unpin([old[-1].key])
    store.put(records_of(talk(9, 1024), width=16))
    assert store.have(r.key for r in old) < 2


def test_a_conversation_larger_than_the_quota_keeps_the_prefix_that_fits() -> None:
    store = open_store(SimDisk(), quota=700_000)
    records = records_of(talk(1, 256 * 12), width=16)
    with pytest.raises(StoreFull, match="quota"):
        store.put(records)
    kept = store.have(r.key for r in records)
    assert kept >= 6
    assert store.statistics()["blocks"] == kept


def test_the_free_disk_floor_stops_writing_and_evicts_nothing() -> None:
    disk = SimDisk(capacity=1_000_000)
    store = open_store(disk, floor=400_000)
    first = records_of(talk(1, 1024), width=16)
    store.put(first)
    with pytest.raises(StoreFull, match="400000"):
        store.put(records_of(talk(2, 1536), width=16))
    assert store.have(r.key for r in first) == 4
    assert disk.free_bytes("/") >= 400_000


def test_the_sweep_frees_dead_bytes_in_small_steps_and_keeps_the_living() -> None:
    disk = SimDisk()
    store = open_store(disk, quota=2_000_000)
    chains = [records_of(talk(seed, 512), width=16) for seed in range(8)]
    for records in chains:
        store.put(records)
    for records in chains[:6]:
        store.drop(r.key for r in records)
    before = store.statistics()["disk_bytes"]
    steps = []
    while (step := store.sweep_step(most=1, dead=0.1)).more:
        steps.append(step)
        assert step.moved < 100_000
    assert len(steps) > 3
    assert store.statistics()["disk_bytes"] < before / 2
    assert all(same(store, r) for records in chains[6:] for r in records)
    store.close()
    again = open_store(disk)
    assert all(same(again, r) for records in chains[6:] for r in records)
