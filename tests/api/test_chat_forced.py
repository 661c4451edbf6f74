"""Chat completions whose reply is forced: tool choices and shapes, the same streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chats import CALL, WEATHER, chat
from tests.support.scripted import ScriptedService
from tests.support.tokens import THINKING


@pytest.mark.parametrize("choice", ["none", {"type": "function", "function": {"name": "other"}}])
async def test_f16_text_that_looks_like_a_forbidden_call_stays_text(choice: Any) -> None:
    service = ScriptedService(CALL, template=THINKING)
    other = {"type": "function", "function": {"name": "other"}}
    fields = {"tools": [WEATHER, other], "chat_template_kwargs": {"enable_thinking": False}, "tool_choice": choice}
    message = (await chat(service, **fields)).json()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert "weather" in message["content"]


async def test_f16_the_choice_reaches_the_turn_and_leaves_the_prompt_alone() -> None:
    service = ScriptedService("x", template=THINKING)
    for choice in ("auto", "none", "required", {"type": "function", "function": {"name": "weather"}}):
        assert (await chat(service, tools=[WEATHER], tool_choice=choice)).status == 200
    assert [spec.format.tool_choice for spec in service.specs] == ["auto", "none", "required", "weather"]
    assert len({spec.tokens for spec in service.specs}) == 1


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"tool_choice": "none"}, 200),
        ({"tool_choice": "required"}, 400),
        ({"tool_choice": "required", "tools": []}, 400),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": [WEATHER]}, 400),
        ({"tool_choice": "sometimes", "tools": [WEATHER]}, 400),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [WEATHER]}, 400),
        ({"tools": [WEATHER, WEATHER]}, 400),
    ],
)
async def test_f16_a_choice_that_cannot_be_met_is_refused(fields: dict[str, Any], status: int) -> None:
    assert (await chat(ScriptedService("x"), **fields)).status == status


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"guided_json": SCHEMA}, "json_schema"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema"),
        ({"guided_regex": "[ab]+"}, "regex"),
        ({"guided_choice": ["yes", "no"]}, "choice"),
        ({"guided_grammar": 'start: "a"'}, "lark"),
        ({"structured_outputs": {"regex": "a"}}, "regex"),
    ],
)
async def test_f17_every_way_to_ask_for_a_shape_reaches_the_turn(fields: dict[str, Any], kind: str) -> None:
    service = ScriptedService("x")
    assert (await chat(service, **fields)).status == 200
    grammar = service.specs[0].grammar
    assert grammar is not None
    assert grammar.kind == kind


async def test_f17_type_text_is_no_constraint() -> None:
    service = ScriptedService("x")
    assert (await chat(service, response_format={"type": "text"})).status == 200
    assert service.specs[0].grammar is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "text"}}},
        {"guided_choice": []},
        {"guided_regex": "a", "guided_choice": ["b"]},
    ],
)
async def test_f17_a_shape_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    assert (await chat(ScriptedService(), **fields)).status == 400
