"""The whole pipeline: streamed is unstreamed, each token is delivered once, and a reply's end is told truly."""

from __future__ import annotations

import json
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.text.formats import tool_format
from onecopy.runtime.text.reader import Reader, Shown, callable_tools
from onecopy.runtime.text.reasoning import KNOWN_TAGS, Tags
from onecopy.runtime.turn import Reasoning, ReplyFormat, Text, TokenLogprob, Tool, ToolCall

from tests.support.tokens import Script, byte_tokenizer, cut

THINK = Tags("<think>", "</think>")
WRITE = Tool("write", "", {"type": "object", "properties": {"text": {"type": "string"}}})
OTHER = Tool("other", "", {})
FULL = ReplyFormat(stop=("STOP",), reasoning=True, tools=(WRITE, OTHER))
EMOJI = "\U0001f600"


def reader(source: Script, form: ReplyFormat = FULL, style: str = "json_tools", tags: Tags | None = THINK) -> Reader:
    ids = count()
    return Reader(source, form, tags=tags, tools=tool_format(style), new_id=lambda: f"call_{next(ids)}")


def play(source: Script, of: Reader, *, was_cut: bool = False) -> list[Shown]:
    pieces = [piece for token in source.ids if not of.stopped for piece in of.feed(token)]
    return pieces + of.finish(cut=was_cut)


def joined(pieces: list[Shown]) -> dict[str, object]:
    """What a client that does not stream would be told."""
    calls: dict[int, list[str | None]] = {}
    for piece in pieces:
        if isinstance(piece, ToolCall):
            known = calls.setdefault(piece.index, [piece.id, piece.name, ""])
            known[2] = (known[2] or "") + piece.arguments
    return {
        "text": "".join(p.text for p in pieces if isinstance(p, Text)),
        "reasoning": "".join(p.text for p in pieces if isinstance(p, Reasoning)),
        "calls": [calls[i] for i in sorted(calls)],
    }


def delivered(pieces: list[Shown]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


def call(text: str) -> str:
    return (
        f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': {'text': text}}, ensure_ascii=False)}\n</tool_call>"
    )


REPLIES = {
    "plain": "Hello, world.",
    "thinking": f"<think>\nhm {EMOJI} </thin k\n</think>\n\nYes {EMOJI}.",
    "calls": "<think>a</think>I will.\n" + call(f'"{EMOJI}\n</tool_call>') + "\n" + call("two"),
    "stop": "<think>STOP is not yet</think>go on STOP never",
    "bad call": "so <tool_call>{oops</tool_call> STO",
    "open thinking": "<think>never ends STOP",
}


@pytest.mark.parametrize("name", REPLIES)
def test_streamed_byte_by_byte_is_unstreamed(name: str) -> None:
    raw = REPLIES[name].encode()
    bytewise, whole = Script([bytes([b]) for b in raw]), Script([raw])
    assert joined(play(bytewise, reader(bytewise))) == joined(play(whole, reader(whole)))


def test_the_parts_of_a_reply_are_where_they_belong() -> None:
    source = Script(list(REPLIES["calls"]))
    assert joined(play(source, reader(source))) == {
        "text": "I will.",
        "reasoning": "a",
        "calls": [
            ["call_0", "write", json.dumps({"text": f'"{EMOJI}\n</tool_call>'}, ensure_ascii=False)],
            ["call_1", "write", '{"text": "two"}'],
        ],
    }


TAGGED = "<tool_call>\n<function=write>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>"
BITS = st.sampled_from(
    [
        *REPLIES.values(),
        call("x"),
        TAGGED.format("</tool_call>"),
        TAGGED[:40],
        "<think>",
        "</think>",
        "ST",
        "OP",
        "\n",
        "é",
        EMOJI,
        "<tool_call>",
        "</tool_call>",
    ]
)
FORMS = st.builds(
    ReplyFormat,
    stop=st.sampled_from([(), ("STOP",), ("OP", "STOP"), ("\n\n",)]),
    reasoning=st.booleans(),
    opened=st.booleans(),
    tools=st.sampled_from([(), (WRITE, OTHER)]),
    tool_choice=st.sampled_from(["auto", "none", "other"]),
    parallel=st.booleans(),
    include_stop=st.booleans(),
)
STYLES = st.sampled_from(["json_tools", "qwen3_coder"])
TEXTS = st.lists(BITS, max_size=4).map("".join)
PLACES = st.lists(st.integers(0, 400))


@given(TEXTS, PLACES, st.booleans(), FORMS, STYLES)
def test_any_split_into_tokens_gives_the_same_reply(
    text: str, places: list[int], was_cut: bool, form: ReplyFormat, style: str
) -> None:
    raw = text.encode()
    split, whole = Script(cut(raw, places)), Script([raw])
    mine, theirs = reader(split, form, style), reader(whole, form, style)
    assert joined(play(split, mine, was_cut=was_cut)) == joined(play(whole, theirs, was_cut=was_cut))
    assert (mine.stop, mine.calls, mine.broken_call) == (theirs.stop, theirs.calls, theirs.broken_call)
    assert mine.finish_reason("stop") == theirs.finish_reason("stop")


@given(TEXTS, PLACES, st.booleans(), FORMS, STYLES)
def test_every_token_and_logprob_is_delivered_once_and_in_order(
    text: str, places: list[int], was_cut: bool, form: ReplyFormat, style: str
) -> None:
    source = Script(cut(text.encode(), places))
    one = reader(source, form, style)
    pieces: list[Shown] = []
    fed = []
    for token in source.ids:
        if not one.stopped:
            fed.append(token)
            pieces += one.feed(token, TokenLogprob(token, -1.0, b""))
    pieces += one.finish(cut=was_cut)
    assert delivered(pieces) == fed
    assert [p.token for piece in pieces for p in piece.logprobs] == fed


@given(TEXTS, PLACES, FORMS)
def test_without_tools_and_stops_nothing_but_tags_and_their_newlines_is_taken_away(
    text: str, places: list[int], form: ReplyFormat
) -> None:
    source = Script(cut(text.encode(), places))
    plain = ReplyFormat(reasoning=form.reasoning, opened=form.opened)
    found = joined(play(source, reader(source, plain)))
    told = f"{found['reasoning']}{found['text']}"
    for mark in ("<think>", "</think>", "\n"):
        told, text = told.replace(mark, ""), text.replace(mark, "")
    assert told == text


def test_a_token_belongs_to_the_piece_with_its_last_character() -> None:
    source = Script(["<think>", "hm", "</think>", "Yes", " ST", "ay", call("x")])
    kinds = {token: type(piece) for piece in play(source, reader(source)) for token in piece.tokens}
    assert kinds == {0: Reasoning, 1: Reasoning, 2: Reasoning, 3: Text, 4: Text, 5: Text, 6: ToolCall}


def test_held_tokens_come_with_the_text_they_were_held_for() -> None:
    source = Script(["go ST", "A", "Y"])
    one = reader(source)
    assert one.feed(0) == [Text("go ")]
    assert one.feed(1) == [Text("STA", (0, 1))]


@pytest.mark.parametrize("piece", [EMOJI, "\U0001f468‍\U0001f469‍\U0001f467", "\U0001f1e9\U0001f1ea", "漢", "e\u0301"])
def test_characters_over_tokens_are_whole(piece: str) -> None:
    source = Script([bytes([b]) for b in piece.encode()])
    pieces = play(source, reader(source, ReplyFormat()))
    assert "".join(p.text for p in pieces) == piece
    assert all("\ufffd" not in p.text for p in pieces)
    assert delivered(pieces) == list(source.ids)


def test_a_reply_cut_inside_a_character_ends_in_one_replacement() -> None:
    source = Script([b"a", *(bytes([b]) for b in EMOJI.encode()[:-1])])
    pieces = play(source, reader(source, ReplyFormat()), was_cut=True)
    assert joined(pieces)["text"] == "a\ufffd"
    assert delivered(pieces) == list(source.ids)


def test_a_reply_abandoned_inside_a_character_leaves_other_readers_alone() -> None:
    source = Script([EMOJI.encode()[:2], "ok"])
    reader(source, ReplyFormat()).feed(0)
    assert reader(source, ReplyFormat()).feed(1) == [Text("ok", (1,))]


def test_a_stop_string_ends_in_the_token_fed_last() -> None:
    source = Script(["a S", "TO", "P b", "c"])
    one = reader(source)
    assert [one.feed(0), one.feed(1), one.stopped] == [[Text("a ")], [], False]
    assert one.feed(2) == [Text("", (0, 1, 2))]
    assert (one.stopped, one.stop, one.finish_reason("stop")) == (True, "STOP", "stop")
    assert one.feed(3) == one.finish() == []


def test_the_stop_string_can_be_part_of_the_answer() -> None:
    source = Script(["a ST", "OP b"])
    form = ReplyFormat(stop=("STOP",), include_stop=True)
    assert joined(play(source, reader(source, form)))["text"] == "a STOP"


def test_stop_strings_do_not_end_thinking_or_a_call() -> None:
    source = Script(["<think>STOP</think>", call("STOP"), "x"])
    one = reader(source)
    assert joined(play(source, one))["reasoning"] == "STOP"
    assert (one.stop, one.calls) == (None, 1)


def test_a_stop_string_does_not_reach_over_a_call() -> None:
    source = Script(["ST", call("x"), "OP"])
    one = reader(source)
    assert joined(play(source, one))["text"] == "STOP"
    assert one.stop is None


@pytest.mark.parametrize(
    ("text", "complete", "broken"),
    [
        ("plain te", 0, False),
        ('<tool_call>{"name": "write", "arguments": {"te', 0, True),
        (call("a") + '<tool_call>{"name": "write", "arguments": {"te', 1, True),
        (call("a"), 1, False),
        ("<think>half", 0, False),
    ],
)
def test_a_reply_cut_off_is_length_whatever_it_holds(text: str, complete: int, broken: bool) -> None:
    source = Script(list(text))
    one = reader(source)
    play(source, one, was_cut=True)
    assert (one.finish_reason("length"), one.calls, one.broken_call) == ("length", complete, broken)


def test_a_reply_with_complete_calls_finishes_as_tool_calls() -> None:
    source = Script([call("a"), call("b")])
    one = reader(source)
    play(source, one)
    assert one.finish_reason("stop") == "tool_calls"


def test_a_reply_that_ends_inside_an_announced_call_is_not_tool_calls() -> None:
    source = Script([call("a"), '<tool_call>{"name": "write", "arguments": {"te'])
    one = reader(source)
    play(source, one)
    assert one.finish_reason("stop") == "length"


def test_without_parallel_calls_the_reply_stops_after_one() -> None:
    source = Script([call("a") + "tail", call("b")])
    one = reader(source, ReplyFormat(tools=(WRITE,), parallel=False))
    pieces = play(source, one)
    assert one.stopped
    assert len(joined(pieces)["calls"]) == 1  # type: ignore[arg-type]
    assert joined(pieces)["text"] == ""
    assert delivered(pieces) == [0]


def test_tool_choice_none_returns_calls_as_text() -> None:
    source = Script(list(call("a")))
    form = ReplyFormat(tools=(WRITE,), tool_choice="none")
    assert joined(play(source, reader(source, form))) == {"text": call("a"), "reasoning": "", "calls": []}


def test_a_named_choice_takes_calls_of_that_tool_only() -> None:
    form = ReplyFormat(tools=(WRITE, OTHER), tool_choice="other")
    source = Script([call("a")])
    assert callable_tools(form) == (OTHER,)
    assert joined(play(source, reader(source, form)))["text"] == call("a")


def test_reasoning_off_leaves_the_tags_in_the_text() -> None:
    source = Script(["<think>a</think>b"])
    assert joined(play(source, reader(source, ReplyFormat())))["text"] == "<think>a</think>b"


def test_an_opened_reply_begins_in_thinking() -> None:
    source = Script(list("a</think>b"))
    pieces = play(source, reader(source, ReplyFormat(reasoning=True, opened=True)))
    assert (joined(pieces)["reasoning"], joined(pieces)["text"]) == ("a", "b")


def test_a_quoted_call_inside_thinking_is_thinking() -> None:
    source = Script([f"<think>{call('a')}"])
    one = reader(source)
    assert joined(play(source, one))["reasoning"] == f"<think>{call('a')}"[7:]
    assert one.calls == 0


def test_control_tokens_show_only_where_they_are_marks() -> None:
    pieces = ["<|pad|>", "[TOOL_CALLS]", "write", "[ARGS]", "{}", "</s>"]
    source = Script(pieces, control=["<|pad|>", "[TOOL_CALLS]", "[ARGS]"], eos=["</s>"])
    one = reader(source, style="mistral", tags=None)
    out = play(source, one)
    assert joined(out) == {"text": "", "reasoning": "", "calls": [["call_0", "write", "{}"]]}
    assert delivered(out) == list(source.ids)


def test_thinking_marked_by_control_tokens_is_split() -> None:
    tags = KNOWN_TAGS[3]
    source = Script(
        ["<|channel>", "thought", "\nhm", "<channel|>", "Hi", "<eos>"],
        control=["<|channel>", "<channel|>"],
        eos=["<eos>"],
    )
    pieces = play(source, reader(source, ReplyFormat(reasoning=True), tags=tags))
    assert (joined(pieces)["reasoning"], joined(pieces)["text"]) == ("hm", "Hi")


def test_a_real_tokenizer_reads_back_what_it_wrote() -> None:
    tokenizer = byte_tokenizer()
    text = REPLIES["calls"]
    one = Reader(tokenizer, FULL, tags=THINK, tools=tool_format("json_tools"), new_id=lambda: "id")
    pieces = [piece for token in tokenizer.encode(text) for piece in one.feed(token)] + one.finish()
    assert joined(pieces)["text"] == "I will."
    assert one.calls == 2


class Marked(Script):
    """A vocabulary that marks word starts; its decoder drops the first space, as sentencepiece's does."""

    def decode(self, ids: object) -> str:
        return super().decode(ids).removeprefix(" ")  # type: ignore[arg-type]


def test_the_space_a_vocabulary_puts_before_the_first_word_is_dropped() -> None:
    source = Marked([" Hello", " world"])
    assert joined(play(source, reader(source, ReplyFormat())))["text"] == "Hello world"


def test_a_space_that_was_really_written_stays() -> None:
    source = Script([" Hello"])
    assert joined(play(source, reader(source, ReplyFormat())))["text"] == " Hello"


def test_finishing_twice_delivers_once() -> None:
    source = Script(["a ST"])
    one = reader(source)
    one.feed(0)
    assert one.finish() == [Text("ST", (0,))]
    assert one.finish() == []


def test_a_call_behind_a_stop_string_does_not_count_however_the_reply_is_cut() -> None:
    form = ReplyFormat(stop=("STOP",), tools=(WRITE, OTHER))
    text = 'on STOP <tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    for places in ([], [7], [3, 5, 20]):
        script = Script(cut(text.encode(), places))
        mine = reader(script, form, "json_tools")
        play(script, mine, was_cut=False)
        assert (mine.stop, mine.calls, mine.finish_reason("stop")) == ("STOP", 0, "stop")
