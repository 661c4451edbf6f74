"""Constrained replies: what may come is exactly what the grammar says, for each request alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.errors import BadRequest, Unsupported
from onecopy.runtime.text.forced import chosen, forced_calls
from onecopy.runtime.text.formats import tool_format
from onecopy.runtime.text.grammar import LARGEST, Grammars, Matcher, allowed, mask_of
from onecopy.runtime.text.reasoning import Tags
from onecopy.runtime.text.tools import Calls
from onecopy.runtime.turn import Grammar, Tool

from tests.support.tokens import byte_tokenizer

TOKENIZER = byte_tokenizer()
WIDTH = TOKENIZER.vocab_size + 100
GRAMMARS = Grammars(TOKENIZER, WIDTH)
END = min(TOKENIZER.eos_ids)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "at": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    "required": ["kind"],
    "additionalProperties": False,
}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def matcher(kind: Any, text: str) -> Matcher:
    return GRAMMARS.matcher(Grammar(kind, text))


def takes(of: Matcher, text: str) -> bool:
    """Whether the text is a whole reply."""
    tokens = [*ids(text), END]
    return of.accepts(tokens) == len(tokens)


def bits(of: Matcher) -> set[int]:
    return {token for token in range(WIDTH) if allowed(of.mask(), token)}


@pytest.mark.parametrize("text", ['{"kind":"a"}', '{"kind": "b", "at": {"n": 12}}', '{\n  "kind": "a"\n}'])
def test_a_schema_takes_what_it_describes(text: str) -> None:
    assert takes(matcher("json_schema", json.dumps(SCHEMA)), text)


@pytest.mark.parametrize("text", ['{"kind": "c"}', "```json", "Sure", '{"at": {}}', "{}", '{"kind": "a", "x": 1}', ""])
def test_a_schema_takes_nothing_else(text: str) -> None:
    assert not takes(matcher("json_schema", json.dumps(SCHEMA)), text)


def test_a_reply_cannot_be_filled_with_space() -> None:
    assert matcher("json_object", "").accepts(ids("{" + " " * 20)) <= 2


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_object", "", '{"a": [1, "x"]}', "[1]"),
        ("regex", "[0-9]{3}-[a-z]+", "123-abc", "12-abc"),
        ("choice", '["yes", "no \\"way\\"", "ja\\nné"]', 'no "way"', "maybe"),
        ("choice", '["yes", "ja\\nné"]', "ja\nné", "ja"),
        ("lark", 'start: "a"+ tail\ntail: /[0-9]/', "aaa7", "7"),
    ],
)
def test_every_kind_of_grammar(kind: str, source: str, good: str, bad: str) -> None:
    assert takes(matcher(kind, source), good)
    assert not takes(matcher(kind, source), bad)


@pytest.mark.parametrize(
    ("kind", "source", "error", "param"),
    [
        ("json_schema", "{", BadRequest, "response_format.json_schema.schema"),
        ("json_schema", "[]", BadRequest, "response_format.json_schema.schema"),
        ("json_schema", '{"type": "nope"}', BadRequest, "response_format.json_schema.schema"),
        ("json_schema", '{"$ref": "http://localhost/x"}', BadRequest, "response_format.json_schema.schema"),
        ("json_schema", '{"not": {}}', Unsupported, "response_format.json_schema.schema"),
        ("json_schema", " " * (LARGEST + 1), BadRequest, "response_format.json_schema.schema"),
        ("json_schema", "[" * 100_000, BadRequest, "response_format.json_schema.schema"),
        ("regex", "a(b", BadRequest, "guided_regex"),
        ("choice", "[]", BadRequest, "guided_choice"),
        ("choice", "[1]", BadRequest, "guided_choice"),
        ("choice", "yes", BadRequest, "guided_choice"),
        ("lark", "start: nothing", BadRequest, "guided_grammar"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_by_name(kind: Any, source: str, error: Any, param: str) -> None:
    with pytest.raises(error) as caught:
        matcher(kind, source)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_the_mask_has_exactly_the_tokens_that_may_come() -> None:
    one = matcher("choice", '["ab", "ac", "b"]')
    assert bits(one) == {*ids("a"), *ids("b")}
    assert one.accept(ids("a")[0])
    assert bits(one) == {*ids("b"), *ids("c")}
    assert one.accept(ids("b")[0])
    assert one.finished
    assert bits(one) == set(TOKENIZER.eos_ids)
    assert one.mask().shape == ((WIDTH + 31) // 32,)
    assert one.mask().dtype == np.uint32


def test_control_tokens_never_come_as_text() -> None:
    one = matcher("regex", "(?s:.*)")
    special = {i for i in range(TOKENIZER.vocab_size) if TOKENIZER.is_special(i)}
    assert bits(one) & special == set(TOKENIZER.eos_ids)


@given(st.lists(st.sampled_from('{}"a:1 ,'), max_size=12))
def test_mask_accept_and_accepts_agree(chars: list[str]) -> None:
    one = matcher("json_object", "")
    for token in ids("".join(chars)):
        expected = allowed(one.mask(), token)
        assert (one.accepts([token]) == 1) is expected
        assert one.accept(token) is expected
    assert one.error is None


@given(st.integers(0, 17))
def test_a_rollback_forgets_the_tokens_taken_back(back: int) -> None:
    text = [*ids('{"a": [1, "x"]}'), END]
    one = matcher("json_object", "")
    masks = []
    for token in text:
        masks.append(one.mask())
        assert one.accept(token)
    back %= len(text) + 1
    one.rollback(back)
    for at in range(len(text) - back, len(text)):
        assert np.array_equal(one.mask(), masks[at])
        assert one.accept(text[at])


def test_an_end_token_after_a_finished_grammar_can_be_taken_back() -> None:
    one = matcher("choice", '["a"]')
    assert one.accept(ids("a")[0])
    assert one.accept(END)
    one.rollback(2)
    assert bits(one) == set(ids("a"))


def test_a_draft_beyond_the_vocabulary_is_not_taken_and_spoils_nothing() -> None:
    of = matcher("json_object", "")
    beyond = byte_tokenizer().vocab_size
    assert of.accepts((*ids('{"'), beyond, *ids("a"))) == 2
    assert not of.accept(beyond)
    assert takes(of, '{"a": 1}')


def test_a_fork_goes_its_own_way() -> None:
    one = matcher("choice", '["ab", "ac"]')
    one.accept(ids("a")[0])
    other = one.fork()
    assert other.accept(ids("b")[0])
    assert other.finished
    assert one.accept(ids("c")[0])


def test_two_requests_of_one_grammar_share_no_state() -> None:
    first, second = matcher("choice", '["ab"]'), matcher("choice", '["ab"]')
    first.accept(ids("a")[0])
    assert bits(second) == set(ids("a"))


def test_a_grammar_behind_thinking_begins_at_the_closing_tag() -> None:
    one = GRAMMARS.matcher(Grammar("choice", '["ab"]'), Tags("<think>", "</think>"))
    thought = ids("free text {")
    assert one.accepts([*thought, *ids("</think>ab"), END]) == len(thought) + 4
    assert not allowed(one.mask(), END)
    assert not one.accept(END)
    assert all(map(one.accept, [*thought, *ids("</think>")]))
    assert bits(one) == set(ids("a"))
    one.rollback(1)
    assert allowed(one.mask(), ids("x")[0])
    assert all(map(one.accept, ids("</think>ab")))
    one.rollback(2)
    assert bits(one) == set(ids("a"))
    assert one.fork().accept(ids("a")[0])


def test_a_closing_tag_spelled_over_tokens_counts() -> None:
    one = GRAMMARS.matcher(Grammar("choice", '["a"]'), Tags("<x>", "</x>"))
    assert all(map(one.accept, ids("é </x")))
    assert not one.finished
    assert one.accept(ids(">")[0])
    assert bits(one) == set(ids("a"))


def test_a_model_without_end_tokens_cannot_be_constrained() -> None:
    with pytest.raises(Unsupported):
        Grammars(byte_tokenizer(special=()), WIDTH).matcher(Grammar("json_object", ""))


def test_masks_are_bits_in_token_order() -> None:
    mask = mask_of([0, 33, 40], 2)
    assert [token for token in range(64) if allowed(mask, token)] == [0, 33, 40]
    assert not allowed(mask, 64)


FIND = Tool(
    "find",
    "",
    {
        "type": "object",
        "properties": {
            "q": {"type": "string"},
            "n": {"$ref": "#/$defs/count"},
            "how": {"enum": ["fast", "slow"]},
        },
        "required": ["q"],
        "additionalProperties": False,
        "$defs": {"count": {"type": "integer"}},
    },
)
STOP = Tool("stop", "", {})


def forced(style: str, tools: tuple[Tool, ...], choice: str, parallel: bool = True) -> Matcher:
    grammar = forced_calls(style, tools, choice, parallel=parallel, tokenizer=TOKENIZER)
    assert grammar is not None
    return GRAMMARS.matcher(grammar)


JSON_CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "x </tool_call>", "n": 3}}\n</tool_call>'
TAG_CALL = (
    "<tool_call>\n<function=find>\n<parameter=q>\nx\ny </tool_call>\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    "<parameter=how>\nslow\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(("style", "text"), [("json_tools", JSON_CALL), ("qwen3_coder", TAG_CALL)])
def test_a_forced_reply_is_a_call_that_reads_back(style: str, text: str) -> None:
    assert takes(forced(style, (FIND, STOP), "required"), text)
    assert takes(forced(style, (FIND, STOP), "find"), text)
    calls = Calls(tool_format(style), (FIND, STOP), new_id=lambda: "id")
    list(calls.feed(text))
    assert calls.complete == 1


@pytest.mark.parametrize("style", ["json_tools", "qwen3_coder"])
@pytest.mark.parametrize("text", ["Sure", "", "<tool_call>\n{}", "<tool_call>\n<function=other>"])
def test_a_forced_reply_is_nothing_else(style: str, text: str) -> None:
    assert not takes(forced(style, (FIND, STOP), "required"), text)


def test_a_named_tool_is_the_only_one() -> None:
    assert not takes(forced("json_tools", (FIND, STOP), "stop"), JSON_CALL)
    assert takes(
        forced("json_tools", (FIND, STOP), "stop"), '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    )


def test_parallel_calls_follow_each_other_only_when_allowed() -> None:
    two = JSON_CALL + "\n" + JSON_CALL
    assert takes(forced("json_tools", (FIND,), "required"), two)
    assert not takes(forced("json_tools", (FIND,), "required", parallel=False), two)


def test_required_arguments_are_required_and_others_are_not() -> None:
    without = "<tool_call>\n<function=find>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    only = "<tool_call>\n<function=find>\n<parameter=q>\nx\n</parameter>\n</function>\n</tool_call>"
    assert not takes(forced("qwen3_coder", (FIND,), "find"), without)
    assert takes(forced("qwen3_coder", (FIND,), "find"), only)


def test_a_tool_schema_with_words_we_cannot_enforce_still_works() -> None:
    loose = Tool("find", "", {"type": "object", "properties": {"q": {"type": "array", "uniqueItems": True}}})
    text = '<tool_call>\n{"name": "find", "arguments": {"q": [1, 1]}}\n</tool_call>'
    assert takes(forced("json_tools", (loose,), "required"), text)


def test_marks_that_are_control_tokens_are_forced_as_such() -> None:
    tokenizer = byte_tokenizer(special=("<|im_end|>", "<tool_call>", "</tool_call>"))
    grammar = forced_calls("json_tools", (STOP,), "required", parallel=False, tokenizer=tokenizer)
    assert grammar is not None
    one = Grammars(tokenizer, tokenizer.vocab_size).matcher(grammar)
    tokens = tokenizer.encode('<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')
    assert tokens[0] == tokenizer.token_id("<tool_call>")
    assert one.accepts(tokens) == len(tokens)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_free_choice_forces_nothing(choice: str) -> None:
    assert forced_calls("json_tools", (FIND,), choice, parallel=True, tokenizer=TOKENIZER) is None
    assert chosen((FIND,), choice) == ((FIND,) if choice == "auto" else ())
    assert chosen((), choice) == ()


@pytest.mark.parametrize(
    ("style", "tools", "choice", "error"),
    [
        ("json_tools", (), "required", BadRequest),
        ("json_tools", (), "find", BadRequest),
        ("json_tools", (FIND,), "other", BadRequest),
        ("pythonic", (FIND,), "required", Unsupported),
        (None, (FIND,), "find", Unsupported),
    ],
)
def test_a_choice_that_cannot_be_enforced_is_refused(style: Any, tools: Any, choice: str, error: Any) -> None:
    with pytest.raises(error) as caught:
        forced_calls(style, tools, choice, parallel=True, tokenizer=TOKENIZER)
    assert caught.value.param == "tool_choice"
