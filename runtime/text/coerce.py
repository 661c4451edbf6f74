"""Types tool arguments by their JSON schema: models write "3" where the schema wants 3."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]

_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,300}\s*")
_NUMBER = re.compile(r"\s*[+-]?([0-9]{1,300}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*")


def types(schema: Any) -> frozenset[str]:
    """The JSON types a schema names, through anyOf and oneOf; empty when it names none."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {t for t in _list(named) if isinstance(t, str)}
    for branch in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        found |= types(branch)
    return frozenset(found)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def member(schema: Any, name: str) -> Any:
    """The schema of a property; {} when it has none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name, {}) if isinstance(properties, Mapping) else {}


def kind(value: Any) -> str:
    """The JSON type of a parsed value."""
    return _KINDS[type(value)]


_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"} | {
    type(None): "null"
}


def coerce(value: Any, schema: Any) -> Any:
    """`value` as the schema wants it, where there is one honest reading; else `value` unchanged."""
    wanted = types(schema)
    have = kind(value)
    if not wanted or have in wanted or (have == "integer" and "number" in wanted):
        return _inside(value, schema)
    for name in _ORDER:
        if name in wanted and (read := _READ[name](value)) is not _NOTHING:
            return _inside(read, schema)
    return value


def _inside(value: Any, schema: Any) -> Any:
    if isinstance(value, dict):
        return {k: coerce(v, member(schema, k)) for k, v in value.items()}
    items = schema.get("items") if isinstance(schema, Mapping) else None
    if isinstance(value, list) and isinstance(items, Mapping):
        return [coerce(v, items) for v in value]
    return value


class _Nothing:
    """No honest reading."""


_NOTHING = _Nothing()


def _integer(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and _INTEGER.fullmatch(value) else _NOTHING


def _number(value: Any) -> Any:
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else _NOTHING


def _boolean(value: Any) -> Any:
    words = {"true": True, "false": False}
    return words.get(value.strip().lower(), _NOTHING) if isinstance(value, str) else _NOTHING


def _null(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("null", "none") else _NOTHING


def _string(value: Any) -> Any:
    unsaid = value is None or (isinstance(value, float) and not math.isfinite(value))
    return _NOTHING if unsaid else json.dumps(value, ensure_ascii=False)


def _parsed(type_: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        try:
            found = json.loads(value) if isinstance(value, str) else None
        except (ValueError, RecursionError):
            return _NOTHING
        return found if isinstance(found, type_) else _NOTHING

    return read


# The narrow types first: "3" may be an integer, a number or a string, and is the first of these the schema allows.
_ORDER = ("integer", "number", "boolean", "null", "object", "array", "string")
_READ: dict[str, Callable[[Any], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _parsed(dict),
    "array": _parsed(list),
    "string": _string,
}
