"""Cases A: an answer from kept rows is the answer of a fresh process, and nothing of another conversation is in it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.system import Whole, body, differing, serving, system_text, user

BLOCK = 256
SHARED = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz ,.", k=4 * BLOCK + 37))
S = system_text(SHARED)
HEAD = 1 + len("user\n")
"""Tokens of the template before the first character of a first user message."""


@pytest.fixture
async def whole(tiny: Path) -> AsyncIterator[Whole]:
    async with serving(tiny) as made:
        yield made


async def test_a_cold_reply_is_that_of_a_fresh_process_and_depends_on_its_whole_prompt(
    whole: Whole, tiny: Path
) -> None:
    wanted = body(S, user("say hello"))
    async with serving(tiny) as fresh:
        first = await fresh.ask(wanted)
    assert (await whole.cold(wanted)).said == first.said
    others = [await whole.cold(body(system_text(differing(SHARED, at)), user("say hello"))) for at in (0, 300, 900)]
    assert len({first.said, *(o.said for o in others)}) == 4


@pytest.mark.parametrize("at", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1])
async def test_a2_a_new_chat_reuses_what_it_shares_and_not_one_token_more(whole: Whole, at: int) -> None:
    text = SHARED[: 3 * BLOCK]
    await whole.ask(body(user(text)))
    other = body(user(differing(text, at)))
    cold = await whole.cold(other)
    reply = await whole.ask(other)
    assert reply.said == cold.said
    assert reply.cached == reply.onecopy["diverged_at"] == HEAD + at


async def test_a3_the_same_prompt_again_is_evaluated_by_at_least_one_token(whole: Whole) -> None:
    wanted = body(S, user("tell me more"))
    cold = await whole.cold(wanted)
    first, again = await whole.ask(wanted), await whole.ask(wanted)
    assert first.said == again.said == cold.said
    assert again.cached == again.prompt - 1


async def test_a3_a_strict_prefix_of_a_kept_prompt_is_answered_as_itself(whole: Whole) -> None:
    await whole.ask(body(S, user("tell me more"), max_tokens=40))
    tokens = (await whole.http.post("/tokenize", json={"messages": [S, user("tell me more")]})).json()["tokens"]
    for cut in (BLOCK, BLOCK + 1, len(tokens) - 3):
        wanted: dict[str, Any] = {"prompt": tokens[:cut], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        cold, warm = [
            (await whole.post({**wanted, **salt}, "/v1/completions")).json() for salt in ({"cache_salt": "c"}, {})
        ]
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == cut - 1


async def test_a4_sixteen_chats_side_by_side_each_answer_their_own_question(whole: Whole) -> None:
    draw = random.Random(4)
    for turn in range(3):
        asked = [body(S, user(f"my secret is {draw.randrange(10**9)}")) for _ in range(16)]
        cold = [await whole.cold(wanted) for wanted in asked]
        stream = [turn == 2 and i % 2 == 0 for i in range(16)]
        assert [r.said for r in await whole.together(asked, stream=stream)] == [r.said for r in cold]


async def test_a4_what_is_kept_is_unchanged_after_another_chat_reused_a_part_of_it(whole: Whole) -> None:
    wanted = body(S, user("the first question"))
    first = await whole.ask(wanted)
    await whole.together([body(S, user(f"another question {i}")) for i in range(8)])
    again = await whole.ask(wanted)
    assert again.said == first.said
    assert again.cached == again.prompt - 1


async def test_a5_brand_new_chats_never_continue_a_finished_one(tiny: Path) -> None:
    async with serving(tiny, parallel=2) as whole:
        for i in range(12):
            await whole.ask(body(user(f"{i} marker {i}" + SHARED[i : i + 300])))
        for i in range(20):
            asked = [body(user(f"{side}{i} unrelated" + SHARED[i * 3 : i * 3 + 200])) for side in "xy"]
            cold = [await whole.cold(wanted) for wanted in asked]
            replies = await whole.together(asked)
            assert [r.said for r in replies] == [r.said for r in cold]
            assert all(r.cached == r.onecopy["rows_adopted"] + r.onecopy["rows_forked"] for r in replies)
            assert all(r.cached < 10 for r in replies)


async def test_a6_a_reply_does_not_depend_on_what_was_asked_before(whole: Whole, tiny: Path) -> None:
    a, b, c = (body(S, user(text), max_tokens=48) for text in ("apples", "apples and pears", "apples and plums"))
    async with serving(tiny) as other:
        cold = await other.ask(c)
        assert (await other.ask(c)).said == cold.said
    for wanted in (a, b):
        await whole.ask(wanted)
    assert (await whole.ask(c)).said == cold.said
    assert (await whole.ask({**c, "draft": False})).said == cold.said


async def test_a7_another_question_behind_the_same_system_text_gets_its_whole_reply(whole: Whole) -> None:
    asked = [body(S, user(text), max_tokens=64) for text in ("one", "one", "two", "three")]
    replies = [await whole.ask(wanted) for wanted in asked]
    plain = [await whole.cold({**wanted, "draft": False}) for wanted in asked]
    assert [len(r.tokens) for r in replies] == [64] * 4
    assert {r.finish for r in replies} == {"length"}
    assert [r.said for r in replies] == [r.said for r in plain]
