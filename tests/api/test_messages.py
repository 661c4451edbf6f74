"""Anthropic messages without a socket: conversion, events, counting."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http import Answer, Direct
from tests.support.scripted import ScriptedService
from tests.support.tokens import THINKING

MESSAGES = "/v1/messages"
HI: dict[str, Any] = {"max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BILLING = "x-anthropic-billing-header: cch="


async def send(service: ScriptedService, **fields: Any) -> Answer:
    return await Direct(service).post(MESSAGES, HI | fields)


def names(answer: Answer) -> list[str]:
    return [event["type"] for event in answer.events()]


async def test_a_plain_message_answers_in_the_anthropic_shape() -> None:
    body = (await send(ScriptedService("Hello."))).json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "acme/tiny-chat")
    assert body["content"] == [{"type": "text", "text": "Hello."}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["input_tokens"] > 0


async def test_g1_events_come_in_order_and_the_start_has_the_true_counts() -> None:
    service = ScriptedService("Hello.")
    await send(service)
    answer = await send(service, stream=True)
    kinds = names(answer)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start = answer.events()[0]["message"]["usage"]
    assert start["cache_read_input_tokens"] > 0
    assert start["input_tokens"] + start["cache_read_input_tokens"] == len(service.specs[0].tokens)
    delta = answer.events()[-2]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 7
    assert b"[DONE]" not in answer.body


async def test_g1_thinking_text_and_calls_are_blocks_with_rising_index() -> None:
    service = ScriptedService(f"hm</think>Look: {CALL}", template=THINKING)
    fields = {"tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 100}}
    whole = (await send(service, **fields)).json()
    answer = await send(service, stream=True, **fields)
    starts = [e for e in answer.events() if e["type"] == "content_block_start"]
    stops = [e["index"] for e in answer.events() if e["type"] == "content_block_stop"]
    assert [e["index"] for e in starts] == stops == [0, 1, 2]
    assert [e["content_block"]["type"] for e in starts] == ["thinking", "text", "tool_use"]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Oslo"}
    assert whole["stop_reason"] == "tool_use"
    deltas = [e["delta"] for e in answer.events() if e["type"] == "content_block_delta"]
    assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == {"city": "Oslo"}
    assert "".join(d.get("thinking", "") for d in deltas) == whole["content"][0]["thinking"] == "hm"
    assert "".join(d.get("text", "") for d in deltas) == whole["content"][1]["text"]


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
async def test_thinking_is_off_unless_it_was_asked_for(thinking: Any) -> None:
    service = ScriptedService("x", template=THINKING)
    await send(service, thinking=thinking)
    assert not service.specs[0].format.opened


async def test_f5_a_cut_reply_is_max_tokens_and_a_cut_call_is_not_shown() -> None:
    service = ScriptedService(f"Look: {CALL}", template=THINKING)
    body = (await send(service, tools=[WEATHER], max_tokens=50)).json()
    assert body["stop_reason"] == "max_tokens"
    assert [block["type"] for block in body["content"]] == ["text"]


async def test_a_stop_sequence_is_named() -> None:
    service = ScriptedService("one STOP two")
    body = (await send(service, stop_sequences=["STOP"])).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "STOP")
    assert body["content"] == [{"type": "text", "text": "one "}]


async def test_b1_a_billing_block_in_system_ends_no_shared_prefix() -> None:
    service = ScriptedService("Hello.")
    long = "You are a careful assistant. " * 20
    turns = [HI["messages"], [*HI["messages"], {"role": "assistant", "content": "Hello."}, *HI["messages"]]]
    for i, messages in enumerate(turns):
        system = [{"type": "text", "text": f"{BILLING}{i:08x};"}, {"type": "text", "text": long}]
        body = (await send(service, system=system, messages=messages)).json()
    assert body["usage"]["cache_read_input_tokens"] >= 0.9 * len(service.specs[0].tokens)
    assert BILLING not in service.tokenizer.decode(service.specs[0].tokens)


async def test_b1_the_same_text_elsewhere_is_seen_by_the_model() -> None:
    service = ScriptedService("Hello.")
    await send(service, messages=[{"role": "user", "content": [{"type": "text", "text": BILLING + "1"}]}])
    await send(service, system=[{"type": "text", "text": f"Mind this: {BILLING}2"}])
    texts = [service.tokenizer.decode(spec.tokens) for spec in service.specs]
    assert all(BILLING in text for text in texts)


@pytest.mark.parametrize("content", ["Note.", [{"type": "text", "text": "Note.", "cache_control": {"type": "x"}}]])
async def test_g2_a_system_role_inside_messages_is_kept_in_place(content: Any) -> None:
    service = ScriptedService("Hello.")
    messages = [*HI["messages"], {"role": "system", "content": content}, {"role": "user", "content": "go"}]
    headers = {"anthropic-beta": "made-up-2030-01-01"}
    body = HI | {"system": "Top.", "messages": messages}
    answer = await Direct(service).post(MESSAGES + "?beta=true", body, headers)
    assert answer.status == 200
    text = service.tokenizer.decode(service.specs[0].tokens)
    assert text.index("Top.") < text.index("hi") < text.index("Note.") < text.index("go")
    await send(service, system="Top.", messages=[*messages, {"role": "assistant", "content": "Hello."}, messages[0]])
    assert service.specs[1].tokens[: len(service.specs[0].tokens)] == service.specs[0].tokens


async def test_g3_counting_equals_the_message_and_starts_nothing() -> None:
    service = ScriptedService("Hello.", template=THINKING)
    body = {"system": "Be brief.", "tools": [WEATHER, WEATHER | {"name": "other"}], "messages": HI["messages"]}
    counted = (await Direct(service).post(MESSAGES + "/count_tokens", body)).json()["input_tokens"]
    assert service.specs == []
    usage = (await Direct(service).post(MESSAGES, body | {"max_tokens": 5})).json()["usage"]
    assert counted == usage["input_tokens"]


@pytest.mark.parametrize(("body", "status"), [({}, 400), ({"messages": HI["messages"], "model": "nope"}, 404)])
async def test_g3_counting_refuses_like_a_message(body: Any, status: int) -> None:
    assert (await Direct(ScriptedService()).post(MESSAGES + "/count_tokens", body)).status == status


async def test_tool_results_become_tool_messages_in_order() -> None:
    service = ScriptedService("Hello.", template=THINKING)
    messages = [
        *HI["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    assert (await send(service, messages=messages, tools=[WEATHER])).status == 200
    text = service.tokenizer.decode(service.specs[0].tokens)
    assert text.index('"weather"') < text.index("tool\nrain") < text.index("user\nand now?")


async def test_f7_an_assistant_turn_of_one_call_is_kept() -> None:
    service = ScriptedService("Hello.", template=THINKING)
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    messages = [*HI["messages"], {"role": "assistant", "content": [call]}]
    assert (await send(service, messages=messages)).status == 200


async def test_a_last_assistant_message_is_continued() -> None:
    service = ScriptedService("x")
    await send(service, messages=[*HI["messages"], {"role": "assistant", "content": "{ "}])
    assert service.tokenizer.decode(service.specs[0].tokens).endswith("assistant\n{")


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, "weather"),
    ],
)
async def test_f16_tool_choice_reaches_the_turn(choice: Any, found: str) -> None:
    service = ScriptedService("x", template=THINKING)
    chosen = choice | {"disable_parallel_tool_use": True}
    assert (await send(service, tools=[WEATHER], tool_choice=chosen)).status == 200
    assert service.specs[0].format.tool_choice == found
    assert not service.specs[0].format.parallel


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "nope"}, "tools": [WEATHER]},
        {"temperature": 1.5},
        {"mcp_servers": [{"url": "x"}]},
        {"container": "c_1"},
    ],
)
async def test_f21_what_makes_no_sense_is_a_400_in_the_anthropic_shape(fields: Any) -> None:
    answer = await send(ScriptedService(), **fields)
    assert answer.status == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_output_format_becomes_a_grammar() -> None:
    service = ScriptedService("x")
    await send(service, output_format={"type": "json_schema", "schema": {"type": "object"}})
    grammar = service.specs[0].grammar
    assert grammar is not None
    assert json.loads(grammar.text) == {"type": "object"}
