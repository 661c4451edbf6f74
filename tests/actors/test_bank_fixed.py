"""Buffers of a fixed size in the running bank: how turns get them, and holds that come around the admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from onecopy.actors import bank as bank_module
from onecopy.actors.messages.bank import Fork, LaneLost
from onecopy.runtime.errors import LaneCrashed
from onecopy.runtime.turn import Receipt
from trio.testing import MockClock

from tests.support.batches import beside_admission
from tests.support.rounds import BLOCK_BYTES, Stage, expected, spec, staged

BLOCK = 256
BUCKET = 4 * BLOCK


def prompt(mark: int, rows: int) -> list[int]:
    """Rows that no prompt of another mark shares."""
    return [mark] * rows


async def said(stage: Stage, tokens: Sequence[int], n: int, **more: Any) -> Receipt:
    """The receipt of a turn, whose reply is right."""
    heard = await stage.reply(spec(tokens, n, **more))
    assert heard.tokens == expected(tokens, n)
    return heard.end.receipt


async def rest(clock: MockClock, stage: Stage) -> None:
    """Until unused blocks were given back."""
    clock.jump(2 * bank_module.IDLE_SLACK)
    await trio.sleep(bank_module.IDLE_SLACK)
    await stage.settle()


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    return autojump_clock


async def test_a_new_conversation_gets_whole_buckets_and_goes_on_in_them() -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        first = await said(stage, prompt(1, 300), 4)
        assert (first.how, first.price_bytes, first.peak_bytes) == ("fresh", 4 * BLOCK_BYTES, 4 * BLOCK_BYTES)
        second = await said(stage, [*prompt(1, 300), *expected(prompt(1, 300), 4), 7], 4)
        assert (second.how, second.price_bytes, second.bytes_copied) == ("adopted", 0, 0)


async def test_rounds_that_a_kept_graph_ran_are_counted_for_their_turn(clock: MockClock) -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        alone = await said(stage, prompt(1, 30), 6)
        assert (alone.rounds, alone.compiled) == (5, 5)
        async with trio.open_nursery() as nursery:
            for mark in (2, 3):
                nursery.start_soon(said, stage, prompt(mark, 30), 6)
        lane = await stage.lane()
        assert 5 <= lane["compiled"] < lane["rounds"]
    async with staged() as stage:
        assert (await said(stage, prompt(1, 30), 6)).compiled == 0


async def test_a_full_leaf_is_followed_by_whole_buckets_and_nothing_moves() -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        await said(stage, prompt(1, 1000), 4)
        more = [*prompt(1, 1000), *expected(prompt(1, 1000), 4), *prompt(2, 300)]
        second = await said(stage, more, 4)
        assert (second.how, second.bytes_copied) == ("extended", 0)
        assert (await stage.bank())["bytes_used"] == 8 * BLOCK_BYTES


async def test_slack_that_was_given_back_comes_again_by_a_resize_in_place(clock: MockClock) -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        await said(stage, prompt(1, 300), 4)
        await rest(clock, stage)
        assert (await stage.bank())["bytes_used"] == 2 * BLOCK_BYTES
        second = await said(stage, [*prompt(1, 300), *expected(prompt(1, 300), 4), 7], 4)
        assert (second.how, second.price_bytes) == ("resized", 2 * BLOCK_BYTES)
        assert dict(second.copied) == {"resize": 303 * 16}
        assert second.price_bytes < second.peak_bytes <= second.price_bytes + 4 * BLOCK_BYTES // 2 + 8
        numbers = await stage.bank()
        assert numbers["admitted"] == {"fresh": 1, "resized": 1}
        assert numbers["priced"] == {"fresh": 4 * BLOCK_BYTES, "resized": 2 * BLOCK_BYTES}
        assert numbers["bytes_used"] == 4 * BLOCK_BYTES


async def test_many_rows_are_not_moved_for_a_fixed_size(clock: MockClock) -> None:
    async with staged(fixed_rows=BLOCK * 2) as stage:
        await said(stage, prompt(1, 700), 4)
        await rest(clock, stage)
        second = await said(stage, [*prompt(1, 700), *expected(prompt(1, 700), 4), 7], 4)
        assert (second.how, second.bytes_copied, second.price_bytes) == ("eager", 0, 0)


async def test_without_memory_for_whole_buckets_a_turn_is_served_eagerly() -> None:
    async with staged(blocks=3, fixed_rows=BUCKET) as stage:
        receipt = await said(stage, prompt(1, 300), 4)
        assert (receipt.how, receipt.price_bytes) == ("eager", 2 * BLOCK_BYTES)


async def test_unused_blocks_of_idle_conversations_go_before_any_conversation_does(clock: MockClock) -> None:
    async with staged(blocks=10, fixed_rows=BUCKET) as stage:
        for mark in (1, 2):
            await said(stage, prompt(mark, 300), 4)
        third = await said(stage, prompt(3, 300), 4)
        numbers = await stage.bank()
        assert third.how == "fresh"
        assert (numbers["dropped"], numbers["conversations"]) == (0, 3)
        assert numbers["trimmed"] >= 1


async def test_a_request_that_wants_no_drafts_wants_no_fixed_size() -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        assert (await said(stage, prompt(1, 300), 4, draft=False)).price_bytes == 2 * BLOCK_BYTES


async def test_growth_of_a_turn_with_fixed_buffers_comes_in_whole_buckets() -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        await said(stage, prompt(1, 900), 600)
        assert (await stage.bank())["bytes_used"] == 8 * BLOCK_BYTES


async def test_growth_without_memory_for_whole_buckets_takes_what_there_is() -> None:
    async with staged(blocks=6, fixed_rows=BUCKET) as stage:
        await said(stage, prompt(1, 900), 600)
        assert (await stage.bank())["bytes_used"] == 6 * BLOCK_BYTES


# --- a hold around the admission


async def rewound(stage: Stage, clock: MockClock) -> tuple[str, list[int], list[int]]:
    """A conversation at rest whose reply of 400 tokens a next prompt leaves early: its id, its rows, that prompt."""
    start = prompt(1, 300)
    reply = await stage.reply(spec(start, 400))
    await rest(clock, stage)
    (kept,) = await stage.system.sessions()
    return kept.id, [*start, *reply.tokens[:-1]], [*start, *reply.tokens[:5], 7]


@pytest.mark.parametrize(("first", "how"), [(True, "copied"), (False, "eager")])
async def test_a_fork_in_the_same_batch_as_an_admission_keeps_its_rows_in_either_order(
    clock: MockClock, first: bool, how: str
) -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        name, rows, wanted = await rewound(stage, clock)
        answer = beside_admission(stage.system, Fork(name, None, "child"), first=first)
        receipt = await said(stage, wanted, 4)
        numbers = await stage.bank()
        assert receipt.how == how
        assert numbers["admitted"] == {"fresh": 1, "resized": 0, "eager": 1} if how == "eager" else {"fresh": 1, how: 1}
        assert numbers["priced"][how] == receipt.price_bytes > 0
        assert sum(dict(receipt.copied).values()) > 0
        assert (await answer.wait()).tokens == len(rows)
        child = await said(stage, [*rows, *expected(rows, 1)], 4)
        assert child.rows_prefilled <= 1 + len(rows) % BLOCK


async def test_without_the_fork_the_same_admission_is_a_resize(clock: MockClock) -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        _, _, wanted = await rewound(stage, clock)
        assert (await said(stage, wanted, 4)).how == "resized"


async def test_a_lane_that_is_lost_between_grant_and_execution_is_told_to_the_client(clock: MockClock) -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        _, _, wanted = await rewound(stage, clock)
        beside_admission(stage.system, LaneLost(), first=False)
        heard = await stage.reply(spec(wanted, 4))
        assert isinstance(heard.error, LaneCrashed)
        assert (await stage.bank())["turns"] == 0
        await said(stage, wanted, 4)


async def test_a_client_that_leaves_between_grant_and_execution_leaves_nothing_behind(clock: MockClock) -> None:
    async with staged(fixed_rows=BUCKET) as stage:
        _, _, wanted = await rewound(stage, clock)
        bank: Any = stage.system._supervisor.actor("bank")
        give, heard = bank._give, []

        def leaving(turn: Any, grant: Any) -> None:
            give(turn, grant)
            heard[0].leave()

        bank._give = leaving
        heard += stage.follow(spec(wanted, 4))
        await stage.settle()
        numbers = await stage.bank()
        assert (numbers["turns"], bank._ledger.audit()) == (0, [])
        assert not bank._planned
