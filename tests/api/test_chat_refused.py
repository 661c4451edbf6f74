"""Chat completions that are refused, by name, and what a request may leave out or add."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chats import CHAT, HI, chat
from tests.support.http import Direct
from tests.support.scripted import ScriptedService


@pytest.mark.parametrize("name", ["acme/tiny-chat", "tiny-chat", "ACME/Tiny-Chat", None])
async def test_f19_the_served_model_answers_to_its_names_and_gives_its_own(name: str | None) -> None:
    assert (await chat(ScriptedService(), model=name)).json()["model"] == "acme/tiny-chat"


@pytest.mark.parametrize("name", ["", "gpt-4o", "../x", "acme"])
async def test_f19_any_other_name_is_not_found(name: str) -> None:
    answer = await chat(ScriptedService(), model=name)
    assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"messages": []}',
        b"{}",
        b'{"messages": "hi"}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": '
        + b"[" * 100
        + b"]" * 100
        + b"}}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/completions", "/v1/responses"])
async def test_f21_a_malformed_body_is_a_400_in_the_shape_of_its_api(path: str, body: bytes) -> None:
    answer = await Direct(ScriptedService()).post(path, body)
    assert answer.status == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert ("type" in answer.json()) == (path == "/v1/messages")


async def test_f21_another_content_type_is_a_400() -> None:
    answer = await Direct(ScriptedService()).post(CHAT, HI, {"content-type": "text/plain"})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "Content-Type")


async def test_f21_a_wrong_method_is_a_405_that_names_the_right_one() -> None:
    answer = await Direct(ScriptedService()).get(CHAT)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_f21_an_unknown_route_is_a_404() -> None:
    assert (await Direct(ScriptedService()).post("/v1/nothing", HI)).status == 404
    assert (await Direct(ScriptedService()).post("/v1/messages/nothing", HI)).json()["type"] == "error"


@pytest.mark.parametrize(
    "messages",
    [[{"role": "system", "content": "x"}], [*HI["messages"], {"role": "assistant", "content": "I"}]],
)
async def test_f21_a_system_only_or_assistant_last_request_is_served(messages: Any) -> None:
    assert (await chat(ScriptedService(), messages=messages)).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"best_of": 2}, "best_of"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
async def test_what_is_understood_but_not_offered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = (await chat(ScriptedService(), **fields)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported", param)
