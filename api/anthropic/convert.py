"""Anthropic messages as the template side reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onecopy.runtime import turn
from onecopy.runtime.errors import BadRequest, Unsupported

from ..codec import shallow
from ..openai.fields import named_tool, unique_tools
from . import types as t

BILLING = "x-anthropic-billing-header:"
"""How a client's per-request system block starts. It says nothing to a model and would end every shared prefix."""

Plain = dict[str, Any]


def conversation(request: t.Prompted) -> tuple[list[Plain], str | None]:
    """All messages, and the text of a last assistant message: the reply continues it."""
    if not request.messages:
        raise BadRequest("messages must not be empty.", param="messages")
    names: dict[str, str] = {}
    found = system_of(request.system)
    for i, message in enumerate(request.messages):
        found += plain(message, f"messages.{i}", names)
    last = found[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return found, None
    return found[:-1], last["content"].rstrip()


def system_of(system: str | list[t.TextBlock] | None) -> list[Plain]:
    blocks = [system] if isinstance(system, str) else [block.text for block in system or ()]
    kept = [text for text in blocks if text and not (text.startswith(BILLING) and not isinstance(system, str))]
    return [{"role": "system", "content": "\n\n".join(kept)}] if kept else []


def plain(message: t.Message, path: str, names: dict[str, str]) -> list[Plain]:
    """One message as one or more: tool results become messages of their own, in order, before the text that follows.

    names: tool names by call id; calls add to it, results read it.
    """
    if message.content is None or isinstance(message.content, str):
        return [{"role": message.role, "content": message.content or ""}]
    if message.role == "assistant":
        return [_assistant(message.content, path, names)]
    return _user(message.role, message.content, path, names)


def tools_of(raw: Sequence[t.Tool] | None) -> tuple[turn.Tool, ...]:
    """Function tools. Tools that Anthropic's servers run have no schema here and are skipped."""
    found = [
        turn.Tool(
            tool.name,
            tool.description or "",
            shallow(tool.input_schema or {}, f"tools.{i}.input_schema"),
            bool(tool.strict),
        )
        for i, tool in enumerate(raw or ())
        if tool.type in (None, "custom")
    ]
    return unique_tools(found)


def choice_of(raw: t.ToolChoice | None, tools: Sequence[turn.Tool]) -> str:
    if raw is None or raw.type in ("auto", "none"):
        return "none" if raw and raw.type == "none" else "auto"
    if not tools:
        raise BadRequest(f"tool_choice is {raw.type}, but the request has no tools.", param="tool_choice")
    return "required" if raw.type == "any" else named_tool(raw.name or "", tools)


def template_kwargs(request: t.Prompted) -> Plain:
    """Thinking is off unless it was asked for, as the API has it."""
    kwargs: Plain = {"enable_thinking": request.thinking is not None and request.thinking.type != "disabled"}
    if request.output_config and request.output_config.effort:
        kwargs["reasoning_effort"] = request.output_config.effort
    return kwargs


def _assistant(blocks: Sequence[t.Block], path: str, names: dict[str, str]) -> Plain:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Plain] = []
    for i, block in enumerate(blocks):
        match block:
            case t.TextBlock():
                texts.append(block.text)
            case t.ThinkingBlock():
                thoughts.append(block.thinking)
            case t.ToolUseBlock():
                calls.append(_call(block, f"{path}.content.{i}"))
                names[block.id] = block.name
            case t.RedactedBlock():
                pass
            case _:
                raise _refused(block, f"{path}.content.{i}")
    found: Plain = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _user(role: str, blocks: Sequence[t.Block], path: str, names: dict[str, str]) -> list[Plain]:
    found: list[Plain] = []
    for i, block in enumerate(blocks):
        where = f"{path}.content.{i}"
        if isinstance(block, t.ToolResultBlock):
            found.append(_result(block, where, names))
            continue
        text = _text(block, where)
        if found and found[-1]["role"] == role:
            found[-1]["content"] += text
        else:
            found.append({"role": role, "content": text})
    return found or [{"role": role, "content": ""}]


def _result(block: t.ToolResultBlock, path: str, names: dict[str, str]) -> Plain:
    content = block.content
    if not isinstance(content, str):
        content = "".join(_text(part, f"{path}.content.{i}") for i, part in enumerate(content or ()))
    found = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if name := names.get(block.tool_use_id):
        found["name"] = name
    return found


def _call(block: t.ToolUseBlock, path: str) -> Plain:
    arguments = shallow(block.input or {}, f"{path}.input")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(block: object, path: str) -> str:
    match block:
        case t.TextBlock():
            return block.text
        case t.ReferenceBlock():
            return block.tool_name or ""
        case t.DocumentBlock(source={"type": "text", "data": str(data)}):
            return data
    raise _refused(block, path)


def _refused(block: object, path: str) -> Unsupported:
    kind = type(block).__struct_config__.tag  # type: ignore[attr-defined]
    return Unsupported(f"A block of type {kind!r} is not supported here; this model reads text only.", param=path)
