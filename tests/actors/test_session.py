"""A session by what its client gets and what it gives back, whatever ends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from onecopy.actors import outbox as outbox_module
from onecopy.actors.session import token_sha
from onecopy.runtime.errors import BadRequest, ContextLengthExceeded, LaneCrashed
from onecopy.runtime.turn import Finished, Sampling, Started, Text, TurnSpec

from tests.support.rounds import Heard, Stage, expected, spec, staged

PROMPT = list(range(40))


async def test_a_turn_starts_delivers_and_finishes_with_its_counts() -> None:
    async with staged() as stage:
        heard = await stage.reply(spec(PROMPT, 9))
    assert isinstance(heard.pieces[0], Started)
    assert {type(p) for p in heard.pieces[1:-1]} == {Text}
    end = heard.end
    assert (end.usage.prompt, end.usage.completion, end.usage.cached) == (40, 9, 0)
    assert (end.receipt.how, end.receipt.rows_prefilled, end.receipt.bytes_copied) == ("fresh", 40, 0)
    assert end.token_sha == token_sha(expected(PROMPT, 9))


async def test_the_next_turn_of_a_conversation_computes_its_new_tokens_only_and_copies_nothing() -> None:
    async with staged() as stage:
        first = await stage.reply(spec(PROMPT, 9))
        after = [*PROMPT, *first.tokens, 1, 2, 3]
        second = await stage.reply(spec(after, 4))
    assert second.tokens == expected(after, 4)
    assert second.end.receipt.how == "adopted"
    assert second.end.receipt.bytes_copied == 0
    assert second.end.usage.cached == len(after) - 4
    assert second.of(Started)[0].session == first.of(Started)[0].session


async def test_a_client_that_has_read_the_end_of_a_stopped_reply_can_go_on_in_place_at_once() -> None:
    text = "".join(map(chr, range(32, 127)))
    async with staged() as stage:
        whole = await stage.reply(spec(PROMPT, 60))
        said = "".join(p.text for p in whole.of(Text))
        stop = next(c for c in text if c in said[8:] and c not in said[:8])
        spec_ = replace(spec([*PROMPT, 1], 60, stop=[stop]))
        reply = await stage.reply(spec_)
        after = [*PROMPT, 1, *reply.tokens, 2]
        again = await stage.reply(spec(after, 3))
    assert again.end.receipt.how in ("adopted", "extended")
    assert again.tokens == expected(after, 3)


async def test_the_lease_goes_back_before_the_client_takes_the_last_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "SIZE", 2)
    async with staged() as stage:
        (slow,) = stage.follow(spec(PROMPT, 20), reads=False)
        await stage.settle()
        assert (await stage.bank())["turns"] == 0
        slow.gate.set()
        await slow.gone.wait()
    assert slow.tokens == expected(PROMPT, 20)


async def test_a_bug_in_a_session_fails_its_own_turn_and_gives_the_lease_back() -> None:
    async with staged(stepped=True) as stage:
        (broken,) = stage.follow(spec(PROMPT, 20))
        await stage.settle()
        (fine,) = stage.follow(spec([7, *PROMPT], 20))
        await stage.rounds(3)
        session(stage, 1)._read = None
        stage.device.open()
        for one in (broken, fine):
            await one.gone.wait()
        numbers = await stage.bank()
        assert (numbers["turns"], (await stage.lane())["running"]) == (0, 0)
        assert isinstance(broken.error, TypeError)
        assert fine.tokens == expected([7, *PROMPT], 20)
        assert (await stage.reply(spec(PROMPT, 20))).tokens == expected(PROMPT, 20)


async def test_a_bug_while_a_session_waits_for_rows_leaves_no_turn_behind() -> None:
    async with staged(blocks=4, stepped=True) as stage:
        stage.follow(spec([1] * 600, 4))
        await stage.settle()
        (broken,) = stage.follow(spec([2] * 600, 4))
        await stage.settle()
        session(stage, 2)._put = None
        (last,) = stage.follow(spec([3] * 600, 4))
        await stage.settle()
        assert broken.gone.is_set()
        stage.device.open()
        await last.gone.wait()
        numbers = await stage.bank()
        assert (numbers["turns"], numbers["queued"]) == (0, 0)
    assert last.tokens == expected([3] * 600, 4)


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
async def test_a_turn_that_is_left_at_any_round_leaves_a_conversation_whose_next_turn_is_right(rounds: int) -> None:
    async with staged(stepped=True) as stage:
        (heard,) = stage.follow(spec(PROMPT * 20, 30))
        await stage.rounds(rounds)
        heard.leave()
        stage.device.open()
        await heard.gone.wait()
        assert (await stage.bank())["turns"] == 0
        again = await stage.reply(spec(PROMPT * 20, 30))
    assert again.tokens == expected(PROMPT * 20, 30)


async def test_what_a_turn_cannot_be_is_refused_before_it_is_one() -> None:
    async with staged(context=128) as stage:
        assert isinstance((await stage.reply(spec([], 4))).error, BadRequest)
        assert isinstance((await stage.reply(spec([1] * 128, 1))).error, ContextLengthExceeded)
        assert isinstance((await stage.reply(spec([1] * 100, 29))).error, BadRequest)
        assert isinstance((await stage.reply(spec([1, 5000], 2))).error, BadRequest)
        assert (await stage.bank())["turns"] == 0
        assert (await stage.reply(spec([1] * 100, 28))).tokens == expected([1] * 100, 28)


async def test_salted_prompts_share_nothing() -> None:
    async with staged() as stage:
        await stage.reply(spec(PROMPT, 4, salt=b"one"))
        other = await stage.reply(spec(PROMPT, 4, salt=b"two"))
        same = await stage.reply(spec(PROMPT, 4, salt=b"one"))
    assert other.end.usage.cached == 0
    assert same.end.usage.cached == len(PROMPT) - 1
    assert other.tokens == same.tokens


async def test_an_end_token_ends_the_reply_and_is_counted() -> None:
    stops = expected(PROMPT, 6)[-1]
    async with staged(eos=frozenset([stops])) as stage:
        wanted = TurnSpec(tuple(PROMPT), 50, Sampling(seed=1, temperature=0))
        heard = await stage.reply(wanted)
    cut = expected(PROMPT, 6).index(stops) + 1
    assert heard.tokens == expected(PROMPT, cut)
    assert heard.end.reason == "stop"


async def test_a_turn_begun_while_the_lane_is_gone_hears_of_the_crash() -> None:
    async with staged(stepped=True) as stage:
        (running,) = stage.follow(spec(PROMPT, 20))
        await stage.rounds(2)
        stage.engine.fail = RuntimeError("the device is confused")
        late = stage.follow(*(spec([i, *PROMPT], 20) for i in range(6)))
        stage.device.allow()
        await stage.settle()
        stage.engine.fail = None
        stage.device.open()
        for one in (running, *late):
            await one.gone.wait()
        assert isinstance(running.error, LaneCrashed)
        assert all(whole(one) or isinstance(one.error, LaneCrashed) for one in late)
        assert (await stage.bank())["turns"] == 0


def whole(heard: Heard) -> bool:
    return heard.error is None and isinstance(heard.pieces[-1], Finished)


def session(stage: Stage, number: int) -> Any:
    """The session actor of that turn, to break it."""
    found = stage.system._supervisor.actor(f"session {number}")
    assert found is not None
    return found
