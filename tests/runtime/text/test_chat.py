"""Prompts: what a template is given, what it may do, and that a growing conversation keeps its beginning."""

from __future__ import annotations

from typing import Any

import pytest
from onecopy.runtime.errors import BadRequest, ModelLoadError, Unsupported
from onecopy.runtime.text.chat import ChatFormat
from onecopy.runtime.text.messages import clean, normalised, tools_in_text
from onecopy.runtime.turn import Tool

from tests.support.tokens import CHATML, THINKING, byte_tokenizer

TOOL = Tool("find", "Finds.", {"type": "object", "properties": {"q": {"type": "string"}}})
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}


def chat(template: str = CHATML, **more: Any) -> ChatFormat:
    return ChatFormat(byte_tokenizer(template), **more)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_a_prompt_ends_where_the_reply_begins() -> None:
    assert chat().render([user("Hi")]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat().render([user("Hi")], add_generation_prompt=False).endswith("Hi<|im_end|>\n")


def test_control_tokens_of_the_template_are_single_ids() -> None:
    form = chat()
    tokenizer = byte_tokenizer()
    ids = form.tokens([user("é")])
    assert ids.count(tokenizer.token_id("<|im_start|>")) == 2
    assert tokenizer.decode(ids, special=True) == form.render([user("é")])


def test_the_templates_own_first_token_is_the_only_one() -> None:
    form = chat("<|im_start|>{{ messages[0].content }}")
    tokenizer = byte_tokenizer()
    assert form.tokens([user("a")]) == [tokenizer.token_id("<|im_start|>"), *tokenizer.encode("a")]


TALK = [
    {"role": "system", "content": "Be brief."},
    user("one"),
    said("1\n\n"),
    user([{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]),
    said(None, tool_calls=[CALL]),
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
    said("done"),
]


@pytest.mark.parametrize("template", [CHATML, THINKING], ids=["chatml", "thinking"])
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["plain", "tools"])
def test_a_growing_conversation_keeps_its_beginning(template: str, tools: tuple[Tool, ...]) -> None:
    form = chat(template)
    for n in range(2, len(TALK)):
        if TALK[n]["role"] == "tool" or (n > 0 and TALK[n - 1]["role"] == "tool"):
            continue
        before = form.tokens(TALK[:n], tools, add_generation_prompt=False)
        after = form.tokens(TALK[: n + 1], tools, add_generation_prompt=False)
        assert after[: len(before)] == before


def test_private_keys_change_nothing() -> None:
    noisy = [{**m, "x-private": 1, "cache_control": {"type": "ephemeral"}} for m in TALK]
    noisy[4] = {**noisy[4], "tool_calls": [{**CALL, "index": 0, "extra": {"a": 1}}]}
    assert chat(THINKING).tokens(noisy, (TOOL,)) == chat(THINKING).tokens(TALK, (TOOL,))


def test_a_reply_sent_back_trimmed_keeps_everything_before_the_trim() -> None:
    form = chat()
    sent, trimmed = (form.tokens([user("a"), said(text), user("b")]) for text in ("yes\n\n", "yes"))
    common = next(i for i, (a, b) in enumerate(zip(sent, trimmed, strict=False)) if a != b)
    assert byte_tokenizer().decode(sent[:common], special=True).endswith("assistant\nyes")


def test_thinking_stays_inside_a_tool_loop_and_goes_with_the_next_question() -> None:
    form = chat(THINKING)
    loop = [user("q"), said(None, reasoning_content="hm", tool_calls=[CALL]), {"role": "tool", "content": "r"}]
    inside = form.render(loop, (TOOL,))
    assert "<think>\nhm\n</think>" in inside
    assert "hm" not in form.render([*loop, said("done"), user("next")], (TOOL,))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_is_found_under_every_name_clients_use(key: str) -> None:
    assert "hm" in chat(THINKING).render([user("q"), said("a", **{key: "hm"})])


def test_developer_messages_are_system_messages_and_the_first_ones_are_one() -> None:
    found = normalised([{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, user("q")])
    assert found == [{"role": "system", "content": "a\n\nb"}, user("q")]


def test_parts_are_joined_and_null_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = normalised([user(parts), said(parts), said(None)])
    assert [m["content"] for m in found] == ["a\nb", "ab", ""]


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        ('{"q": 1}', {"q": 1}),
        ({"q": 1}, {"q": 1}),
        ("", {}),
        (None, {}),
        ('{"q": ', {"raw": '{"q": '}),
        ("[1]", {"raw": [1]}),
        ("[" * 100_000, {"raw": "[" * 100_000}),
    ],
)
def test_arguments_are_an_object_for_templates_whatever_was_sent(arguments: Any, known: Any) -> None:
    call = {"function": {"name": "find", "arguments": arguments}}
    message = normalised([said(None, tool_calls=[call])])[0]
    assert message["tool_calls"][0]["function"]["arguments"] == known


def test_lone_surrogates_cannot_reach_the_tokenizer() -> None:
    assert clean("a\ud800b \ud83d\ude00") == "a\ufffdb \U0001f600"
    assert chat().tokens([user("\ud800")])


@pytest.mark.parametrize(
    ("message", "error", "param"),
    [
        ({"content": "x"}, BadRequest, "messages[1].role"),
        (user(3), BadRequest, "messages[1].content"),
        (user([{"type": "image_url", "image_url": {}}]), Unsupported, "messages[1].content[0]"),
        (user([{"type": "text"}]), BadRequest, "messages[1].content[0]"),
        (said(None, tool_calls=[{"id": "x"}]), BadRequest, "messages[1].tool_calls[0].function"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: Any, error: type[BadRequest], param: str) -> None:
    with pytest.raises(error) as caught:
        chat().render([user("ok"), message])
    assert caught.value.param == param


def test_an_empty_chat_is_refused() -> None:
    with pytest.raises(BadRequest):
        chat().render([])


def test_messages_are_not_changed() -> None:
    message = said(None, tool_calls=[CALL])
    chat().render([user("q"), message], (TOOL,))
    assert message == said(None, tool_calls=[CALL])


def test_a_template_without_tools_has_them_in_the_system_message() -> None:
    text = chat().render([{"role": "system", "content": "Be brief."}, user("q")], (TOOL,))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '"name": "find"' in text
    assert chat().tool_format_name == "json_tools"


def test_calls_and_results_are_text_for_a_template_without_tools() -> None:
    results = [{"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"}]
    found = tools_in_text(normalised([said("ok", tool_calls=[CALL]), *results, user("q")]), ())
    assert [m["role"] for m in found] == ["assistant", "user", "user"]
    assert found[0]["content"] == 'ok\n<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>'
    assert found[1]["content"] == "<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>"


def test_a_template_with_tools_gets_them() -> None:
    text = chat(THINKING).render([user("q")], (TOOL,))
    assert '{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters"' in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{% for i in range(1000000) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 100000000 }}", "too large"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception.__globals__['x'] }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "Recursion"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_a_bad_request(source: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        chat(source).render([user("q")])
    assert caught.value.param == "messages"


def test_a_template_that_does_not_parse_stops_the_start() -> None:
    with pytest.raises(ModelLoadError, match="template"):
        chat("{% if %}")


def test_a_tokenizer_without_template_has_no_chat() -> None:
    with pytest.raises(Unsupported):
        ChatFormat(byte_tokenizer(None))


def test_template_variables_come_from_the_tokenizer_and_the_request() -> None:
    form = chat("{{ eos_token }}{{ enable_thinking }}{{ tools is none }}")
    assert form.render([user("q")], kwargs={"enable_thinking": False}) == "<|im_end|>FalseTrue"


def test_a_request_cannot_replace_the_messages() -> None:
    with pytest.raises(BadRequest) as caught:
        chat().render([user("q")], kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_json_in_a_prompt_is_not_escaped_for_html() -> None:
    assert chat("{{ messages[0].content | tojson }}").render([user("<é>&'")]) == '"<é>&\'"'
    assert chat("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}").render([user("q")]) == '{\n "b": 1,\n "a": 2\n}'


def test_the_date_comes_from_the_clock_that_was_given() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') }}{% else %}none{% endif %}"
    assert chat(source, wall=lambda: 86_400.0).render([user("q")]) == "1970-01-02"
    assert chat(source).render([user("q")]) == "none"


def test_training_marks_and_loop_controls_render() -> None:
    source = "{% generation %}a{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}b"
    assert chat(source).render([user("q")]) == "ab"


def test_what_a_template_says_about_thinking() -> None:
    thinking = chat(THINKING)
    assert thinking.tags is not None
    assert (thinking.tags.open, thinking.tags.close) == ("<think>", "</think>")
    assert thinking.thinking_opened_by_prompt
    off = thinking.render([user("q")], kwargs={"enable_thinking": False})
    assert not thinking.opened_by(off)
    assert thinking.tool_format_name == "json_tools"


def test_a_tag_in_the_users_text_opens_nothing() -> None:
    form = chat(THINKING)
    assert not form.opened_by(form.render([user("<think>")], add_generation_prompt=False))


def test_a_template_whose_tool_format_is_unknown_has_none() -> None:
    assert chat("{{ tools }}").tool_format is None


def test_messages_start_at_the_control_token_that_a_longer_chat_has_more_of() -> None:
    form, opener = chat(), byte_tokenizer().token_id("<|im_start|>")
    tokens = form.tokens(TALK)
    starts = form.starts(tokens)
    assert form.opener == opener
    assert len(starts) == tokens.count(opener) - 1
    before = form.tokens(TALK[:4], add_generation_prompt=False)
    assert len(before) in starts
    assert tokens[: len(before)] == before


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content }}\n{% endfor %}", "{{ raise_exception('no') }}"]
)
def test_a_template_without_such_a_token_has_no_starts(template: str) -> None:
    form = chat(template)
    assert form.opener is None
    assert form.starts(form.tokens([user("a")]) if "for" in template else [1, 2]) == ()
