"""The actor around the engine: one writer, group commit, honest state, restart from disk."""

import pytest
import trio
from onecopy.actors.messages.store import (
    Condemn,
    DropConversation,
    ListConversations,
    Lookup,
    Plan,
    Put,
    Read,
    StoreStatistics,
)
from onecopy.actors.rows_store import HOUSEKEEPING, REOPEN, RowsStore, rows_store_factory
from onecopy.runtime.errors import NotPersisting, StoreUnusable
from onecopy.runtime.seams import VirtualClock
from onecopy.runtime.store import Place, Stored
from onecopy.runtime.store.index import Entry
from onecopy.runtime.store.reader import Reader

from tests.sim.disk import SimDisk
from tests.support.rows import PATH, open_store, records_of, talk
from tests.support.staging import bench


async def test_puts_that_wait_together_share_one_commit(autojump_clock: object) -> None:
    disk = SimDisk()
    async with bench(disk) as b:
        before = disk.stat(f"{PATH}/manifest").size
        sizes: list[int] = []

        async def put(seed: int) -> None:
            sizes.append(await b.store.ask(Put(tuple(records_of(talk(seed, 256))))))

        calls = disk.medium.calls
        await put(0)
        alone = disk.medium.calls - calls
        calls = disk.medium.calls
        async with trio.open_nursery() as nursery:
            for seed in range(1, 9):
                nursery.start_soon(put, seed)
        assert disk.medium.calls - calls < 8 * alone * 0.7
        assert len(sizes) == 9
        assert min(sizes) > 0
        assert disk.stat(f"{PATH}/manifest").size > before


async def test_what_was_accepted_before_a_stop_is_written(autojump_clock: object) -> None:
    disk = SimDisk(rate=1e5)
    records = records_of(talk(1, 512))
    with trio.move_on_after(0.01):
        async with bench(disk) as b:
            await b.store.ask(Put(tuple(records)))
    disk.rate = None
    store = open_store(disk)
    assert store.have(r.key for r in records) == 2


async def test_a_restart_starts_from_the_disk(autojump_clock: object) -> None:
    disk = SimDisk()
    tokens = talk(1, 512)
    async with bench(disk) as b:
        await b.save(tokens)
    async with bench(disk) as b:
        assert len((await b.found(tokens)).keys) == 2


async def test_condemned_records_are_not_found_again_and_can_be_replaced(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = talk(1, 1024)
    async with bench(SimDisk()) as b:
        await b.save(tokens, anchor=False)
        found = await b.found(tokens)
        b.store.tell(Condemn(found.keys[1:], "the first forward on them failed"))
        await b.store.ask(ListConversations())
        assert len((await b.found(tokens)).keys) == 1
        assert "first forward" in caplog.text
        assert (await b.save(tokens, anchor=False)).blocks == 3


async def test_a_plan_with_known_keys_is_the_plan_without(autojump_clock: object) -> None:
    tokens = tuple(talk(1, 1000))
    async with bench(SimDisk()) as b:
        cold = await b.store.ask(Plan(tokens, b"s", anchor=True))
        assert (cold.missing, cold.present) == ((0, 1, 2), 0)
        assert await b.store.ask(Plan(tokens, b"s", anchor=True, known=cold.keys[:2])) == cold
        assert (await b.store.ask(Plan(tokens, b"s", anchor=False))).anchor is None


async def test_found_rows_are_pinned_while_they_are_awaited(autojump_clock: object) -> None:
    tokens = talk(1, 512)
    async with bench(SimDisk(), quota=300_000) as b:
        await b.save(tokens, anchor=False)
        await b.store.ask(Lookup(tuple(tokens), pin=30))
        await b.save(talk(2, 256 * 14), anchor=False)
        assert len((await b.found(tokens)).keys) == 2
        await trio.sleep(30 + 2 * HOUSEKEEPING)
        await b.save(talk(3, 256 * 14), anchor=False)
        assert len((await b.found(tokens)).keys) == 0


async def test_records_are_read_by_one_reader_in_the_order_they_were_asked_for(autojump_clock: object) -> None:
    disk, asked, took = SimDisk(), list[bytes](), dict[bytes, float]()
    async with bench(disk) as b:
        await b.save(talk(1, 1024), anchor=False)
        keys = (await b.found(talk(1, 1024))).keys
        disk.rate, begun = 1000, trio.current_time()

        async def read(key: bytes) -> None:
            asked.append(key)  # all within one step of the loop
            assert len(await b.store.ask(Read((key,), (None,)))) == 1
            took[key] = trio.current_time() - begun

        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(read, key)
        disk.rate = None
    assert list(took) == asked
    assert took[asked[3]] == pytest.approx(4 * took[asked[0]], rel=0.05)


async def test_a_read_ends_before_the_record_that_nobody_wants_any_more(autojump_clock: object) -> None:
    async with bench(SimDisk()) as b:
        await b.save(talk(1, 1024), anchor=False)
        keys, answers = (await b.found(talk(1, 1024))).keys, iter([True, True, False])
        assert len(await b.store.ask(Read(keys, (None,) * 4, lambda: next(answers)))) == 2
        assert len(await b.store.ask(Read(keys, (None,) * 4))) == 4


async def test_a_read_whose_asker_left_before_its_turn_reads_nothing(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, loaded, load = SimDisk(), list[bytes](), Reader.load

    def noting(reader: Reader, entry: Entry, place: Place | None = None) -> Stored:
        loaded.append(entry.key)
        return load(reader, entry, place)

    async with bench(disk) as b:
        await b.save(talk(1, 1024), anchor=False)
        keys = (await b.found(talk(1, 1024))).keys
        monkeypatch.setattr(Reader, "load", noting)
        disk.rate = 1000
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.store.ask, Read(keys[:1], (None,)))
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(1) as scope:
                await b.store.ask(Read(keys[1:], (None,) * 3))
            assert scope.cancelled_caught
        disk.rate = None
        assert len(await b.store.ask(Read(keys[3:], (None,)))) == 1
    assert loaded == [keys[0], keys[3]]


async def test_conversations_are_listed_and_dropped(autojump_clock: object) -> None:
    async with bench(SimDisk()) as b:
        await b.save(talk(1, 600), "a")
        await b.save(talk(2, 900), "b")
        listed = await b.store.ask(ListConversations())
        assert sorted(c.tokens for c in listed) == [600, 900]
        assert await b.store.ask(DropConversation(listed[0].tip)) == listed[0].records
        assert len(await b.store.ask(ListConversations())) == 1


async def test_dead_bytes_are_swept_when_there_is_time(autojump_clock: object) -> None:
    async with bench(SimDisk(), quota=1_000_000) as b:
        for seed in range(8):
            await b.save(talk(seed, 1024), str(seed))
        before = (await b.store.ask(StoreStatistics()))["disk_bytes"]
        for c in (await b.store.ask(ListConversations()))[:6]:
            await b.store.ask(DropConversation(c.tip))
        await trio.sleep(3 * HOUSEKEEPING)
        assert (await b.store.ask(StoreStatistics()))["disk_bytes"] < before / 2


async def test_an_unusable_directory_is_an_error_at_the_first_start_only() -> None:
    disk = SimDisk()
    disk.faults.readonly = True
    make = rows_store_factory(lambda: open_store(disk), disk, VirtualClock())
    with pytest.raises(StoreUnusable, match="cannot use"):
        await make().start()
    again = make()
    await again.start()
    assert (again.statistics()["persisting"], "cannot use" in again.statistics()["why_not"]) == (False, True)


async def test_without_a_directory_answers_go_on_and_it_is_tried_again(autojump_clock: object) -> None:
    disk = SimDisk()
    disk.faults.readonly = True
    tokens = talk(1, 512)
    async with bench(disk, strict=False) as b:
        assert await b.found(tokens) == await b.store.ask(Lookup(()))
        assert await b.store.ask(Read((bytes(32),), (None,))) == ()
        with pytest.raises(NotPersisting):
            await b.store.ask(Put(tuple(records_of(tokens))))
        disk.faults.readonly = False
        await trio.sleep(2 * REOPEN)
        assert (await b.save(tokens)).complete
        assert (await b.store.ask(StoreStatistics()))["persisting"]


async def test_a_put_that_lost_its_bytes_to_anothers_failure_is_not_acknowledged(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk()
    first, second = records_of(talk(1, 256)), records_of(talk(2, 256))
    async with bench(disk) as b:
        store = b.supervisor.actor("rows store")
        assert isinstance(store, RowsStore)
        engine = store._engine
        assert engine is not None
        append = engine.append

        def fails(record):  # type: ignore[no-untyped-def]
            if record.key != second[0].key:
                return append(record)
            engine._shelf.packs.close()
            engine._shelf._pending.clear()
            raise OSError("disk error")

        monkeypatch.setattr(engine, "append", fails)
        answers: dict[int, bool] = {}

        async def put(n: int, records) -> None:  # type: ignore[no-untyped-def]
            try:
                answers[n] = await b.store.ask(Put(tuple(records))) > 0
            except NotPersisting:
                answers[n] = False

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, 1, first)
            nursery.start_soon(put, 2, second)
        assert answers[1] == (engine.locate(first[0].key) is not None)
        assert answers[2] is False
