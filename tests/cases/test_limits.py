"""Cases E: memory that comes back, contexts that end, refusals that say what they mean."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

from tests.cases.test_leaving import LONG, objects
from tests.support.http import events
from tests.support.system import CHAT, Whole, body, eventually, gather, serving, system_text, user

BLOCK_BYTES = 256 * 512
"""Bytes of a block of the tiny model's rows."""
REQUESTS = 500 if os.environ.get("ONECOPY_FULL") else 100
"""Requests before and after everything is dropped; 500 with `ONECOPY_FULL`, which takes most of a minute."""


@pytest.fixture
async def small(tiny: Path) -> AsyncIterator[Whole]:
    """A server with a context of 256 tokens."""
    async with serving(tiny, context=256) as made:
        yield made


def of_tokens(n: int, **more: Any) -> dict[str, Any]:
    """A chat whose prompt has exactly `n` tokens."""
    frame = len("user\n") + len("assistant\n") + len("\n") + 3
    return body(user(LONG[: n - frame]), **more)


async def test_e2_after_a_burst_to_the_budget_a_medium_request_is_served_each_time(tiny: Path) -> None:
    async with serving(tiny, rows=8 * 9 * BLOCK_BYTES) as whole:
        for turn in range(5):
            burst = [body(user(f"{turn} {i} {LONG[:1800]}"), max_tokens=8) for i in range(8)]
            assert len(await whole.together(burst)) == 8
            medium = await whole.ask(body(user(f"{turn} medium {LONG[:4000]}")))
            assert medium.finish == "length"
            numbers = (await whole.at_rest())["bank"]
            assert numbers["refused"] == 0
            assert numbers["bytes_used"] <= numbers["bytes_budget"]


async def test_e2_a_refusal_carries_the_numbers_and_the_server_goes_on(tiny: Path) -> None:
    async with serving(tiny, rows=8 * BLOCK_BYTES) as whole:
        answer = await whole.post(body(user(LONG)))
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "insufficient_memory"
        assert str(8 * BLOCK_BYTES) in error["message"]
        assert int(answer.headers["retry-after"]) > 0
        assert (await whole.ask(body(user(LONG[:1000])))).finish == "length"


@pytest.mark.slow
async def test_e3_near_identical_requests_cost_their_tails_and_everything_goes_when_it_is_dropped(tiny: Path) -> None:
    async with serving(tiny, rows=80 * BLOCK_BYTES) as whole:
        draw, elsewhere = random.Random(9), objects()
        peaks, resident = list[int](), list[int]()
        for _ in range(2):
            used = await traffic(whole, draw, REQUESTS)
            assert max(used) <= 80 * BLOCK_BYTES
            peaks.append(mx.get_active_memory())
            resident.append(psutil.Process().memory_info().rss)
            pool = whole.system._engine.pool
            assert sum(a.nbytes for s in pool.segments.values() for a in s.flat()) == used[-1]
            await whole.drop_all()
            numbers = await whole.at_rest()
            assert numbers["bank"]["bytes_used"] == numbers["bank"]["segments"] == 0
            assert not pool.segments
            assert objects() <= elsewhere
        assert peaks[1] <= peaks[0] + BLOCK_BYTES
        assert resident[1] <= resident[0] + (64 << 20)


async def traffic(whole: Whole, draw: random.Random, n: int) -> list[int]:
    """Requests that share 95 % and differ in their tail, a tenth of them left; bytes of rows after each ten."""
    used = []
    for i in range(0, n, 10):
        asked = [body(system_text(LONG[:1900]), user(f"tail {draw.random()} {LONG[:60]}")) for _ in range(10)]
        await gather([lambda w=w: whole.ask(w) for w in asked[1:]] + [lambda w=asked[0]: whole.leave(w, 1)])  # type: ignore[misc]
        used.append(int((await whole.at_rest())["bank"]["bytes_used"]))
        assert i < n
    return used


async def test_e3_a_branch_that_shares_nearly_all_costs_only_its_tail(tiny: Path) -> None:
    async with serving(tiny) as whole:
        parent = [system_text(LONG), user("first")]
        await whole.ask(body(*parent))
        before = (await whole.at_rest())["bank"]["bytes_used"]
        for i in range(5):
            reply = await whole.ask(body(parent[0], user(f"branch {i}")))
            assert reply.cached >= len(LONG)

        async def slack_is_back() -> bool:
            return bool((await whole.numbers())["bank"]["bytes_used"] <= before + 5 * BLOCK_BYTES)

        await eventually(slack_is_back)


@pytest.mark.parametrize("stream", [False, True])
async def test_e4_a_prompt_past_the_context_is_a_400_before_any_byte_of_a_stream(small: Whole, stream: bool) -> None:
    kept = of_tokens(200)
    first = await small.ask(kept)
    answer = await small.post(of_tokens(300, stream=stream))
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert "256" in error["message"]
    assert "300" in error["message"]
    again = await small.ask(kept)
    assert (again.cached, again.said) == (199, first.said)


async def test_e4_a_reply_longer_than_the_context_is_clamped_streamed_or_not(small: Whole) -> None:
    wanted = of_tokens(200, max_tokens=200)
    whole, streamed = await small.ask(wanted), await small.streamed(wanted)
    assert whole.said == streamed.said
    assert (len(whole.tokens), whole.finish) == (56, "length")


async def test_e4_without_max_tokens_a_reply_ends_at_the_context(small: Whole) -> None:
    reply = await small.ask(of_tokens(250, max_tokens=None))
    assert (len(reply.tokens), reply.finish) == (6, "length")


async def test_e4_a_prompt_of_exactly_the_context_has_no_room_and_one_less_has_one_token(small: Whole) -> None:
    assert (await small.post(of_tokens(256))).status_code == 400
    assert len((await small.ask(of_tokens(255))).tokens) == 1


async def test_e4_a_huge_body_is_a_400(small: Whole) -> None:
    answer = await small.post(body(user("x" * (2 << 20))))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_e4_messages_says_it_as_anthropic_does(small: Whole, stream: bool) -> None:
    wanted = {**of_tokens(300), "stream": stream}
    answer = await small.post({k: wanted[k] for k in ("messages", "max_tokens", "stream")}, "/v1/messages")
    assert answer.status_code == 400
    assert answer.json() == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 300 tokens > 256 maximum"},
    } | {k: v for k, v in answer.json().items() if k == "request_id"}


async def test_e5_a_reply_at_the_end_of_the_context_ends_and_costs_the_others_nothing(small: Whole) -> None:
    long, short = of_tokens(230, max_tokens=512), body(user("short"), max_tokens=5)
    cold = [await small.cold(w) for w in (long, short)]
    replies = await small.together([long, short])
    assert [r.said for r in replies] == [c.said for c in cold]
    assert (len(replies[0].tokens), replies[0].finish) == (26, "length")
    talk = [*long["messages"], {"role": "assistant", "content": replies[0].text}, user("more")]
    answer = await small.post(body(*talk))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    streamed = await small.http.post(CHAT, json={**long, "stream": True})
    assert events(streamed.content)[-1] == "[DONE]"
