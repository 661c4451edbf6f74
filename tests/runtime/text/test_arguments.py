"""Arguments typed by the schema, and shown while they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.text.arguments import Arguments
from onecopy.runtime.text.coerce import coerce, types

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "ok": {"type": "boolean"},
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "integer"}},
        "deep": {"type": "object", "properties": {"n": {"type": "integer"}}},
        "any": {},
    },
}


def stream(text: str, schema: Any = SCHEMA) -> list[str]:
    arguments = Arguments(schema)
    return [*map(arguments.feed, text), arguments.rest()]


@pytest.mark.parametrize(
    ("schema", "value", "typed"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, 3.0, 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "integer"}, True, True),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "number"}, "2", 2),
        ({"type": "number"}, 2, 2),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "string"}, 3, "3"),
        ({"type": "string"}, True, "true"),
        ({"type": "string"}, {"a": 1}, '{"a": 1}'),
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, None, None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "3", "3"),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "false", False),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "array", "items": {"type": "integer"}}, '["1", 2]', [1, 2]),
        ({"type": "object", "properties": {"n": {"type": "integer"}}}, {"n": "1", "m": "2"}, {"n": 1, "m": "2"}),
        ({}, "3", "3"),
        (True, "3", "3"),
        ({"type": 7}, "3", "3"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ],
)
def test_a_value_is_typed_when_there_is_one_honest_reading(schema: Any, value: Any, typed: Any) -> None:
    found = coerce(value, schema)
    assert (found, type(found)) == (typed, type(typed))


def test_odd_schemas_name_no_types() -> None:
    assert types("nonsense") == types({"type": None}) == types({"anyOf": 3}) == frozenset()


def test_text_is_shown_character_by_character() -> None:
    assert stream('{"text":"a\\"b"}') == [*'{"text":"a\\"b"', "", "}"]


def test_the_closing_brace_waits_until_the_call_is_complete() -> None:
    arguments = Arguments(SCHEMA)
    shown = "".join(map(arguments.feed, '{"text": "a"}'))
    assert arguments.done
    with pytest.raises(ValueError):
        json.loads(shown)
    assert json.loads(shown + arguments.rest()) == {"text": "a"}


def test_a_value_of_another_type_waits_and_comes_typed() -> None:
    assert "".join(stream('{"n": "3", "ok":"true" , "x":"1.5"}')) == '{"n": 3, "ok":true , "x":1.5}'


def test_a_value_that_fits_comes_as_it_was_written() -> None:
    text = '{"list": [1,  2], "deep": {"n":1}, "x": 1.50, "any": [ "1" ]}'
    assert "".join(stream(text)) == text


def test_what_was_waiting_at_the_cut_is_told() -> None:
    arguments = Arguments(SCHEMA)
    assert "".join(map(arguments.feed, '{"n": 12')) == '{"n": '
    assert arguments.pending() == "12"


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)


@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "other"]), VALUES), st.sampled_from([None, 1]))
def test_streamed_arguments_are_the_typed_arguments(value: dict[str, Any], indent: int | None) -> None:
    whole = json.loads("".join(stream(json.dumps(value, indent=indent))))
    typed = coerce(value, SCHEMA)
    assert json.dumps(whole) == json.dumps(typed)
