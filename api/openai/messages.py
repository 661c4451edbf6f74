"""Messages as the template side reads them: parts joined, roles in one vocabulary, nothing lost, nothing invented."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onecopy.runtime.errors import Unsupported

from ..codec import shallow
from .types import Content, InputTextPart, Message, OutputTextPart, RefusalPart, TextPart, ToolCall


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message(raw, f"messages[{i}]") for i, raw in enumerate(messages)]


def message(raw: Message, path: str) -> dict[str, Any]:
    """One message as a plain mapping. null, "" and absent content are the same."""
    found: dict[str, Any] = {"role": "tool" if raw.role == "function" else raw.role}
    found["content"] = text_of(raw.content, f"{path}.content")
    if reasoning := raw.reasoning_content or (raw.reasoning if isinstance(raw.reasoning, str) else None):
        found["reasoning_content"] = reasoning
    if calls := calls_of(raw, path):
        found["tool_calls"] = calls
    if raw.tool_call_id is not None:
        found["tool_call_id"] = raw.tool_call_id
    if raw.name is not None:
        found["name"] = raw.name
    return found


def text_of(content: Content, path: str) -> str:
    """Content as one text: parts joined in order. A part that is not text is refused, never skipped."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text(part, f"{path}[{i}]") for i, part in enumerate(content))


def calls_of(raw: Message, path: str) -> list[dict[str, Any]]:
    found = [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(raw.tool_calls or ())]
    if raw.function_call:
        found.append(_call(ToolCall(raw.function_call), f"{path}.function_call"))
    return found


def _text(part: object, path: str) -> str:
    match part:
        case TextPart() | InputTextPart() | OutputTextPart():
            return part.text
        case RefusalPart():
            return part.refusal
    kind = type(part).__struct_config__.tag  # type: ignore[attr-defined]
    raise Unsupported(f"This model reads text only; a part of type {kind!r} is not offered.", param=path)


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        arguments = shallow(arguments or {}, f"{path}.function.arguments")
    found: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        found["id"] = call.id
    return found
