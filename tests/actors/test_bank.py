"""Admission at the bank: who is served when memory is short, what a waiting client hears, what a refusal says."""

from __future__ import annotations

import pytest
import trio
from onecopy.actors import bank as bank_module
from onecopy.actors.messages.bank import Commit
from onecopy.runtime.errors import ActorStopped, InsufficientMemory, OnecopyError, Overloaded
from onecopy.runtime.turn import Queued, Started
from trio.testing import MockClock

from tests.support.rounds import BLOCK_BYTES, Heard, Stage, expected, spec, staged

BLOCK = 256


def prompt(mark: int, rows: int) -> list[int]:
    """Rows that no prompt of another mark shares."""
    return [mark] * rows


async def test_turns_wait_for_memory_in_the_order_they_came_and_hear_their_position() -> None:
    async with staged(blocks=4, stepped=True) as stage:
        (first,) = stage.follow(spec(prompt(1, 600), 4))
        await stage.settle()
        waiting = await one_by_one(stage, *(spec(prompt(i, 600), 4) for i in (2, 3, 4)))
        assert [h.of(Queued)[-1].position for h in waiting] == [1, 2, 3]
        stage.device.open()
        for one in waiting:
            await one.gone.wait()
        assert [p.position for p in waiting[2].of(Queued)] == [3, 2, 1]
        first_rows = [position for position, rows in stage.engine.ran if position == 0]
        assert len(first_rows) == 4
    assert [h.tokens for h in (first, *waiting)] == [expected(prompt(i, 600), 4) for i in (1, 2, 3, 4)]


async def test_a_small_turn_does_not_overtake_the_head_of_the_queue() -> None:
    async with staged(blocks=4, stepped=True) as stage:
        stage.follow(spec(prompt(1, 600), 4))
        await stage.settle()
        large, small = await one_by_one(stage, spec(prompt(2, 900), 4), spec(prompt(3, 10), 4))
        assert not small.of(Started)
        await stage.rounds(6)
        assert large.of(Started)


async def test_the_estimate_comes_from_how_long_turns_took(mock_clock: MockClock) -> None:
    async with staged(blocks=4, stepped=True) as stage:
        stage.follow(spec(prompt(1, 600), 1))
        await stage.settle()
        (unknown,) = await one_by_one(stage, spec(prompt(2, 600), 2))
        mock_clock.jump(8)
        await stage.rounds(2)
        assert unknown.of(Queued)[0].estimate is None
        assert unknown.of(Started)
        (known,) = await one_by_one(stage, spec(prompt(3, 600), 1))
        assert known.of(Queued)[0].estimate == pytest.approx(8, rel=0.2)


async def test_a_prompt_larger_than_the_budget_is_refused_with_the_numbers_and_nothing_changes() -> None:
    async with staged(blocks=4) as stage:
        await stage.reply(spec(prompt(1, 300), 4))
        before = await stage.bank()
        error = (await stage.reply(spec(prompt(2, 3000), 4))).error
        after = await stage.bank()
        assert isinstance(error, InsufficientMemory)
        assert error.needed == 12 * BLOCK_BYTES
        assert error.available == 4 * BLOCK_BYTES
        assert error.holders == 0
        assert error.largest_prompt == 4 * BLOCK - 1
        assert error.retry_after
        assert after["refused"] == before["refused"] + 1
        same = ("bytes_used", "segments", "conversations", "dropped", "turns", "queued")
        assert [after[k] for k in same] == [before[k] for k in same]
        fits = await stage.reply(spec(prompt(2, error.largest_prompt), 1))
        assert fits.tokens == expected(prompt(2, error.largest_prompt), 1)
        too_long = (await stage.reply(spec(prompt(3, error.largest_prompt + 2), 1))).error
        assert isinstance(too_long, InsufficientMemory)


async def test_a_refused_turn_leaves_the_conversation_it_would_have_continued_as_it_was() -> None:
    start = prompt(1, 300)
    async with staged(blocks=4) as stage:
        first = await stage.reply(spec(start, 20))
        (before,) = await stage.system.sessions()
        assert isinstance((await stage.reply(spec([*start, *prompt(7, 3000)], 4))).error, InsufficientMemory)
        (after,) = await stage.system.sessions()
        assert after.tokens == before.tokens == 300 + 19
        again = await stage.reply(spec([*start, *first.tokens, 5], 3))
    assert again.end.usage.cached == 319


async def test_a_full_queue_refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_module, "QUEUE", 2)
    async with staged(blocks=4, stepped=True) as stage:
        stage.follow(spec(prompt(1, 600), 4))
        await stage.settle()
        waiting = await one_by_one(stage, *(spec(prompt(i, 600), 4) for i in (2, 3, 4)))
        assert isinstance(waiting[2].error, Overloaded)
        assert waiting[2].error.retry_after
        assert not waiting[0].gone.is_set()
        assert not waiting[1].gone.is_set()


async def test_a_client_that_leaves_the_queue_moves_the_others_up() -> None:
    async with staged(blocks=4, stepped=True) as stage:
        stage.follow(spec(prompt(1, 600), 4))
        await stage.settle()
        waiting = await one_by_one(stage, *(spec(prompt(i, 600), 4) for i in (2, 3, 4)))
        waiting[0].leave()
        await stage.settle()
        assert (await stage.bank())["queued"] == 2
        assert [h.of(Queued)[-1].position for h in waiting[1:]] == [1, 2]


async def test_a_turn_that_fits_starts_as_soon_as_the_one_before_it_has_left_the_queue() -> None:
    async with staged(blocks=4, stepped=True) as stage:
        stage.follow(spec(prompt(1, 600), 4))
        await stage.settle()
        large, small = await one_by_one(stage, spec(prompt(2, 900), 4), spec(prompt(3, 10), 4))
        assert not small.of(Started)
        large.leave()
        await stage.settle()
        assert small.of(Started)


async def test_a_client_that_leaves_while_a_grant_is_on_its_way_gives_the_lease_back() -> None:
    async with staged(blocks=4, stepped=True) as stage:
        (first,) = stage.follow(spec(prompt(1, 600), 4))
        first.leave()
        await stage.settle()
        numbers = await stage.bank()
        assert (numbers["turns"], numbers["queued"]) == (0, 0)


async def test_idle_conversations_make_room_and_running_ones_never_do() -> None:
    async with staged(blocks=6, stepped=True) as stage:
        stage.device.open()
        for mark in (1, 2):
            await stage.reply(spec(prompt(mark, 250), 4))
        stage.device.close()
        (running,) = stage.follow(spec([*prompt(3, 250)], 40))
        await stage.rounds(2)
        (new,) = stage.follow(spec(prompt(4, 900), 4))
        await stage.settle()
        assert new.of(Started)
        assert (await stage.bank())["dropped"] >= 1
        stage.device.open()
        await running.gone.wait()
        await new.gone.wait()
    assert running.tokens == expected(prompt(3, 250), 40)
    assert new.tokens == expected(prompt(4, 900), 4)


async def test_memory_of_rows_equals_the_books_after_every_turn() -> None:
    async with staged(blocks=8) as stage:
        for mark in range(12):
            wanted = [mark % 3, *prompt(5, 200 + 37 * mark)]
            assert (await stage.reply(spec(wanted, 9))).tokens == expected(wanted, 9)
            await stage.settle()
            held = sum(stage.engine.layout.capacity_bytes(len(rows)) for rows in stage.engine.pool.rows.values())
            numbers = await stage.bank()
            assert held == numbers["bytes_used"] <= numbers["bytes_budget"]


async def test_after_a_crash_of_the_bank_memory_is_free_and_turns_are_served() -> None:
    async with staged(blocks=8) as stage:
        await stage.reply(spec(prompt(1, 900), 4))
        assert stage.engine.pool.rows
        crash_bank(stage)
        await stage.settle()
        assert not stage.engine.pool.rows
        assert (await stage.bank())["bytes_used"] == 0
        again = await stage.reply(spec(prompt(1, 900), 4))
    assert again.tokens == expected(prompt(1, 900), 4)


async def test_turns_that_run_when_the_bank_crashes_hear_that_they_may_retry() -> None:
    async with staged(blocks=8, stepped=True) as stage:
        (heard,) = stage.follow(spec(prompt(1, 100), 50))
        await stage.rounds(3)
        crash_bank(stage)
        stage.device.open()
        await heard.gone.wait()
        assert isinstance(heard.error, OnecopyError)
        assert heard.error.retry
        assert (await stage.reply(spec(prompt(1, 100), 5))).tokens == expected(prompt(1, 100), 5)


async def test_stopping_the_system_ends_running_and_waiting_turns_with_an_error_that_says_retry() -> None:
    clients: list[Heard] = []
    async with trio.open_nursery() as nursery, staged(blocks=4, stepped=True) as stage:
        clients = [Heard(), Heard()]
        for one, mark in zip(clients, (1, 2), strict=True):
            nursery.start_soon(one.follow, stage.system, spec(prompt(mark, 600), 500))
            await stage.settle()
        assert clients[1].of(Queued)
    assert [type(c.error) for c in clients] == [ActorStopped, ActorStopped]


def crash_bank(stage: Stage) -> None:
    """Makes the bank meet a bug at its next message."""
    stage.system._supervisor.ref("bank").tell(Commit(None))  # type: ignore[arg-type]


async def one_by_one(stage: Stage, *specs: object) -> list[Heard]:
    """Clients that come one after the other, each heard before the next comes."""
    heard = []
    for wanted in specs:
        heard += stage.follow(wanted)  # type: ignore[arg-type]
        await stage.settle()
    return heard


async def test_a_refused_turn_that_leaves_a_reply_in_the_middle_cuts_nothing_from_it() -> None:
    start = prompt(1, 300)
    async with staged(blocks=4) as stage:
        first = await stage.reply(spec(start, 40))
        inside = [*start, *first.tokens[:10], *prompt(7, 3000)]
        assert isinstance((await stage.reply(spec(inside, 4))).error, InsufficientMemory)
        (after,) = await stage.system.sessions()
        assert after.tokens == 300 + 39
        again = await stage.reply(spec([*start, *first.tokens, 5], 3))
    assert again.end.usage.cached == 339


async def test_buffers_that_could_not_be_made_fail_one_turn_and_not_those_after_it() -> None:
    async with staged(blocks=16) as stage:
        stage.engine.pool.fail = MemoryError("no buffer")
        failed = await stage.reply(spec(prompt(1, 600), 4))
        assert isinstance(failed.error, OnecopyError)
        assert failed.error.retry
        again = await stage.reply(spec(prompt(1, 600), 4))
        assert again.tokens == expected(prompt(1, 600), 4)
        assert (await stage.reply(spec(prompt(2, 600), 4))).tokens == expected(prompt(2, 600), 4)


async def test_a_fork_whose_buffers_could_not_be_made_is_not_kept_in_the_books() -> None:
    async with staged(blocks=16) as stage:
        first = await stage.reply(spec(prompt(1, 600), 4))
        stage.engine.pool.fail = MemoryError("no buffer")
        fork = [*prompt(1, 590), 5, 6, 7]
        assert isinstance((await stage.reply(spec(fork, 4))).error, OnecopyError)
        assert (await stage.reply(spec(fork, 4))).tokens == expected(fork, 4)
        assert first.tokens == expected(prompt(1, 600), 4)
