"""Streams the arguments of a JSON-style call while they are written, typed by the tool's schema."""

from __future__ import annotations

import json
from typing import Any

from .coerce import coerce, kind, member, types
from .json_walk import Members, Role


class Arguments:
    """One arguments object. `feed` takes characters and returns what may be shown of them.

    Characters pass as they are. A value the schema may want in another type waits until it is whole. The closing brace
    is kept back: what was shown of a call that never completes does not parse as JSON.
    """

    __slots__ = ("_members", "_schema", "_value", "_waiting")

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._members = Members()
        self._value: list[str] = []
        self._waiting = False

    @property
    def done(self) -> bool:
        """Whether the object is closed (its brace still kept back)."""
        return self._members.done

    def feed(self, c: str) -> str:
        """One character more; raises Malformed when this is no JSON object."""
        role = self._members.step(c)
        out = self._valued(c) if role is Role.VALUE else ""
        if self._members.ended:
            out += self._whole()
        if role is Role.SYNTAX and not self.done:
            out += c
        return out

    def _valued(self, c: str) -> str:
        if not self._value:
            self._waiting = self._must_wait(c)
        if self._waiting or not self._value:
            self._value.append(c)
        return "" if self._waiting else c

    def _must_wait(self, first: str) -> bool:
        """Text passes where text is wanted or anything is; other values are short, or may hold ones to be typed."""
        wanted = types(member(self._schema, self._members.key))
        return first != '"' or bool(wanted and "string" not in wanted)

    def _whole(self) -> str:
        text = "".join(self._value) if self._waiting else ""
        self._value, self._waiting = [], False
        return retyped(text, member(self._schema, self._members.key)) if text else ""

    def rest(self) -> str:
        """What the call still lacks once it is known to be complete."""
        return "}"

    def pending(self) -> str:
        """What was waiting when the call was cut off."""
        return "".join(self._value) if self._waiting else ""


def retyped(text: str, schema: Any) -> str:
    """A JSON value as the schema wants it: the same text when it already is."""
    value = json.loads(text)
    typed = coerce(value, schema)
    return text if same(typed, value) else json.dumps(typed, ensure_ascii=False)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down (Python says 1 == True == 1.0)."""
    if kind(a) != kind(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
