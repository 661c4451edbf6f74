"""Strict JSON, one character at a time: a pushdown automaton, and a walk over one object's members.

It says of every character what it belongs to, so a value can be passed on while it is still being written. Strict is
RFC 8259: what `json.loads` would refuse is refused at the first character that makes it so.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SPACE = " \t\n\r"
_ATOM = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ATOM_START = frozenset("-0123456789tfn")
_ATOM_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_LONGEST_ATOM = 400
_DEEPEST = 64


class Malformed(ValueError):
    """The text can no longer become JSON."""


class State(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    AFTER = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    ATOM = auto()
    DONE = auto()


class Json:
    """Reads one JSON value. `step` raises Malformed; `state` and `depth` tell where it is."""

    __slots__ = ("_atom", "_hex", "_in_key", "_stack", "state")

    def __init__(self) -> None:
        self.state = State.VALUE
        self._stack: list[str] = []
        self._in_key = False
        self._atom = ""
        self._hex = 0

    @property
    def depth(self) -> int:
        return len(self._stack)

    @property
    def in_key(self) -> bool:
        return self._in_key

    def step(self, c: str) -> None:
        """Take one character."""
        _STEPS[self.state](self, c)

    def _value(self, c: str) -> None:
        if c in "{[":
            self._open(c)
        elif c == '"':
            self.state = State.STRING
        elif c in _ATOM_START:
            self._atom, self.state = c, State.ATOM
        elif c not in _SPACE:
            raise Malformed(f"expected a value, found {c!r}")

    def _open(self, c: str) -> None:
        if len(self._stack) == _DEEPEST:
            raise Malformed("nested too deep")
        self._stack.append(c)
        self.state = State.FIRST_KEY if c == "{" else State.FIRST_ITEM

    def _close(self, c: str) -> None:
        if not self._stack or self._stack.pop() + c not in ("{}", "[]"):
            raise Malformed(f"unexpected {c!r}")
        self._ended()

    def _ended(self) -> None:
        self.state = State.AFTER if self._stack else State.DONE

    def _first_item(self, c: str) -> None:
        if c == "]":
            self._close(c)
        else:
            self._value(c)

    def _first_key(self, c: str) -> None:
        if c == "}":
            self._close(c)
        else:
            self._key(c)

    def _key(self, c: str) -> None:
        if c == '"':
            self.state, self._in_key = State.STRING, True
        elif c not in _SPACE:
            raise Malformed(f"expected a key, found {c!r}")

    def _colon(self, c: str) -> None:
        if c == ":":
            self.state = State.VALUE
        elif c not in _SPACE:
            raise Malformed(f"expected a colon, found {c!r}")

    def _after(self, c: str) -> None:
        if c == ",":
            self.state = State.KEY if self._stack[-1] == "{" else State.VALUE
        elif c in "}]":
            self._close(c)
        elif c not in _SPACE:
            raise Malformed(f"expected a comma, found {c!r}")

    def _string(self, c: str) -> None:
        if c == "\\":
            self.state = State.ESCAPE
        elif c == '"' and self._in_key:
            self.state, self._in_key = State.COLON, False
        elif c == '"':
            self._ended()
        elif c < " ":
            raise Malformed("control character in a string")

    def _escape(self, c: str) -> None:
        if c not in '"\\/bfnrtu':
            raise Malformed(f"unknown escape {c!r}")
        self._hex = 4 if c == "u" else 0
        self.state = State.HEX if self._hex else State.STRING

    def _hex_digit(self, c: str) -> None:
        if c not in "0123456789abcdefABCDEF":
            raise Malformed("bad \\u escape")
        self._hex -= 1
        if not self._hex:
            self.state = State.STRING

    def _in_atom(self, c: str) -> None:
        if c in _ATOM_CHARS and len(self._atom) < _LONGEST_ATOM:
            self._atom += c
        elif _ATOM.fullmatch(self._atom):
            self._ended()
            self.step(c)
        else:
            raise Malformed(f"not a JSON value: {self._atom[:40]}")

    def _done(self, c: str) -> None:
        if c not in _SPACE:
            raise Malformed(f"text after the value: {c!r}")


_STEPS = {
    State.VALUE: Json._value,
    State.FIRST_ITEM: Json._first_item,
    State.FIRST_KEY: Json._first_key,
    State.KEY: Json._key,
    State.COLON: Json._colon,
    State.AFTER: Json._after,
    State.STRING: Json._string,
    State.ESCAPE: Json._escape,
    State.HEX: Json._hex_digit,
    State.ATOM: Json._in_atom,
    State.DONE: Json._done,
}


class Role(Enum):
    """What a character of an object belongs to: its members' values, or everything else."""

    SYNTAX = auto()
    VALUE = auto()


class Members:
    """Walks one JSON object. After each `step`: `key` is the member at hand, `ended` whether its value just ended.

    A number ends before the character that follows it: then `ended` is set while the character itself is SYNTAX.
    """

    __slots__ = ("_inside", "_json", "_key", "ended", "key")

    def __init__(self) -> None:
        self._json = Json()
        self._key = ""
        self._inside = False
        self.key = ""
        self.ended = False

    @property
    def done(self) -> bool:
        """Whether the object is closed."""
        return self._json.state is State.DONE

    def step(self, c: str) -> Role:
        """Take one character; raises Malformed when this is no JSON object."""
        json_ = self._json
        was, depth, was_key = json_.state, json_.depth, json_.in_key
        if depth == 0 and was is State.VALUE and c not in _SPACE + "{":
            raise Malformed("not an object")
        json_.step(c)
        if depth == 1 and (was_key or json_.in_key):
            self._spell(c)
        return self._role(was, depth)

    def _spell(self, c: str) -> None:
        self._key += c
        if not self._json.in_key:
            self.key, self._key = json.loads(self._key), ""

    def _role(self, was: State, depth: int) -> Role:
        now = self._json.state
        begun = depth == 1 and was is State.VALUE and now is not State.VALUE
        inside = self._inside or begun
        atom_over = inside and depth == 1 and was is State.ATOM and now is not State.ATOM
        self.ended = atom_over or (inside and self._json.depth == 1 and now is State.AFTER)
        self._inside = inside and not self.ended
        return Role.VALUE if inside and not atom_over else Role.SYNTAX
