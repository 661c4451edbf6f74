"""Saves and restores: windows under a permit, a failing disk, cancel, and what is said about it."""

import logging

import pytest
import trio
import trio.testing
from onecopy.actors.messages.stager import CancelSave, Flush, Restore, Save, SaveReport, StagerStatistics
from onecopy.actors.messages.store import StoreStatistics
from onecopy.actors.stager import Item, windows
from onecopy.runtime.store import block_keys
from onecopy.runtime.store.permit import charge, cold_charge, permit

from tests.sim.disk import SimDisk
from tests.support.rows import PATH, PRINT, records_of, talk
from tests.support.staging import RowLayout, Segments, Unpriced, bench


async def test_a_save_writes_blocks_and_anchor_and_a_restore_brings_them_back(autojump_clock: object) -> None:
    tokens = talk(1, 1100)
    async with bench(SimDisk()) as b:
        report = await b.save(tokens)
        assert (report.rows, report.complete, report.blocks, report.windows) == (1100, True, 4, 1)
        assert report.written == report.state > 1100 * 64
        found = await b.found(tokens)
        target = Segments()
        back = await b.stager.ask(Restore("c1", 7, 0, found.keys, target, found.anchors[0]))
        assert (back.rows, back.anchor, back.blocks) == (1100, True, 4)
        assert target.holds(tokens) == 4
        assert target.anchor is not None
        assert target.anchor[0] == 1100


async def test_a_turn_writes_only_its_new_rows(autojump_clock: object) -> None:
    tokens = talk(1, 1536)
    async with bench(SimDisk()) as b:
        first = await b.save(tokens[:1024], anchor=False)
        second = await b.save(tokens, anchor=False, known=first.keys)
        assert (second.blocks, second.rows) == (2, 1536)
        assert second.written * 2 == first.written
        assert second.state == first.written + second.written
        assert b.segments.reads == [0, 1, 2, 3, 4, 5]


async def test_saving_the_same_again_writes_nothing(autojump_clock: object) -> None:
    tokens = talk(1, 700)
    async with bench(SimDisk()) as b:
        first = await b.save(tokens)
        again = await b.save(tokens)
        assert (again.complete, again.written, again.windows) == (True, 0, 0)
        assert again.state == first.state


async def test_total_bytes_written_over_many_turns_are_those_of_the_final_state(autojump_clock: object) -> None:
    tokens = talk(1, 30 * 256)
    async with bench(SimDisk()) as b:
        for turn in range(1, 31):
            report = await b.save(tokens[: 256 * turn], anchor=False)
        assert (await b.store.ask(StoreStatistics()))["written_bytes"] == report.state


async def test_a_fork_shares_its_parents_blocks(autojump_clock: object) -> None:
    tokens = talk(1, 1024)
    async with bench(SimDisk()) as b:
        await b.save(tokens, "parent", anchor=False)
        child = await b.save([*tokens[:512], *talk(2, 512)], "child", anchor=False)
        assert (child.blocks, child.rows) == (2, 1024)


# -- the permit ---------------------------------------------------------------------------------------------------


async def test_a_permit_for_the_longest_state_stages_a_cold_save_whole(autojump_clock: object) -> None:
    layout = RowLayout()
    size = cold_charge(4000, layout)
    assert size is not None
    async with bench(SimDisk(), layout=layout, permit=size) as b:
        report = await b.save(talk(1, 4000))
        assert (report.complete, report.windows) == (True, 1)


async def test_a_small_permit_still_writes_everything_in_windows(autojump_clock: object) -> None:
    tokens = talk(1, 4000)
    async with bench(SimDisk(), permit=4096) as b:
        report = await b.save(tokens)
        assert (report.complete, report.rows, report.windows) == (True, 4000, 16)
        assert len((await b.found(tokens)).keys) == 15


async def test_an_unpriceable_layout_saves_record_by_record(autojump_clock: object) -> None:
    async with bench(SimDisk(), layout=Unpriced(), permit=permit(4000, Unpriced(), 1 << 40)) as b:
        report = await b.save(talk(1, 1000))
        assert (report.complete, report.windows) == (True, 4)


@pytest.mark.parametrize("size", [1, 70_000, 100_000, 10**9])
def test_no_window_exceeds_the_permit_unless_one_record_does(size: int) -> None:
    items = [Item(i, charge(0, 256, RowLayout(), anchor=False)) for i in range(20)]
    split = list(windows(items, size))
    assert [item for window in split for item in window] == items
    assert all(len(w) == 1 or sum(i.charge or 0 for i in w) <= size for w in split)


async def test_bytes_in_flight_never_exceed_the_permit_and_every_save_finishes(autojump_clock: object) -> None:
    seen = []

    async def watch() -> None:
        seen.append((await b.stager.ask(StagerStatistics()))["staged_bytes"])

    size = 3 * (charge(0, 256, RowLayout(), anchor=False) or 0)
    reports: list[SaveReport] = []
    async with bench(SimDisk(rate=1e6), permit=size, pause=watch) as b, trio.open_nursery() as nursery:
        for seed in range(6):
            nursery.start_soon(_save_into, reports, b, seed)
    assert all(r.complete for r in reports)
    assert len(reports) == 6
    assert 0 < max(seen) <= size


async def _save_into(reports: list[SaveReport], b, seed: int) -> None:  # type: ignore[no-untyped-def]
    reports.append(await b.save(talk(seed, 2000), f"c{seed}"))


def test_what_a_save_really_writes_stays_below_its_charge() -> None:
    layout = RowLayout()
    for n in (0, 1, 255, 256, 1000, 4096):
        records = records_of(talk(1, n), anchor=True)
        cold = cold_charge(n, layout)
        assert cold is not None
        assert sum(sum(t.nbytes for t in r.tensors.values()) + 4 * len(r.tokens) for r in records) <= cold


# -- going first, leaving early -----------------------------------------------------------------------------------


async def test_the_stager_pauses_before_every_record(autojump_clock: object) -> None:
    paused = 0

    async def pause() -> None:
        nonlocal paused
        paused += 1
        await trio.sleep(1)

    async with bench(SimDisk(), pause=pause) as b:
        report = await b.save(talk(1, 1000))
    assert paused == 4
    assert report.seconds == pytest.approx(4)


async def test_a_cancelled_save_says_what_is_on_disk(autojump_clock: object) -> None:
    tokens = talk(1, 2560)
    async with bench(SimDisk(), permit=1, pause=lambda: trio.sleep(1)) as b, trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_after, b, 4.5)
        report = await b.save(tokens)
        assert (report.complete, report.error, report.rows) == (False, "cancelled", 4 * 256)
        assert len((await b.found(tokens)).keys) == 4


async def _cancel_after(b, seconds: float) -> None:  # type: ignore[no-untyped-def]
    await trio.sleep(seconds)
    b.stager.tell(CancelSave("c1"))


async def test_a_later_save_replaces_the_one_that_waits(autojump_clock: object) -> None:
    tokens = talk(1, 1024)
    reports: dict[int, SaveReport] = {}

    async def save(blocks: int) -> None:
        reports[blocks] = await b.save(tokens[: 256 * blocks], anchor=False)

    async with bench(SimDisk(), pause=lambda: trio.sleep(1)) as b, trio.open_nursery() as nursery:
        for blocks in (1, 2, 4):
            nursery.start_soon(save, blocks)
            await trio.testing.wait_all_tasks_blocked()
    assert reports[1].complete
    assert not reports[2].complete
    assert "later" in (reports[2].error or "")
    assert (reports[4].complete, reports[4].rows) == (True, 1024)


async def test_a_segment_that_goes_away_ends_the_save_and_nothing_else(autojump_clock: object) -> None:
    async with bench(SimDisk()) as b:
        b.segments.gone.add(0)
        gone = await b.save(talk(1, 512))
        assert not gone.complete
        assert "gone" in (gone.error or "")
        assert (await b.save(talk(2, 512))).complete


async def test_a_save_whose_asker_left_reads_no_further(autojump_clock: object) -> None:
    async with bench(SimDisk(), permit=1, pause=lambda: trio.sleep(1)) as b:
        with trio.move_on_after(2.5):
            await b.save(talk(1, 2560))
        await trio.sleep(10)
        assert len(b.segments.reads) == 2


# -- a disk that fails --------------------------------------------------------------------------------------------


async def test_a_failing_disk_is_tried_again_until_it_works(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimDisk()
    tokens = talk(1, 512)
    async with bench(disk) as b, trio.open_nursery() as nursery:
        disk.faults.enospc = 1.0
        nursery.start_soon(_heal_after, disk, 5)
        report = await b.save(tokens)
        assert report.complete
        assert report.seconds > 5
        state = await b.stager.ask(StagerStatistics())
        assert state["failures"] >= 3
        assert state["persisting"]
        assert sum(r.levelno == logging.WARNING for r in caplog.records) == 1


async def _heal_after(disk: SimDisk, seconds: float) -> None:
    await trio.sleep(seconds)
    disk.faults.enospc = disk.faults.eio = 0.0


async def test_what_cannot_be_written_stays_dirty_is_reported_and_written_with_the_next_save(
    autojump_clock: object,
) -> None:
    disk = SimDisk()
    tokens = talk(1, 700)
    async with bench(disk) as b:
        disk.faults.enospc = 1.0
        report = await b.save(tokens)
        assert not report.complete
        assert "No space" in (report.error or "")
        state = await b.stager.ask(StagerStatistics())
        assert (state["persisting"], list(state["dirty"])) == (False, ["c1"])
        assert "No space" in state["why_not"]
        assert not (await b.store.ask(StoreStatistics()))["persisting"]
        disk.faults.enospc = 0.0
        assert (await b.save(tokens)).complete
        assert (await b.stager.ask(StagerStatistics()))["persisting"]
        assert (await b.store.ask(StoreStatistics()))["persisting"]


async def test_a_quota_that_is_too_small_keeps_the_prefix_that_fits_and_is_not_tried_again(
    autojump_clock: object,
) -> None:
    tokens = talk(1, 256 * 20)
    async with bench(SimDisk(), quota=300_000) as b:
        report = await b.save(tokens)
        assert not report.complete
        assert report.rows >= 256 * 10
        assert report.seconds < 1
        assert len((await b.found(tokens)).keys) * 256 == report.rows
        assert (await b.save(talk(2, 512), "c2")).complete


async def test_a_failed_save_lets_other_saves_pass(autojump_clock: object) -> None:
    disk = SimDisk()
    reports: list[SaveReport] = []
    async with bench(disk, permit=1) as b, trio.open_nursery() as nursery:
        disk.faults.enospc = 1.0
        nursery.start_soon(_save_into, reports, b, 1)
        await trio.sleep(1.5)
        disk.faults.enospc = 0.0
        report = await b.save(talk(2, 512), "c2")
        assert report.complete
        assert report.seconds == 0
        assert not reports


async def test_a_second_process_serves_what_is_there_and_does_not_save(autojump_clock: object) -> None:
    disk = SimDisk()
    tokens = talk(1, 512)
    async with bench(disk) as b:
        await b.save(tokens)
        async with bench(disk.beside(2)) as second:
            report = await second.save([*tokens, *talk(2, 256)])
            assert not report.complete
            assert "reading only" in (report.error or "")
            found = await second.found(tokens)
            target = Segments()
            assert (await second.stager.ask(Restore("c1", 0, 0, found.keys, target))).rows == 512
            assert target.holds(tokens) == 2


# -- restores -----------------------------------------------------------------------------------------------------


async def test_a_damaged_block_ends_the_restore_before_it_and_the_next_save_replaces_it(
    autojump_clock: object,
) -> None:
    disk = SimDisk()
    tokens = talk(1, 1024)
    async with bench(disk) as b:
        await b.save(tokens, anchor=False)
        found = await b.found(tokens)
        raw = bytes(disk.medium.names[f"{PATH}/rows-00000001.pack"].live)
        disk.corrupt(f"{PATH}/rows-00000001.pack", raw.find(found.keys[2]) + 900, b"rot")
        target = Segments()
        report = await b.stager.ask(Restore("c1", 0, 0, found.keys, target))
        assert (report.rows, target.holds(tokens)) == (512, 2)
        assert len((await b.found(tokens)).keys) == 2
        assert (await b.save(tokens, anchor=False)).blocks == 1
        assert len((await b.found(tokens)).keys) == 4


async def test_a_restore_extends_what_memory_has(autojump_clock: object) -> None:
    tokens = talk(1, 1024)
    async with bench(SimDisk()) as b:
        await b.save(tokens, anchor=False)
        keys = tuple(block_keys(tokens, PRINT, b""))
        target = Segments()
        report = await b.stager.ask(Restore("c1", 0, 1, keys[1:3], target))
        assert (report.rows, report.blocks, sorted(target.written)) == (768, 2, [1, 2])
        target.holds(tokens)


async def test_a_slow_save_does_not_hold_up_a_restore(autojump_clock: object) -> None:
    disk = SimDisk()
    tokens = talk(1, 1024)
    async with bench(disk, permit=1) as b, trio.open_nursery() as nursery:
        await b.save(tokens, anchor=False)
        found = await b.found(tokens)
        disk.rate = 1e6
        nursery.start_soon(_save_into, [], b, 2)
        await trio.testing.wait_all_tasks_blocked()
        report = await b.stager.ask(Restore("c1", 0, 0, found.keys, Segments()))
        assert report.rows == 1024
        assert report.seconds < 0.1


# -- shutdown -----------------------------------------------------------------------------------------------------


async def test_flush_waits_for_saves_and_names_what_did_not_make_it(autojump_clock: object) -> None:
    async with bench(SimDisk(), pause=lambda: trio.sleep(1)) as b, trio.open_nursery() as nursery:
        b.segments.tokens = {0: talk(1, 512), 1: talk(2, 25_600)}
        for owner, segment in (("short", 0), ("long", 1)):
            save = Save(owner, tuple(b.segments.tokens[segment]), segment, b.segments)
            nursery.start_soon(b.stager.ask, save)
        await trio.testing.wait_all_tasks_blocked()
        assert await b.stager.ask(Flush(10)) == ("long",)
        assert await b.stager.ask(Flush(1000)) == ()


async def test_log_lines_say_tokens_blocks_bytes_and_time(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onecopy.store")
    tokens = talk(1, 512)
    async with bench(SimDisk()) as b:
        report = await b.save(tokens, anchor=False)
        found = await b.found(tokens)
        await b.stager.ask(Restore("c1", 0, 0, found.keys, Segments()))
    lines = [r.getMessage() for r in caplog.records]
    assert f"saved c1: 512 tokens on disk, 2 new blocks, {report.written} bytes written" in lines[0]
    assert lines[1].startswith("restored c1: 512 tokens from disk, 2 blocks, ")
