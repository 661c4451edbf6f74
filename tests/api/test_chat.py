"""Chat completions without a socket: fields, shapes, and one answer whether it is streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chats import CALL, HI, WEATHER, chat, joined, reasons, streamed_calls
from tests.support.scripted import Say, ScriptedService
from tests.support.tokens import THINKING


async def test_a_plain_chat_answers_in_the_openai_shape() -> None:
    body = (await chat(ScriptedService("Hello."))).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "acme/tiny-chat"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]


async def test_every_response_says_what_was_reused() -> None:
    service = ScriptedService("Hello.")
    await chat(service)
    answer = await chat(service)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert answer.json()["onecopy"]["rows_adopted"] == usage["prompt_tokens"] - 1
    assert answer.headers["x-onecopy-how"] == "adopted"
    assert answer.headers["x-onecopy-token-sha"] == answer.json()["onecopy"]["token_sha"]


@pytest.mark.parametrize("text", ["Hello.", "👨‍👩‍👧 and 🇳🇴", "漢字 e\u0301", "", "a\n\nb\n\n"])
async def test_f2_joined_deltas_equal_the_whole_reply(text: str) -> None:
    service = ScriptedService(text)
    whole = (await chat(service)).json()["choices"][0]["message"]["content"]
    streamed = await chat(service, stream=True)
    assert joined(streamed, "content") == whole == text
    assert "\ufffd" not in streamed.body.decode()


async def test_f2_bytes_that_are_no_text_become_one_replacement_and_nothing_breaks() -> None:
    service = ScriptedService(Say(b"a\xff\xf0\x9f\x98"))
    assert joined(await chat(service, stream=True), "content") == "a\ufffd\ufffd"


async def test_f2_a_reply_cut_inside_a_character_ends_in_one_replacement() -> None:
    service = ScriptedService("a😀")
    answer = await chat(service, stream=True, max_tokens=3)
    assert joined(answer, "content") == "a\ufffd"
    assert reasons(answer) == ["length"]


async def test_f4_two_calls_stream_with_their_own_index_id_and_valid_arguments() -> None:
    second = CALL.replace("Oslo", 'a \\"quoted\\" \\n 😀 </tool_call> city')
    service = ScriptedService(f"Let me look.\n{CALL}\n{second}", template=THINKING)
    fields = {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": False}}
    whole = (await chat(service, **fields)).json()["choices"][0]
    streamed = await chat(service, stream=True, **fields)
    calls = streamed_calls(streamed)
    assert sorted(calls) == [0, 1]
    assert all(len(call["ids"]) == 1 and call["names"] == ["weather"] for call in calls.values())
    assert calls[0]["ids"] != calls[1]["ids"]
    assert [json.loads(calls[i]["arguments"]) for i in (0, 1)] == [
        json.loads(call["function"]["arguments"]) for call in whole["message"]["tool_calls"]
    ]
    assert json.loads(calls[1]["arguments"])["city"] == 'a "quoted" \n 😀 </tool_call> city'
    assert reasons(streamed) == ["tool_calls"] == [whole["finish_reason"]]
    assert joined(streamed, "content") == whole["message"]["content"]


async def test_f4_a_call_without_text_has_null_content() -> None:
    service = ScriptedService(CALL, template=THINKING)
    fields = {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": False}}
    choice = (await chat(service, **fields)).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1


async def test_f4_parallel_tool_calls_false_gives_one_call_at_most() -> None:
    service = ScriptedService(CALL + CALL, template=THINKING)
    fields = {"tools": [WEATHER], "parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False}}
    assert len((await chat(service, **fields)).json()["choices"][0]["message"]["tool_calls"]) == 1
    assert list(streamed_calls(await chat(service, stream=True, **fields))) == [0]


@pytest.mark.parametrize("length", [5, 60, 78 + 30])
async def test_f5_a_reply_cut_by_length_says_so_and_shows_only_whole_calls(length: int) -> None:
    service = ScriptedService(f"Looking.{CALL}{CALL}", template=THINKING)
    fields = {"tools": [WEATHER], "max_tokens": length, "chat_template_kwargs": {"enable_thinking": False}}
    body = (await chat(service, **fields)).json()
    streamed = await chat(service, stream=True, **fields)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert reasons(streamed) == ["length"]
    assert body["usage"]["completion_tokens"] == length
    for call in choice["message"].get("tool_calls", ()):
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


async def test_f5_a_reply_cut_inside_thinking_is_all_thinking() -> None:
    service = ScriptedService("I wonder</think>Yes.", template=THINKING)
    choice = (await chat(service, max_tokens=4)).json()["choices"][0]
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


OPTIONAL = [
    *["temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "tools", "tool_choice"],
    *["response_format", "stream_options", "logprobs", "top_logprobs", "n", "user", "model", "stream"],
    *["logit_bias", "parallel_tool_calls", "priority", "draft"],
]


@pytest.mark.parametrize("field", OPTIONAL)
async def test_f7_null_is_absent(field: str) -> None:
    service = ScriptedService("Hello.")
    assert (await chat(service, **{field: None})).status == 200
    await chat(service)
    a, b = service.specs
    assert (a.tokens, a.max_new, a.format, a.grammar) == (b.tokens, b.max_new, b.format, b.grammar)


@pytest.mark.parametrize(
    "fields",
    [{"store": True}, {"metadata": {"a": "b"}}, {"service_tier": "auto"}, {"prompt_cache_key": "k"}, {"made_up": [1]}],
)
async def test_f7_fields_nobody_knows_change_nothing(fields: dict[str, Any]) -> None:
    service = ScriptedService("Hello.")
    assert (await chat(service, **fields)).status == 200
    await chat(service)
    assert service.specs[0].tokens == service.specs[1].tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"n": 1.5}, "n"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"temperature": 2.5}, "temperature"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"n": 65}, "n"),
    ],
)
async def test_f7_a_wrong_type_or_range_is_named_by_its_path(fields: dict[str, Any], param: str) -> None:
    answer = await chat(ScriptedService(), **fields)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_f7_an_assistant_message_with_calls_keeps_its_prompt_whatever_empty_content_it_has() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    service = ScriptedService("Hello.", template=THINKING)
    for content in ({"content": None}, {"content": ""}, {}):
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
        assert (await chat(service, messages=messages)).status == 200
    prompts = {spec.tokens for spec in service.specs}
    assert len(prompts) == 1
    assert "Oslo" in service.tokenizer.decode(prompts.pop())


async def test_b2_unknown_keys_inside_history_change_no_token() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    service = ScriptedService("Hello.", template=THINKING)
    for extra in ({}, {"private": 1}):
        messages = [
            {"role": "user", "content": "hi", **extra},
            {"role": "assistant", "content": "x", "tool_calls": [call | extra], **extra},
            {"role": "tool", "tool_call_id": "c1", "content": "y"},
        ]
        assert (await chat(service, messages=messages)).status == 200
    assert service.specs[0].tokens == service.specs[1].tokens


async def test_b2_history_sent_back_trimmed_reuses_all_tokens_before_the_difference() -> None:
    service = ScriptedService("A longer answer.\n\n")
    first = HI["messages"]
    await chat(service)
    said = {"role": "assistant", "content": "A longer answer."}
    body = (await chat(service, messages=[*first, said, {"role": "user", "content": "go on"}])).json()
    kept = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert kept == len(service.specs[0].tokens) + len(service.tokenizer.encode("A longer answer."))


async def test_b3_thinking_that_the_template_drops_is_reused_up_to_where_it_stood() -> None:
    service = ScriptedService("hm</think>\n\nYes.", template=THINKING)
    await chat(service)
    said = {"role": "assistant", "content": "Yes."}
    messages = [*HI["messages"], said, {"role": "user", "content": "go on"}]
    kept = (await chat(service, messages=messages)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    first = service.specs[0].tokens
    assert kept >= len(first) - len(service.tokenizer.encode("<think>\n"))
    assert kept < len(first)


async def test_b3_inside_a_tool_loop_reuse_is_complete() -> None:
    service = ScriptedService(f"hm\n</think>\n\n\n{CALL}", template=THINKING)
    message = (await chat(service, tools=[WEATHER])).json()["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "hm"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    sent = message | {"reasoning_content": message["reasoning_content"].strip(), "content": None}
    await chat(service, tools=[WEATHER], messages=[*HI["messages"], sent, result])
    first, second = service.specs
    reply = service.seen[0][1][len(first.tokens) :]
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert service.tokenizer.decode(second.tokens[len(first.tokens) :]).startswith("hm\n</think>")
    assert reply[0] == second.tokens[len(first.tokens)]


@pytest.mark.parametrize("role", ["system", "user"])
async def test_f8_parts_are_joined_in_order_and_equal_the_string(role: str) -> None:
    service = ScriptedService()
    end = [{"role": "user", "content": "go"}]
    forms: list[Any] = [
        "one two three",
        [{"type": "text", "text": "one two three"}],
        [{"type": "text", "text": part} for part in ("one ", "two ", "three")],
    ]
    for content in forms:
        assert (await chat(service, messages=[{"role": role, "content": content}, *end])).status == 200
    assert len({spec.tokens for spec in service.specs}) == 1


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "text", "text": 5}], "messages[0].content[0].text"),
        ([{"type": "text", "text": ["a"]}], "messages[0].content[0].text"),
        ([{"type": "text", "text": "a"}, {"type": "hologram"}], "messages[0].content[1].type"),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "messages[0].content[0]"),
        ([["a"]], "messages[0].content[0]"),
    ],
)
async def test_f8_a_malformed_or_foreign_part_is_refused_by_its_path(content: Any, param: str) -> None:
    answer = await chat(ScriptedService(), messages=[{"role": "user", "content": content}])
    assert answer.status == 400
    assert answer.json()["error"]["param"] == param


async def test_f9_developer_is_rendered_as_system() -> None:
    service = ScriptedService()
    for role in ("system", "developer"):
        await chat(service, messages=[{"role": role, "content": "Be brief."}, *HI["messages"]])
    assert service.specs[0].tokens == service.specs[1].tokens
    assert "Be brief." in service.tokenizer.decode(service.specs[1].tokens)


async def test_f9_an_unknown_role_is_named() -> None:
    answer = await chat(ScriptedService(), messages=[{"role": "banana", "content": "hi"}])
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "messages[0].role"


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": 8}, 8),
        ({"max_tokens": 8, "max_completion_tokens": 9}, 9),
    ],
)
async def test_f10_the_newer_limit_wins_and_hitting_it_is_length(fields: dict[str, int], limit: int) -> None:
    service = ScriptedService(Say("word ", ends=False))
    body = (await chat(service, **fields)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == limit


@pytest.mark.parametrize("fields", [{}, {"max_completion_tokens": 1_000_000}])
async def test_f10_without_a_limit_or_beyond_it_the_context_is_the_limit(fields: dict[str, int]) -> None:
    service = ScriptedService(Say("word ", ends=False), context=64)
    usage = (await chat(service, **fields)).json()["usage"]
    assert usage["total_tokens"] == 64


@pytest.mark.parametrize("value", [0, -1, "8"])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_f10_a_limit_below_one_is_refused(field: str, value: Any) -> None:
    answer = await chat(ScriptedService(), **{field: value})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("top", [0, 3, 20])
@pytest.mark.parametrize("stream", [False, True])
async def test_f11_one_logprob_item_per_delivered_token(top: int, stream: bool) -> None:
    service = ScriptedService("ok 😀")
    answer = await chat(service, logprobs=True, top_logprobs=top, stream=stream, return_token_ids=True)
    if stream:
        choices = [c for event in answer.events()[:-1] for c in event["choices"]]
        items = [item for c in choices if c["logprobs"] for item in c["logprobs"]["content"]]
        tokens = [token for c in choices for token in c.get("token_ids", ())]
    else:
        [choice] = answer.json()["choices"]
        items, tokens = choice["logprobs"]["content"], choice["token_ids"]
    assert len(items) == len(tokens) == len("ok 😀".encode()) + 1
    assert b"".join(bytes(item["bytes"]) for item in items) == "ok 😀".encode()
    assert all(len(item["top_logprobs"]) == top for item in items)
    assert set(items[0]) == {"token", "logprob", "bytes", "top_logprobs"}


@pytest.mark.parametrize("fields", [{"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 3}])
async def test_f11_logprobs_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    answer = await chat(ScriptedService(), **fields)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("text", ["I think</think>The answer", "a</thi</think>b `</think>` c", "never closed"])
async def test_f18_thinking_and_answer_split_the_same_streamed_and_not(text: str) -> None:
    service = ScriptedService(text, template=THINKING)
    message = (await chat(service)).json()["choices"][0]["message"]
    streamed = await chat(service, stream=True)
    thought, _, answer = text.partition("</think>")
    assert joined(streamed, "reasoning_content") == message["reasoning_content"] == thought
    assert joined(streamed, "content") == message["content"] == answer


async def test_a_continued_message_is_the_beginning_of_the_reply() -> None:
    service = ScriptedService("hello")
    messages = [*HI["messages"], {"role": "assistant", "content": "I say: "}]
    assert (await chat(service, messages=messages, continue_final_message=True)).status == 200
    assert service.tokenizer.decode(service.specs[0].tokens).endswith("I say: ")


async def test_sampling_fields_reach_the_turn() -> None:
    service = ScriptedService("x")
    fields = {
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "seed": 2**63,
        "stop": ["END", ""],
        "priority": "background",
        "draft": False,
        "ignore_eos": True,
        "prompt_cache_key": "k",
        "max_tokens": 2,
    }
    assert (await chat(service, **fields)).status == 200
    [spec] = service.specs
    assert spec.sampling.seed == 2**63
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k) == (0.3, 0.9, 40)
    assert (spec.sampling.min_p, spec.sampling.repetition_penalty) == (0.1, 1.1)
    assert (spec.sampling.presence_penalty, spec.sampling.frequency_penalty) == (0.5, -0.5)
    assert spec.sampling.logit_bias == ((5, -100.0),)
    assert spec.format.stop == ("END",)
    assert (spec.priority, spec.draft, spec.ignore_eos, spec.hint) == ("background", False, True, "k")


async def test_f23_unseeded_requests_draw_a_seed_each_and_report_it() -> None:
    service = ScriptedService("x")
    seeds = {(await chat(service, **fields)).json()["onecopy"]["seed"] for fields in ({}, {"seed": -1}, {"seed": 0})}
    assert len(seeds) == 3
    assert 0 in seeds
    assert all(seed < 2**53 for seed in seeds)
