"""Text completions without a socket."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http import Answer, Direct
from tests.support.scripted import Say, ScriptedService

COMPLETIONS = "/v1/completions"


async def complete(service: ScriptedService, **fields: Any) -> Answer:
    return await Direct(service).post(COMPLETIONS, {"prompt": "Once", "max_tokens": 50} | fields)


async def test_a_text_prompt_is_continued() -> None:
    body = (await complete(ScriptedService(" upon"))).json()
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", " upon")
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_token_ids_are_taken_as_they_are() -> None:
    service = ScriptedService("x")
    await complete(service, prompt=[5, 6, 7])
    assert service.specs[0].tokens == (5, 6, 7)


async def test_several_prompts_answer_side_by_side_and_count_each_prompt_once() -> None:
    service = ScriptedService("x")
    body = (await complete(service, prompt=["ab", [5, 6, 7]], n=2, return_token_ids=True)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [len(choice["prompt_token_ids"]) for choice in body["choices"]] == [2, 2, 3, 3]
    assert body["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_in_front(stream: bool) -> None:
    answer = await complete(ScriptedService(" upon"), echo=True, stream=stream)
    choices = [c for e in (answer.events()[:-1] if stream else [answer.json()]) for c in e["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Once upon"


async def test_f11_the_legacy_logprobs_shape_has_parallel_lists() -> None:
    text = "a😀b"
    body = (await complete(ScriptedService(text), logprobs=3)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in logprobs.values()} == {body["usage"]["completion_tokens"]}
    assert logprobs["tokens"][:3] == ["a", "bytes:\\xf0", "bytes:\\x9f"]
    assert logprobs["text_offset"][:6] == [0, 1, 1, 1, 1, 2]
    assert len(logprobs["top_logprobs"][0]) == 3


async def test_streamed_legacy_logprobs_join_to_the_whole() -> None:
    service = ScriptedService("a😀b")
    whole = (await complete(service, logprobs=1)).json()["choices"][0]["logprobs"]
    answer = await complete(service, logprobs=1, stream=True)
    parts = [c["logprobs"] for e in answer.events()[:-1] for c in e["choices"] if c["logprobs"]]
    assert {key: [x for part in parts for x in part[key]] for key in whole} == whole


async def test_without_a_limit_a_completion_has_sixteen_tokens() -> None:
    body = (await complete(ScriptedService(Say("x", ends=False)), max_tokens=None)).json()
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_makes_no_sense_or_is_not_offered_is_named(fields: Any, param: str) -> None:
    answer = await complete(ScriptedService(), **fields)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
