"""The Responses API without a socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from onecopy.api.doors import Options

from tests.support.http import Answer, Direct
from tests.support.scripted import Say, ScriptedService
from tests.support.tokens import THINKING

RESPONSES = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


async def create(service: ScriptedService, **fields: Any) -> Answer:
    return await Direct(service).post(RESPONSES, {"input": "hi"} | fields)


def kinds(answer: Answer) -> list[str]:
    return [event["type"].removeprefix("response.") for event in answer.events()]


async def test_a_plain_response_has_one_message_and_usage() -> None:
    body = (await create(ScriptedService("Hello."))).json()
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "acme/tiny-chat")
    [item] = body["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]


async def test_g3_events_come_in_order_and_number() -> None:
    answer = await create(ScriptedService("Hi."), stream=True)
    assert kinds(answer) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in answer.events()] == list(range(11))
    assert answer.events()[-1]["response"]["output"][0]["content"][0]["text"] == "Hi."
    assert answer.body.startswith(b"event: response.created\ndata: ")
    assert b"[DONE]" not in answer.body


async def test_streamed_items_equal_those_of_the_whole_response() -> None:
    service = ScriptedService(f"hm</think>Look: {CALL}{CALL}", template=THINKING)
    whole = (await create(service, tools=[WEATHER])).json()
    streamed = await create(service, tools=[WEATHER], stream=True)
    done = [event["item"] for event in streamed.events() if event["type"] == "response.output_item.done"]
    final = streamed.events()[-1]["response"]["output"]

    def shape(items: list[dict[str, Any]]) -> list[Any]:
        return [(i["type"], i.get("content"), i.get("name"), i.get("arguments")) for i in items]

    assert shape(done) == shape(final) == shape(whole["output"])
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]
    assert len({item["id"] for item in done}) == 4
    deltas = [e["delta"] for e in streamed.events() if e["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)[: len("".join(deltas)) // 2]) == {"city": "Oslo"}


async def test_f5_a_cut_response_is_incomplete_and_says_why() -> None:
    service = ScriptedService(Say("word ", ends=False))
    body = (await create(service, max_output_tokens=5)).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert kinds(await create(service, max_output_tokens=5, stream=True))[-1] == "incomplete"


async def test_g3_a_response_is_kept_and_can_be_continued_retrieved_listed_and_deleted() -> None:
    client = Direct(service := ScriptedService("Hello."))
    first = (await client.post(RESPONSES, {"input": "hi", "instructions": "Be brief."})).json()
    path = f"{RESPONSES}/{first['id']}"
    again = {"input": "go on", "instructions": "Be brief.", "previous_response_id": first["id"]}
    second = (await client.post(RESPONSES, again)).json()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= len(service.seen[0][1]) - 1
    assert (await client.get(path)).json() == first
    [item] = (await client.get(path + "/input_items")).json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    assert (await client.request("DELETE", path)).json()["deleted"]
    assert (await client.get(path)).status == 404


async def test_g3_an_unknown_or_unstored_previous_response_is_never_ignored() -> None:
    client = Direct(ScriptedService("Hello."))
    unstored = (await client.post(RESPONSES, {"input": "hi", "store": False})).json()["id"]
    for id in ("resp_nope", unstored):
        answer = await client.post(RESPONSES, {"input": "hi", "previous_response_id": id})
        assert (answer.status, answer.json()["error"]["param"]) == (404, "previous_response_id")


async def test_g3_another_keys_response_is_as_absent_as_none() -> None:
    client = Direct(ScriptedService("Hello."), Options(keys=("a:key-a", "b:key-b")))
    a, b = ({"x-api-key": key} for key in ("key-a", "key-b"))
    id = (await client.post(RESPONSES, {"input": "hi"}, a)).json()["id"]
    assert (await client.get(f"{RESPONSES}/{id}", b)).status == 404
    assert (await client.post(RESPONSES, {"input": "x", "previous_response_id": id}, b)).status == 404
    assert (await client.get(f"{RESPONSES}/{id}", a)).status == 200


async def test_only_the_newest_responses_are_kept() -> None:
    client = Direct(ScriptedService("Hello."), Options(kept_responses=2))
    ids = [(await client.post(RESPONSES, {"input": "hi"})).json()["id"] for _ in range(3)]
    assert [(await client.get(f"{RESPONSES}/{id}")).status for id in ids] == [404, 200, 200]


async def test_g3_functions_are_kept_and_foreign_tools_are_skipped() -> None:
    service = ScriptedService("x", template=THINKING)
    tools = [WEATHER, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}, {"type": "custom"}]
    assert (await create(service, tools=tools)).status == 200
    assert [tool.name for tool in service.specs[0].format.tools] == ["weather"]


@pytest.mark.parametrize("input", ["", []])
async def test_g3_an_empty_probe_is_answered(input: Any) -> None:
    assert (await create(ScriptedService("x"), input=input, max_output_tokens=1)).status == 200


async def test_g3_a_tool_round_trip_by_items_reuses_the_first_turn() -> None:
    service = ScriptedService(f"Look: {CALL}", template=THINKING)
    first = (await create(service, tools=[WEATHER], **PLAIN)).json()
    call = next(item for item in first["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    items = [{"role": "user", "content": "hi"}, *first["output"], result]
    assert (await create(service, input=items, tools=[WEATHER], **PLAIN)).status == 200
    text = service.tokenizer.decode(service.specs[1].tokens)
    assert text.index("Look:") < text.index('"Oslo"') < text.index("rain")


async def test_instructions_and_developer_messages_are_both_rendered() -> None:
    service = ScriptedService("x")
    items = [{"type": "message", "role": "developer", "content": "Second."}, {"role": "user", "content": "hi"}]
    await create(service, input=items, instructions="First.")
    text = service.tokenizer.decode(service.specs[0].tokens)
    assert text.index("First.") < text.index("Second.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)
async def test_what_makes_no_sense_or_is_not_offered_is_named(fields: Any, param: str) -> None:
    answer = await create(ScriptedService(), **fields)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_f15_a_failure_in_the_stream_is_one_failed_event() -> None:
    answer = await create(ScriptedService(Say("Hello", fails_after=2)), stream=True)
    assert kinds(answer)[-1] == "failed"
    assert answer.events()[-1]["response"]["error"]["code"] == "internal_error"
    assert "completed" not in kinds(answer)


async def test_logprobs_come_when_they_are_asked_for() -> None:
    service = ScriptedService("Hi.")
    answer = await create(service, include=["message.output_text.logprobs"], top_logprobs=2, stream=True)
    deltas = [event for event in answer.events() if event["type"] == "response.output_text.delta"]
    assert all(len(event["logprobs"][0]["top_logprobs"]) == 2 for event in deltas)
