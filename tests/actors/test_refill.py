"""One restore: a run is on its way while the one before it is taken, and no read outlives the restore."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from onecopy.actors.messages.stager import Restore, RestoreReport
from onecopy.actors.messages.store import Read
from onecopy.actors.refill import AHEAD, RUN, Refill
from onecopy.actors.rows_door import Filling
from onecopy.runtime.errors import Unavailable
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ops import Allocate
from onecopy.runtime.seams.device import InlineDevice
from onecopy.runtime.store import Kind, Place, Stored, Tensors

from tests.sim.disk import SimDisk

KEYS = tuple(bytes([n]) * 32 for n in range(4 * RUN + 1))


@dataclass
class Store:
    """Answers `Read`. seconds: that the read of a run takes, by its first record. have: records of a run it can read.
    fails: runs whose read is an error. under_way, most: reads now, and at a time."""

    seconds: dict[int, float] = field(default_factory=dict)
    have: dict[int, int] = field(default_factory=dict)
    fails: set[int] = field(default_factory=set)
    under_way: int = 0
    most: int = 0
    read: list[int] = field(default_factory=list)

    async def ask(self, ask: Read) -> tuple[Stored, ...]:
        first = KEYS.index(ask.keys[0])
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await trio.sleep(self.seconds.get(first, 1))
        finally:
            self.under_way -= 1
        if first in self.fails:
            raise Unavailable("the store is away")
        self.read.append(first)
        return tuple(_stored(key) for key in ask.keys)[: self.have.get(first, RUN)]


def _stored(key: bytes) -> Stored:
    n = key[0]
    return Stored(Kind.BLOCK, key, b"", n * 256, (), {"0.k": np.full(1, n)}, {}, b"", 10)


@dataclass
class Writer:
    """Notes what is written. spoil: called before each block."""

    written: list[int] = field(default_factory=list)
    spoil: Callable[[int], Any] = lambda block: None

    async def place(self, segment: int, block: int) -> Place | None:
        await trio.lowlevel.checkpoint()
        return None

    async def write_block(self, segment: int, block: int, tensors: Tensors) -> None:
        await trio.lowlevel.checkpoint()
        self.spoil(block)
        assert tensors["0.k"][0] == block
        self.written.append(block)

    async def write_anchor(self, segment: int, at: int, tensors: Tensors) -> None:
        raise AssertionError("there is none")


async def refilled(store: Store, writer: Writer) -> RestoreReport:
    refill = Refill(Restore("c1", 0, 0, KEYS, writer), store)  # type: ignore[arg-type]
    await refill.run()
    return refill.report(0.0)


async def test_the_next_run_waits_at_the_store_and_runs_are_taken_in_their_order(autojump_clock: object) -> None:
    store, writer = Store(seconds={0: 5, 2 * RUN: 3}), Writer()
    report = await refilled(store, writer)
    assert (report.blocks, report.read) == (len(KEYS), 10 * len(KEYS))
    assert writer.written == list(range(len(KEYS)))
    assert store.most == AHEAD


async def test_where_bytes_go_to_their_places_the_first_run_is_short_and_others_are_long(
    autojump_clock: object,
) -> None:
    asked = list[tuple[int, int]]()

    class Placed(Writer):
        async def place(self, segment: int, block: int) -> Place | None:
            return Place({}, {})

    class Longer(Store):
        async def ask(self, ask: Read) -> tuple[Stored, ...]:
            asked.append((KEYS.index(ask.keys[0]), len(ask.keys)))
            return tuple(_stored(key) for key in ask.keys)

    report = await refilled(Longer(), Placed())
    assert asked == [(0, RUN), (RUN, len(KEYS) - RUN)]
    assert report.blocks == len(KEYS)


async def test_a_restore_that_is_over_wants_nothing_of_what_is_still_read(autojump_clock: object) -> None:
    asked = list[Read]()

    class Noting(Store):
        async def ask(self, ask: Read) -> tuple[Stored, ...]:
            asked.append(ask)
            assert ask.wanted()
            return await super().ask(ask)

    await refilled(Noting(have={0: 0}, seconds={RUN: 50}), Writer())
    assert len(asked) == AHEAD
    assert not any(ask.wanted() for ask in asked)


async def test_what_lies_behind_a_record_that_is_bad_is_not_taken_though_it_was_read(autojump_clock: object) -> None:
    store, writer = Store(have={0: RUN - 1}), Writer()
    report = await refilled(store, writer)
    assert sorted(store.read) == [0, RUN]
    assert writer.written == list(range(RUN - 1))
    assert (report.blocks, report.rows) == (RUN - 1, (RUN - 1) * 256)


@pytest.mark.parametrize("what", ["bad", "unread", "unwritten"])
async def test_a_restore_that_fails_ends_when_no_read_is_under_way_any_more(what: str, autojump_clock: object) -> None:
    store, writer = Store(seconds={RUN: 50}), Writer()
    match what:
        case "bad":
            store.have[0] = 0
        case "unread":
            store.fails.add(0)
        case "unwritten":
            writer.spoil = _refuse
    report = await refilled(store, writer)
    assert (report.blocks, store.under_way, trio.current_time()) == (0, 0, pytest.approx(50, abs=2))
    assert store.read[-1] == RUN


def _refuse(block: int) -> None:
    raise Unavailable("the rows are gone")


async def test_a_restore_asks_the_device_for_its_memory_once(autojump_clock: object) -> None:
    asked = list[str]()

    class Slow(InlineDevice):
        async def run(self, fn: Any, *args: Any) -> Any:
            asked.append(args[0].__name__)
            await trio.sleep(1)
            return await super().run(fn, *args)

    pool = Pool(Layout((LayerLayout("attention", (RowTensor("k", 1, 1),)),)))
    pool.apply((Allocate(1, 0, 2 * BLOCK),))
    door = SimpleNamespace(segment=lambda leaf, position: SimpleNamespace(id=1, start=0, frontier=0))
    filling = Filling(door, pool, Slow(), SimDisk())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        for block in (0, 1):
            nursery.start_soon(filling.place, 1, block)
            nursery.start_soon(filling.write_block, 1, block, {"0.k": np.ones((1, BLOCK, 1), np.float32)})
    assert asked == ["row_slots"]
    assert (np.array(pool.segments[1].layers[0].arrays["k"]) == 1).all()


async def test_a_restore_that_is_cancelled_takes_nothing_more(autojump_clock: object) -> None:
    store, writer = Store(seconds={RUN: 50}), Writer()
    with trio.move_on_after(10) as scope:
        await refilled(store, writer)
    assert scope.cancelled_caught
    assert writer.written == list(range(RUN))
    assert store.under_way == 0
