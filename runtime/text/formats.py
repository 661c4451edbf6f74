"""The ways models write tool calls: which one a chat template uses, its marks, and mlx-lm's parser for it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..turn import Tool
from .json_walk import Malformed

Has = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Call:
    """One parsed call. arguments: the parsed object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls. start, end: the marks around them ("" = up to the next call or the end of the reply).

    quotes: marks around argument text, inside which an end mark is only text. json: the body is
    {"name": ..., "arguments": {...}}. strict: the parser refuses a body that was cut off.
    """

    name: str
    start: str
    end: str
    parser: Callable[[str, Any], Any]
    quotes: tuple[str, str] | None = None
    json: bool = False
    strict: bool = False

    def parse(self, body: str, tools: Sequence[Tool]) -> list[Call]:
        """The calls in the text between the marks; raises Malformed. mlx-lm's parsers fail in many ways."""
        try:
            found = self.parser(body, [described(tool) for tool in tools])
        except Exception as error:
            raise Malformed(str(error)) from error
        calls = [_call(item) for item in (found if isinstance(found, list) else [found])]
        if not calls:
            raise Malformed("no call")
        return calls


def described(tool: Tool) -> dict[str, Any]:
    """A tool as templates and parsers know it: OpenAI's nested shape."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _call(item: Any) -> Call:
    if not isinstance(item, dict):
        raise Malformed("a call is an object")
    name, arguments = item.get("name"), item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Malformed("a call has a name and arguments")
    return Call(name, arguments)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error


# In this order the first rule that holds names the format; each lists the texts a template must contain.
_BY_TEMPLATE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("qwen3_coder", ("<tool_call>\\n<function=",)),
    ("qwen3_coder", ("<tool_call>\n<function=",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("muse_spark", ("<atem:function_calls>",)),
    ("json_tools", ("<tool_call>", "tool_call.name")),
    ("json_tools", ("<tool_call>", "tool_calls")),
)
_BY_VOCABULARY: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    ("pythonic", ("<|tool_call_start|>", "<|tool_call_end|>")),
)
_QUOTES = {
    "qwen3_coder": ("<parameter=", "</parameter>"),
    "minimax_m2": ("<parameter name=", "</parameter>"),
    "glm47": ("<arg_value>", "</arg_value>"),
    "laguna": ("<arg_value>", "</arg_value>"),
    "longcat": ("<longcat_arg_value>", "</longcat_arg_value>"),
    "minicpm5": ("<param name=", "</param>"),
    "muse_spark": ("<atem:parameter", "</atem:parameter>"),
    "gemma4": ('<|"|>', '<|"|>'),
    "function_gemma": ("<escape>", "<escape>"),
}
_STRICT = frozenset({"json_tools", "qwen3_coder", "gemma4", "mistral"})


def infer(template: str, in_vocabulary: Has) -> str | None:
    """The name of the format a template writes calls in, by the marks it contains, else by its vocabulary."""
    return _first(_BY_TEMPLATE, template.__contains__) or _first(_BY_VOCABULARY, in_vocabulary)


def _first(rules: tuple[tuple[str, tuple[str, ...]], ...], has: Has) -> str | None:
    return next((name for name, marks in rules if all(map(has, marks))), None)


@lru_cache(maxsize=64)
def tool_format(name: str) -> ToolFormat:
    """The format called `name`, with mlx-lm's parser and marks (loads mlx-lm)."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return ToolFormat(
        name,
        module.tool_call_start,
        module.tool_call_end,
        module.parse_tool_call,
        _QUOTES.get(name),
        json=name == "json_tools",
        strict=name in _STRICT,
    )
