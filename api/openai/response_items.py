"""Items of the Responses API as messages: what one assistant turn wrote as several items becomes one message again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onecopy.runtime.errors import BadRequest, Unsupported
from onecopy.runtime.turn import Tool

from ..codec import convert, shallow
from .fields import unique_tools
from .messages import text_of
from .response_types import CallItem, FunctionTool, MessageItem, OutputItem, ReasoningItem

Plain = dict[str, Any]


def messages_of(items: str | Sequence[Any]) -> list[Plain]:
    """The input as messages, joined where neighbours belong to one assistant turn."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    found: list[Plain] = []
    for i, raw in enumerate(items):
        merge(found, item(raw, f"input[{i}]"))
    return found


def merge(messages: list[Plain], new: Plain) -> None:
    """Append `new`, or add it to the assistant turn that `messages` ends in."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or new["role"] != "assistant":
        messages.append(new)
        return
    joined = dict(last)
    for key in ("content", "reasoning_content"):
        if new.get(key):
            joined[key] = last.get(key, "") + new[key]
    if calls := [*last.get("tool_calls", ()), *new.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    messages[-1] = joined


def item(raw: Any, path: str) -> Plain:
    if not isinstance(raw, dict):
        raise BadRequest("An input item must be an object.", param=path)
    kind = raw.get("type") or "message"
    read = ITEMS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise Unsupported(f"An input item of type {kind!r} is not offered here.", param=f"{path}.type")
    return read(raw, path)


def tools_of(raw: Sequence[Any] | None) -> tuple[Tool, ...]:
    """Function tools. Types that only OpenAI's own servers run are skipped, as clients send them to anyone."""
    functions = [
        (f"tools[{i}]", convert(tool, FunctionTool, f"tools[{i}]"))
        for i, tool in enumerate(raw or ())
        if isinstance(tool, dict) and tool.get("type") == "function"
    ]
    return unique_tools(
        [
            Tool(f.name, f.description or "", shallow(f.parameters or {}, f"{path}.parameters"), bool(f.strict))
            for path, f in functions
        ]
    )


def _message(raw: Any, path: str) -> Plain:
    read = convert(raw, MessageItem, path)
    return {"role": read.role, "content": text_of(read.content, f"{path}.content")}


def _call(raw: Any, path: str) -> Plain:
    read = convert(raw, CallItem, path)
    arguments = read.arguments if isinstance(read.arguments, str) else shallow(read.arguments or {}, path)
    function = {"name": read.name, "arguments": arguments}
    call = {"id": read.call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _output(raw: Any, path: str) -> Plain:
    read = convert(raw, OutputItem, path)
    return {"role": "tool", "tool_call_id": read.call_id, "content": text_of(read.output, f"{path}.output")}


def _reasoning(raw: Any, path: str) -> Plain:
    read = convert(raw, ReasoningItem, path)
    text = "".join(part.text for part in read.content or read.summary or ())
    return {"role": "assistant", "content": "", "reasoning_content": text}


ITEMS: Mapping[str, Callable[[Any, str], Plain]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}
