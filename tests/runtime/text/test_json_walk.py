"""The character-wise JSON reader agrees with json.loads and knows whose each character is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.text.json_walk import Json, Malformed, Members, Role, State

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def reads(text: str) -> bool:
    """Whether the text is one whole JSON value; a number needs something behind it to be whole."""
    machine = Json()
    try:
        for c in text + " ":
            machine.step(c)
    except Malformed:
        return False
    return machine.state is State.DONE


def strictly(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def members(text: str) -> dict[str, Any]:
    """The members as the walk tells them."""
    walk, found, value = Members(), {}, ""
    for c in text:
        role = walk.step(c)
        value += c if role is Role.VALUE else ""
        if walk.ended:
            found[walk.key] = json.loads(value)
            value = ""
    assert walk.done
    assert value == ""
    return found


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_everything_json_writes_is_read(value: Any, indent: int | None, ascii_: bool) -> None:
    assert reads(json.dumps(value, indent=indent, ensure_ascii=ascii_))


@given(st.text('{}[]",:\\u0a1-+.eE tfnrueals\n', max_size=12))
def test_arbitrary_text_is_judged_as_json_loads_judges_it(text: str) -> None:
    assert reads(text) == strictly(text)


@given(VALUES.map(json.dumps), st.integers(0, 60), st.sampled_from('{}[]",:x1\\'))
def test_a_changed_character_is_judged_as_json_loads_judges_it(text: str, at: int, c: str) -> None:
    at %= len(text)
    changed = text[:at] + c + text[at + 1 :]
    assert reads(changed) == strictly(changed)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.sampled_from([None, 0, 2]))
def test_members_are_told_with_their_values(value: dict[str, Any], indent: int | None) -> None:
    assert members(json.dumps(value, indent=indent)) == value


def test_a_number_ends_before_the_character_behind_it() -> None:
    walk = Members()
    roles = [walk.step(c) for c in '{"a":12']
    assert roles[-2:] == [Role.VALUE, Role.VALUE]
    assert not walk.ended
    assert walk.step(",") is Role.SYNTAX
    assert walk.ended
    assert walk.key == "a"


@pytest.mark.parametrize("text", ["[", '"', "1", "x"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        Members().step(text)


def test_nesting_is_bounded() -> None:
    assert reads("[" * 64 + "]" * 64)
    assert not reads("[" * 65 + "]" * 65)
