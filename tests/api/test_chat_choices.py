"""Chat completions with several choices, and their usage: the same streamed or not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chats import chat, joined
from tests.support.scripted import ScriptedService


async def test_f12_n_choices_have_their_index_and_the_prompt_counts_once() -> None:
    service = ScriptedService("Hello.")
    one = (await chat(service, seed=5)).json()["usage"]
    body = (await chat(service, n=3, seed=5)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 3 * one["completion_tokens"]
    assert sorted(spec.sampling.seed for spec in service.specs[1:]) == [5, 6, 7]
    assert service.peak == 3


async def test_f12_n_choices_stream_with_their_index() -> None:
    answer = await chat(ScriptedService("Hello."), n=3, stream=True, stream_options={"include_usage": True})
    assert [joined(answer, "content", i) for i in range(3)] == ["Hello."] * 3
    assert answer.events()[-2]["usage"]["completion_tokens"] == 3 * 7


@pytest.mark.parametrize("n", [0, -1])
async def test_f12_n_below_one_is_refused(n: int) -> None:
    answer = await chat(ScriptedService(), n=n, stream=True)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": None}, {}])
async def test_f13_without_asking_no_chunk_has_empty_choices(options: Any) -> None:
    answer = await chat(ScriptedService("Hello."), stream=True, stream_options=options)
    assert all(event["choices"] for event in answer.events()[:-1])
    assert answer.events()[-1] == "[DONE]"


@pytest.mark.parametrize("warm", [False, True])
async def test_f13_usage_is_the_last_chunk_and_equal_in_both_modes(warm: bool) -> None:
    def service() -> ScriptedService:
        return ScriptedService("Hello.")

    a, b = service(), service()
    if warm:
        await chat(a)
        await chat(b)
    whole = (await chat(a)).json()["usage"]
    *_, last, done = (await chat(b, stream=True, stream_options={"include_usage": True})).events()
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == whole
    assert bool(whole["prompt_tokens_details"]["cached_tokens"]) == warm
