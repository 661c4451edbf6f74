"""Grammars that make a reply call a tool: for tool_choice "required" and for a named tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import BadRequest, Unsupported
from ..turn import Grammar, Tool
from .coerce import types
from .grammar import LAYOUT
from .tokenizer import Tokenizer

_PARAM = "tool_choice"


def chosen(tools: Sequence[Tool], choice: str) -> tuple[Tool, ...]:
    """The tools a choice allows; raises BadRequest for a choice that cannot be met."""
    if choice in ("auto", "none"):
        return tuple(tools) if choice == "auto" else ()
    if not tools:
        raise BadRequest(f"tool_choice {choice!r} needs tools.", param=_PARAM)
    named = tuple(tool for tool in tools if choice in ("required", tool.name))
    if not named:
        raise BadRequest(f"tool_choice names {choice!r}, which is not among the tools.", param=_PARAM)
    return named


def forced_calls(
    format_name: str | None, tools: Sequence[Tool], choice: str, *, parallel: bool, tokenizer: Tokenizer
) -> Grammar | None:
    """The grammar of a reply that calls what `choice` demands; None when it demands nothing ("auto", "none").

    format_name: how the template writes calls (`ChatFormat.tool_format_name`). Raises Unsupported for a format whose
    calls we cannot force.
    """
    allowed = chosen(tools, choice)
    if choice in ("auto", "none"):
        return None
    rules = _FORMATS.get(format_name or "")
    if rules is None:
        raise Unsupported(f"tool_choice {choice!r} is not supported with this model's tool format.", param=_PARAM)
    mark = _Marks(tokenizer)
    lines = [line for i, tool in enumerate(allowed) for line in rules(i, tool, mark)]
    one = " | ".join(f"call_{i}" for i in range(len(allowed)))
    start = 'start: one ("\\n" one)*' if parallel else "start: one"
    return Grammar("lark", "\n".join([start, f"one: {one}", *lines]) + "\n")


class _Marks:
    """Spells a mark: as its control token when it has one, else as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> str:
        token = self._tokenizer.token_id(text)
        return f"<[{token}]>" if token is not None and self._tokenizer.is_special(token) else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any, root: Mapping[str, Any]) -> str:
    """A schema in a rule. Tool schemas are hints written for many servers: what cannot be enforced is left open."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    known = schema if isinstance(schema, Mapping) else {}
    return "%json " + json.dumps({**shared, **known, "x-guidance": {**LAYOUT, "lenient": True}})


def _json_style(i: int, tool: Tool, mark: _Marks) -> list[str]:
    head = _text(f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    foot = _text("}\n")
    call = f"call_{i}: {mark('<tool_call>')} {head} args_{i} {foot} {mark('</tool_call>')}"
    return [call, f"args_{i}: {_json({**tool.parameters, 'type': 'object'}, {})}"]


def _tag_style(i: int, tool: Tool, mark: _Marks) -> list[str]:
    properties = tool.parameters.get("properties")
    fields = dict(properties) if isinstance(properties, Mapping) else {}
    required = tool.parameters.get("required") or ()
    names = " ".join(f"p_{i}_{k}" + ("" if name in required else "?") for k, name in enumerate(fields))
    head, foot = _text(f"\n<function={tool.name}>\n"), _text("</function>\n")
    call = f"call_{i}: {mark('<tool_call>')} {head} {names} {foot} {mark('</tool_call>')}"
    rules = [_field(f"{i}_{k}", name, schema, tool.parameters) for k, (name, schema) in enumerate(fields.items())]
    return [call, *(line for lines in rules for line in lines)]


def _field(at: str, name: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    head, foot = _text(f"<parameter={name}>\n"), "\n</parameter>\n"
    options = schema.get("enum") if isinstance(schema, Mapping) else None
    if options and all(isinstance(option, str) for option in options):
        return [f"p_{at}: {head} ({' | '.join(map(_text, options))}) {_text(foot)}"]
    if types(schema) in (frozenset({"string"}), frozenset()):
        return [f"p_{at}: {head} v_{at}", f"v_{at}[suffix={_text(foot)}]: /(?s:.*)/"]
    return [f"p_{at}: {head} v_{at} {_text(foot)}", f"v_{at}: {_json(schema, root)}"]


_FORMATS: dict[str, Callable[[int, Tool, _Marks], list[str]]] = {"json_tools": _json_style, "qwen3_coder": _tag_style}
