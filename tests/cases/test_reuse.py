"""Cases B: what is reused, across edits, forks, side requests and restarts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.system import Reply, Whole, body, serving, system_text, user, write_tiny
from tests.support.tokens import THINKING

BLOCK = 256
SHARED = "".join(random.Random(2).choices("abcdefghijklmnopqrstuvwxyz ,.", k=4 * BLOCK + 11))
S = system_text(SHARED)


@pytest.fixture
async def whole(tiny: Path) -> AsyncIterator[Whole]:
    async with serving(tiny) as made:
        yield made


@pytest.fixture(scope="session")
def tiny_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tools"), template=THINKING)


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def grown(messages: list[Any], reply: Reply, text: str) -> list[Any]:
    """The conversation with its reply and the next question."""
    return [*messages, assistant(reply.text), user(text)]


async def common(whole: Whole, one: list[Any], other: list[Any]) -> int:
    """Tokens that two rendered conversations share."""
    rendered = [(await whole.http.post("/tokenize", json={"messages": m})).json()["tokens"] for m in (one, other)]
    return next(i for i, (a, b) in enumerate(zip(*rendered, strict=False)) if a != b)


async def test_b2_a_history_sent_back_right_trimmed_is_reused_up_to_the_first_differing_token(whole: Whole) -> None:
    ask = [S, user("go on")]
    first = await whole.ask(body(*ask, guided_regex="[a-z]{20}\n\n", max_tokens=40, logit_bias=None))
    assert first.text.endswith("\n\n")
    verbatim = grown(ask, first, "and then?")
    trimmed = [*ask, assistant(first.text.rstrip()), user("and then?")]
    shared = await common(whole, verbatim, trimmed)
    cold = [await whole.cold(body(*m)) for m in (trimmed, verbatim)]
    replies = [await whole.ask(body(*m)) for m in (trimmed, verbatim)]
    assert [r.said for r in replies] == [c.said for c in cold]
    assert replies[0].cached == shared
    assert replies[1].cached == shared


async def test_b2_the_same_history_verbatim_reuses_the_reply_too(whole: Whole) -> None:
    ask = [S, user("go on")]
    first = await whole.ask(body(*ask))
    second = await whole.ask(body(*grown(ask, first, "and then?")))
    assert second.cached == first.prompt + len(first.tokens) - 1
    assert second.onecopy["how"] in ("adopted", "extended")
    assert second.onecopy["bytes_copied"] == 0


async def test_b2_unknown_keys_change_neither_the_prompt_nor_the_status(tiny_with_tools: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    odd = {**call, "index": 0, "provider_data": {"x": 1}, "function": {**call["function"], "parsed": None}}  # type: ignore[dict-item]
    plain = [
        user("look it up"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    strange = [user("look it up"), assistant("", tool_calls=[odd], annotations=[], x_private="y"), plain[2]]
    async with serving(tiny_with_tools) as whole:
        first = await whole.ask(body(*plain))
        again = await whole.ask(body(*strange))
    assert again.cached == again.prompt - 1 == first.prompt - 1
    assert again.said == first.said


async def test_b4_after_a_restart_every_conversation_is_kept_not_only_the_first(tiny: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    async with serving(tiny, store=store) as before:
        await before.ask(body(S, user("before the restart")))
    async with serving(tiny, store=store) as whole:
        talks = [[system_text(f"{i} {SHARED[i:]}"), user("one")] for i in range(4)]
        last: list[Reply] = []
        for turn in range(3):
            for i, talk in enumerate(talks):
                side = await whole.ask(body(system_text(f"title {i}"), user(f"name it {turn}"), max_tokens=4))
                assert side.cached < BLOCK
                reply = await whole.ask(body(*talk, max_tokens=6))
                assert reply.said == (await whole.cold(body(*talk, max_tokens=6))).said
                if turn:
                    assert reply.cached >= last[i].prompt - BLOCK
                last[i : i + 1] = [reply]
                talks[i] = grown(talk, reply, f"turn {turn}")
        first = await whole.ask(body(*talks[0], max_tokens=6))
        assert first.cached >= last[0].prompt - BLOCK


async def test_b4_a_conversation_kept_before_a_restart_goes_on_after_it(tiny: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    talks = [[system_text(f"{i} {SHARED[i:]}"), user("one")] for i in range(3)]
    async with serving(tiny, store=store) as before:
        firsts = [await before.ask(body(*talk)) for talk in talks]
    async with serving(tiny, store=store) as after:
        for talk, first in zip(talks, firsts, strict=True):
            wanted = body(*grown(talk, first, "two"))
            reply = await after.ask(wanted)
            assert reply.cached >= first.prompt // BLOCK * BLOCK
            assert reply.onecopy["rows_restored"] > 0
            assert reply.said == (await after.cold(wanted)).said


async def test_b7_two_conversations_with_one_prefix_never_take_each_others_tail(whole: Whole) -> None:
    talks = {name: [S, user(name * (BLOCK // 2))] for name in "pq"}
    last: dict[str, Reply] = {}
    for turn in range(4):
        for name, talk in talks.items():
            reply = await whole.ask(body(*talk))
            assert reply.said == (await whole.cold(body(*talk))).said
            if turn:
                assert reply.cached >= last[name].prompt + len(last[name].tokens) - 1
            last[name] = reply
            talks[name] = grown(talk, reply, "more")


async def test_b7_an_edit_reuses_up_to_itself_and_the_unedited_conversation_survives_it(whole: Whole) -> None:
    first = [S, user("a question of some length, with an end")]
    reply = await whole.ask(body(*first))
    talk = grown(first, reply, "and another")
    answered = await whole.ask(body(*talk))
    edited = [S, user("a question of some length, with an edit"), *talk[2:]]
    changed = await whole.ask(body(*edited))
    assert changed.cached == await common(whole, talk, edited)
    assert changed.said == (await whole.cold(body(*edited))).said
    again = await whole.ask(body(*talk))
    assert again.cached == again.prompt - 1
    assert again.said == answered.said


async def test_b7_eight_children_cost_their_tails_and_leave_the_parent_warm(whole: Whole) -> None:
    parent = [S, user("think")]
    first = await whole.ask(body(*parent))
    before = (await whole.at_rest())["bank"]["bytes_used"]
    children = [grown(parent, first, f"child {i}") for i in range(8)]
    replies = await whole.together([body(*c) for c in children])
    after = (await whole.at_rest())["bank"]["bytes_used"]
    block = BLOCK * whole.system.card.features["row_bytes"]
    assert after - before <= 8 * 2 * block
    assert all(r.cached >= first.prompt for r in replies)
    for child, reply in zip(children, replies, strict=True):
        assert reply.said == (await whole.cold(body(*child))).said
    again = await whole.ask(body(*parent))
    assert again.cached == again.prompt - 1
    assert again.said == first.said
