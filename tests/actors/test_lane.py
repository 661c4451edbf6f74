"""The lane by its effects: which rows run, who hears what, and what a crash leaves."""

from __future__ import annotations

import pytest
import trio
from onecopy.actors.running import UNREAD
from onecopy.runtime.errors import LaneCrashed, OnecopyError, RestartIntensityExceeded
from onecopy.runtime.turn import Prefilling, Queued, Started

from tests.support.rounds import expected, spec, staged

PROMPT = list(range(40))
LONG = [i % 251 for i in range(1500)]


async def test_a_reply_is_the_digest_of_all_rows_before_it() -> None:
    async with staged() as stage:
        heard = await stage.reply(spec(PROMPT, 12))
    assert heard.tokens == expected(PROMPT, 12)
    assert heard.end.reason == "length"


async def test_turns_that_run_together_share_rounds_and_reply_as_if_alone() -> None:
    prompts = [[i, *PROMPT] for i in range(5)]
    async with staged(stepped=True) as stage:
        heard = stage.follow(*(spec(p, 6) for p in prompts))
        await stage.rounds(5)  # each prompt's chunk
        stage.engine.ran.clear()
        await stage.rounds(5)
        assert len(stage.engine.ran) >= 20
        stage.device.open()
        for one in heard:
            await one.gone.wait()
    assert [h.tokens for h in heard] == [expected(p, 6) for p in prompts]


async def test_a_long_prompt_reports_its_progress() -> None:
    async with staged() as stage:
        heard = await stage.reply(spec(LONG, 2))
    progress = [(p.done, p.total) for p in heard.of(Prefilling)]
    assert progress == [(512, 1500), (1024, 1500)]
    assert heard.tokens == expected(LONG, 2)


async def test_a_client_that_leaves_in_a_prefill_stops_it_at_the_chunks_end_and_its_rows_stay() -> None:
    async with staged(stepped=True) as stage:
        (heard,) = stage.follow(spec(LONG, 4))
        await stage.rounds(1)
        heard.leave()
        await stage.rounds(1)
        assert stage.engine.ran == [(0, 512), (512, 512)]
        assert not stage.device.waiting
        assert heard.gone.is_set()
        stage.device.open()
        again = await stage.reply(spec(LONG, 4))
    assert again.end.usage.cached == 1024
    assert again.tokens == expected(LONG, 4)


async def test_a_client_that_leaves_while_decoding_is_out_of_the_next_round() -> None:
    async with staged(stepped=True) as stage:
        stays, leaves = stage.follow(spec(PROMPT, 20), spec([9, *PROMPT], 20))
        await stage.rounds(4)
        leaves.leave()
        await stage.rounds(1)
        stage.engine.ran.clear()
        await stage.rounds(3)
        assert len(stage.engine.ran) == 3
        assert (await stage.bank())["turns"] == 1
        stage.device.open()
        await stays.gone.wait()
        again = await stage.reply(spec([9, *PROMPT], 20))
    assert stays.tokens == expected(PROMPT, 20)
    assert again.tokens == expected([9, *PROMPT], 20)


async def test_a_reader_that_stops_reading_pauses_its_own_turn_only() -> None:
    async with staged() as stage:
        (slow,) = stage.follow(spec(PROMPT, 1000), reads=False)
        await stage.settle()
        numbers = await stage.lane()
        assert numbers["paused"] == 1
        assert numbers["tokens"] <= 3 * UNREAD
        quick = await stage.reply(spec([7, *PROMPT], 300))
        assert quick.tokens == expected([7, *PROMPT], 300)
        assert (await stage.lane())["paused"] == 1
        slow.gate.set()
        await slow.gone.wait()
        assert (await stage.bank())["turns"] == 0
    assert slow.tokens == expected(PROMPT, 1000)


async def test_a_reply_that_finds_no_more_memory_ends_with_a_reason_and_valid_tokens() -> None:
    async with staged(blocks=3) as stage:
        heard = await stage.reply(spec(PROMPT, 2000))
        assert heard.end.reason == "length"
        assert heard.end.detail == "no memory for more rows"
        assert 0 < len(heard.tokens) < 2000
        assert heard.tokens == expected(PROMPT, len(heard.tokens))
        assert (await stage.bank())["turns"] == 0
        after = [*PROMPT, *heard.tokens[:20], 5]
        assert (await stage.reply(spec(after, 4))).tokens == expected(after, 4)


async def test_a_stop_string_gives_undelivered_rows_back_and_the_next_turn_goes_on_in_place() -> None:
    reply = bytes_of(expected(PROMPT, 30))
    stop = next(reply[i : i + 2] for i in range(6, 28) if reply[i : i + 2].isascii() and reply[i : i + 2].isprintable())
    async with staged() as stage:
        heard = await stage.reply(spec(PROMPT, 30, stop=[stop]))
        assert heard.end.reason == "stop"
        assert heard.end.stop == stop
        said = heard.tokens
        assert said == expected(PROMPT, len(said))
        (kept,) = await stage.system.sessions()
        assert kept.tokens == len(PROMPT) + len(said) - 1
        after = [*PROMPT, *said, 1, 2, 3]
        again = await stage.reply(spec(after, 5))
    assert again.end.receipt.how == "adopted"
    assert again.end.usage.cached == len(PROMPT) + len(said) - 1
    assert again.tokens == expected(after, 5)


async def test_a_failed_round_fails_its_turns_returns_their_leases_and_the_next_turn_is_right() -> None:
    async with staged(stepped=True) as stage:
        heard = stage.follow(spec(PROMPT, 10), spec([3, *PROMPT], 10))
        await stage.rounds(4)
        stage.engine.fail = RuntimeError("the device is confused")
        await stage.rounds(1)
        assert [type(h.error) for h in heard] == [LaneCrashed, LaneCrashed]
        assert all(h.error.retry for h in heard if isinstance(h.error, OnecopyError))
        assert (await stage.bank())["turns"] == 0
        stage.engine.fail = None
        stage.device.open()
        again = [await stage.reply(spec(p, 10)) for p in (PROMPT, [3, *PROMPT])]
        assert (await stage.system.health()).status == "ok"
    assert [h.tokens for h in again] == [expected(p, 10) for p in (PROMPT, [3, *PROMPT])]
    assert all(h.end.usage.cached > 0 for h in again)


async def test_the_lane_restarts_once_and_a_second_crash_ends_the_system_with_its_cause() -> None:
    bug = RuntimeError("the device is confused")
    with pytest.raises(RestartIntensityExceeded) as caught:
        async with staged() as stage:
            stage.engine.fail = bug
            assert isinstance((await stage.reply(spec(PROMPT))).error, LaneCrashed)
            await stage.settle()
            assert isinstance((await stage.reply(spec(PROMPT))).error, LaneCrashed)
            await trio.sleep_forever()
    assert caught.value.__cause__ is bug


async def test_a_turn_that_was_still_queued_when_the_lane_crashed_hears_that_it_may_retry() -> None:
    async with staged(blocks=3, stepped=True) as stage:
        (running,) = stage.follow(spec(PROMPT, 10))
        await stage.settle()
        (queued,) = stage.follow(spec([5] * 600, 10))
        await stage.settle()
        assert queued.of(Queued)
        assert not queued.of(Started)
        stage.engine.fail = RuntimeError("the device is confused")
        await stage.rounds(1)
        assert isinstance(running.error, LaneCrashed)
        assert isinstance(queued.error, LaneCrashed)
        numbers = await stage.bank()
        assert (numbers["turns"], numbers["queued"]) == (0, 0)


def bytes_of(tokens: list[int]) -> str:
    """The text of byte tokens, each as one character."""
    from tests.support.tokens import byte_tokenizer

    tokenizer = byte_tokenizer()
    return "".join(tokenizer.token_bytes(t).decode("latin-1") for t in tokens)
