"""Which tool format a template writes, and that it agrees with mlx-lm about it."""

from __future__ import annotations

import importlib
import pkgutil

import mlx_lm.tool_parsers
import pytest
from mlx_lm import tokenizer_utils
from onecopy.runtime.text.formats import infer, tool_format
from onecopy.runtime.text.json_walk import Malformed
from onecopy.runtime.turn import Tool

PARSERS = [m.name for m in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)]
TEMPLATES = [
    "<minimax:tool_call>",
    "<|tool_call>x<tool_call|>",
    "<start_function_call>",
    "<longcat_tool_call>",
    "<tool_call>tool_call.name <arg_key>",
    "<|tool_list_start|>",
    "<|tool_call_start|>",
    "<tool_call>\\n<function=",
    "<tool_call>\n<function= tool_call.name",
    "<|tool_calls_section_begin|>",
    '<function name="x"><param name="y">',
    "[TOOL_CALLS]",
    "<atem:function_calls>",
    "<tool_call>{{ tool_call.name }}</tool_call>",
    "no tools here",
]
VOCABULARIES = [
    set(),
    {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"},
    {"<|tool_call_start|>", "<|tool_call_end|>"},
]


class Named:
    """What mlx-lm looks at."""

    def __init__(self, template: str, vocabulary: set[str]) -> None:
        self.chat_template = template
        self._vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return dict.fromkeys(self._vocabulary, 0)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_format_is_the_one_mlx_lm_would_pick(template: str, vocabulary: set[str]) -> None:
    theirs = tokenizer_utils._infer_tool_parser(Named(template, vocabulary))
    assert infer(template, vocabulary.__contains__) == theirs


@pytest.mark.parametrize("name", PARSERS)
def test_every_parser_mlx_lm_has_can_be_read(name: str) -> None:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    assert tool_format(name).start == module.tool_call_start
    assert tool_format(name).end == module.tool_call_end


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("body", ["", "{", "[[[", "\x00", "<function=", '{"name": 3}'])
def test_a_body_no_parser_understands_is_malformed_or_names_a_call(name: str, body: str) -> None:
    try:
        calls = tool_format(name).parse(body, [Tool("f", "", {})])
    except Malformed:
        return
    assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in calls)


def test_arguments_written_as_a_string_are_read() -> None:
    call = tool_format("json_tools").parse('{"name": "f", "arguments": "{\\"a\\": 1}"}', [])[0]
    assert call.arguments == {"a": 1}
