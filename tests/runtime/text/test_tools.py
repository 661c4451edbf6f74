"""Tool calls: what is a call, what stays text, and what a client may never see."""

from __future__ import annotations

import json
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.text.formats import tool_format
from onecopy.runtime.text.spans import Span
from onecopy.runtime.text.tools import Calls
from onecopy.runtime.turn import Tool

from tests.support.tokens import cut

WEATHER = Tool(
    "weather", "", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
)
WRITE = Tool("write", "", {"type": "object", "properties": {"text": {"type": "string"}}})
TOOLS = (WEATHER, WRITE)


class Outcome:
    """A whole reply's text and calls, and its spans as they came."""

    def __init__(self, calls: Calls, parts: list[str], finished: bool = True) -> None:
        self.spans: list[Span] = [s for part in parts for s in calls.feed(part)] + calls.flush(cut=not finished)
        self.complete = calls.complete
        self.open = calls.open
        self.text = "".join(s.text for s in self.spans if s.kind == "text")
        self.raw = sum(s.raw for s in self.spans)

    @property
    def calls(self) -> list[tuple[str | None, str]]:
        names = [s.name for s in self.spans if s.name is not None]
        joined = [""] * len(names)
        for span in self.spans:
            if span.kind == "call":
                joined[span.index] += span.text
        return list(zip(names, joined, strict=True))

    @property
    def ids(self) -> list[str | None]:
        return [s.id for s in self.spans if s.name is not None]


def run(parts: str | list[str], *, style: str = "json_tools", finished: bool = True, parallel: bool = True) -> Outcome:
    ids = count()
    calls = Calls(tool_format(style), TOOLS, parallel=parallel, new_id=lambda: f"call_{next(ids)}")
    return Outcome(calls, [parts] if isinstance(parts, str) else parts, finished)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


HARD = 'He said "hi"\n\\n \U0001f600 </tool_call> <tool_call> {}'


@pytest.mark.parametrize("before", ["", "Let me look.\n\n"])
def test_two_calls_have_their_own_index_and_id(before: str) -> None:
    out = run(list(before + call("weather", city="Oslo", days=2) + "\n" + call("write", text=HARD)))
    assert out.text == before.rstrip()
    assert [(n, json.loads(a)) for n, a in out.calls] == [
        ("weather", {"city": "Oslo", "days": 2}),
        ("write", {"text": HARD}),
    ]
    assert out.ids == ["call_0", "call_1"]
    assert out.complete == 2


def test_arguments_come_while_they_are_written() -> None:
    calls = Calls(tool_format("json_tools"), TOOLS, new_id=lambda: "id")
    head = list(calls.feed('<tool_call>\n{"name": "write", "arguments": {"text": "on'))
    assert [(s.name, s.text) for s in head if s.kind == "call"] == [("write", ""), (None, '{"text": "on')]
    assert [s.text for s in calls.feed("ce upon")] == ["ce upon"]


def test_a_name_is_said_once() -> None:
    out = run(list(call("write", text="a")))
    assert [s.name for s in out.spans if s.kind == "call" and (s.name or s.id)] == ["write"]


@pytest.mark.parametrize(
    "text",
    [
        call("unknown", a=1),
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "write"',
        '<tool_call>{"name": "write", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {"text": NaN}, "name": "write"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call></tool_call>",
        "<tool_cal",
        "a <tool_call> is a tag. ",
    ],
)
def test_what_is_no_call_of_a_known_tool_comes_back_as_text(text: str) -> None:
    for parts in ([text], list(text)):
        out = run(parts)
        assert (out.text, out.calls, out.complete) == (text, [], 0)


@pytest.mark.parametrize(
    "body",
    [
        '{"arguments": {"text": "</tool_call>"}, "name": "write"}',
        '{"name": "write", "arguments": "{\\"text\\": \\"</tool_call>\\"}"}',
        '{"name": "write", "parameters": {"text": "</tool_call>"}}',
        '  {"id": 1, "name": "write", "arguments": {"text": "</tool_call>"}, "more": [2]}  ',
    ],
)
def test_other_spellings_of_a_call_are_read(body: str) -> None:
    for parts in ([f"<tool_call>{body}</tool_call>"], list(f"<tool_call>{body}</tool_call>")):
        out = run(parts)
        assert [(n, json.loads(a)) for n, a in out.calls] == [("write", {"text": "</tool_call>"})]
        assert out.text == ""


def test_a_list_of_calls_is_several_calls() -> None:
    body = '[{"name": "write", "arguments": {}}, {"name": "weather", "arguments": {"days": "3"}}]'
    assert run(f"<tool_call>{body}</tool_call>").calls == [("write", "{}"), ("weather", '{"days": 3}')]


def test_text_after_a_malformed_call_and_later_calls_survive() -> None:
    out = run(list("<tool_call>oops</tool_call> and " + call("write", text="a")))
    assert out.text == "<tool_call>oops</tool_call> and"
    assert out.complete == 1


def test_a_call_that_breaks_after_it_was_announced_is_never_complete() -> None:
    text = '<tool_call>{"name": "write", "arguments": {"text": "a", oops}}</tool_call>'
    out = run(list(text))
    assert out.text == text
    assert (out.complete, out.open) == (0, True)
    with pytest.raises(ValueError):
        json.loads(out.calls[0][1])
    assert out.raw == len(text)


def test_a_repeated_member_breaks_the_call() -> None:
    out = run('<tool_call>{"name": "write", "arguments": {"text": "a"}, "arguments": {"text": "b"}}</tool_call>')
    assert (out.complete, out.open) == (0, True)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("style", ["json_tools", "qwen3_coder", "glm47"])
def test_a_call_cut_anywhere_is_never_complete(style: str, finished: bool) -> None:
    text = {
        "json_tools": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}',
        "qwen3_coder": "<tool_call>\n<function=write>\n<parameter=text>\nhi\n</parameter>\n</functio",
        "glm47": "<tool_call>write<arg_key>text</arg_key><arg_value>hi</arg_value>",
    }[style]
    for at in range(len(text) + 1):
        out = run(list(text[:at]), style=style, finished=finished)
        assert out.complete == 0
        for _, arguments in out.calls:
            with pytest.raises(ValueError):
                json.loads(arguments)
        assert out.raw == at


@pytest.mark.parametrize("finished", [True, False])
def test_only_a_reply_the_model_ended_may_lack_the_end_mark(finished: bool) -> None:
    out = run(list('<tool_call>{"name": "write", "arguments": {"text": "a"}}'), finished=finished)
    assert out.complete == int(finished)
    assert out.open == (not finished)


def test_a_cut_in_a_second_call_leaves_the_first_complete() -> None:
    out = run(call("write", text="a") + '\n<tool_call>\n{"name": "write", "arguments": {"te', finished=False)
    assert (out.complete, out.open, len(out.calls)) == (1, True, 2)


def test_without_parallel_calls_there_is_at_most_one() -> None:
    ids = count()
    calls = Calls(tool_format("json_tools"), TOOLS, parallel=False, new_id=lambda: str(next(ids)))
    list(calls.feed(call("write", text="a")))
    assert calls.done


def test_a_list_of_calls_without_parallel_calls_gives_one() -> None:
    body = '[{"name": "write", "arguments": {}}, {"name": "weather", "arguments": {}}]'
    assert run(f"<tool_call>{body}</tool_call>", parallel=False).calls == [("write", "{}")]


STYLES = {
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo </tool_call>\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo </tool_call></arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo </tool_call></parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo </tool_call><|"|>,days:2}<tool_call|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo </tool_call>", "days": "2"}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo </tool_call>", "days": 2}',
    "pythonic": '<|tool_call_start|>[weather(city="Oslo </tool_call>", days=2)]<|tool_call_end|>',
    "longcat": "<longcat_tool_call>weather<longcat_arg_key>city</longcat_arg_key>"
    "<longcat_arg_value>Oslo </tool_call></longcat_arg_value><longcat_arg_key>days</longcat_arg_key>"
    "<longcat_arg_value>2</longcat_arg_value></longcat_tool_call>",
}


@pytest.mark.parametrize("style", STYLES)
def test_every_format_is_read_in_any_split(style: str) -> None:
    text = "Sure.\n" + STYLES[style]
    for parts in ([text], list(text)):
        out = run(parts, style=style)
        assert [(n, json.loads(a)) for n, a in out.calls] == [("weather", {"city": "Oslo </tool_call>", "days": 2})]
        assert out.text == "Sure."
        assert out.raw == len(text)


def test_a_format_without_end_mark_reads_calls_one_after_the_other() -> None:
    text = '[TOOL_CALLS]write[ARGS]{"text": "a"}[TOOL_CALLS]weather[ARGS]{"days": 1}[TOOL_CALLS]weather[ARGS]{"da'
    out = run(list(text), style="mistral", finished=False)
    assert out.calls == [("write", '{"text": "a"}'), ("weather", '{"days": 1}')]
    assert out.text == '[TOOL_CALLS]weather[ARGS]{"da'


def test_space_without_any_call_is_text() -> None:
    assert run([" a ", "\n", "b", " \n"]).text == " a \nb \n"


PARTS = st.sampled_from(
    [
        call("write", text=HARD),
        call("weather", days="2"),
        call("nope"),
        "<tool_call>",
        "</tool_call>",
        '{"name": "write", "arguments": {"text": "x',
        '"}}',
        "text",
        "\n",
        "<",
        "{",
    ]
)


@given(st.lists(PARTS, max_size=6).map("".join), st.lists(st.integers(0, 300)), st.booleans(), st.booleans())
def test_any_split_of_any_reply_reads_as_the_whole(
    text: str, places: list[int], finished: bool, parallel: bool
) -> None:
    whole = run([text], finished=finished, parallel=parallel)
    split = run(cut(text, places), finished=finished, parallel=parallel)
    assert (split.text, split.calls, split.complete, split.open) == (
        whole.text,
        whole.calls,
        whole.complete,
        whole.open,
    )
    assert split.raw == whole.raw == len(text)
