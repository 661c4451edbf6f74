"""Chat messages as templates expect them: one shape, whatever a client sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import BadRequest, Unsupported
from ..turn import Tool
from .formats import described

Message = dict[str, Any]

_ROLES = {"developer": "system", "function": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Every message with the keys templates know, and no others, so private keys never change a prompt.

    Content is a string (parts joined, null as ""), developer is system, the system messages at the start are one, tool
    arguments are an object. The input is not changed. Raises BadRequest that names the field.
    """
    return _one_system([_message(message, f"messages[{i}]") for i, message in enumerate(messages)])


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest("A message needs a role.", param=f"{where}.role")
    out: Message = {"role": _ROLES.get(role, role), "content": _content(message, where)}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            out[key] = clean(message[key])
    if role == "assistant":
        out |= _assistant(message, where)
    return out


def _assistant(message: Mapping[str, Any], where: str) -> Message:
    out: Message = {}
    thought = next((message[key] for key in _REASONING if isinstance(message.get(key), str)), "")
    if thought:
        out |= {"reasoning_content": clean(thought), "thinking": clean(thought)}
    calls = message.get("tool_calls") or ()
    if calls:
        out["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return out


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    if not isinstance(content, Sequence):
        raise BadRequest("Content is a string or a list of parts.", param=f"{where}.content")
    joint = "" if message.get("role") == "assistant" else "\n"
    return joint.join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return clean(part)
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS:
        raise Unsupported(f"Content of type {kind!r} is not supported by this model; send text.", param=where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise BadRequest(f"A {kind} part needs its text.", param=where)
    return clean(text)


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("A tool call needs a function with a name.", param=f"{where}.function")
    out = {"type": "function", "function": {"name": clean(function["name"]), "arguments": _arguments(function)}}
    return {"id": call["id"], **out} if isinstance(call.get("id"), str) else out


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Templates walk the arguments. What a model once wrote wrongly is kept under one key instead of refused."""
    written = function.get("arguments")
    try:
        value = json.loads(clean(written)) if isinstance(written, str) and written.strip() else written
    except (ValueError, RecursionError):
        return {"raw": clean(str(written))}
    if isinstance(value, Mapping):
        return dict(value)
    return {} if value is None or value == "" or value == [] else {"raw": value}


def clean(text: str) -> str:
    """The text without lone surrogates, which JSON can carry and UTF-8 cannot; pairs become their character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _one_system(messages: list[Message]) -> list[Message]:
    """Templates take one system message, first; clients send several (system and developer)."""
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(m["content"] for m in messages[:count] if m["content"])
    return [{"role": "system", "content": text}, *messages[count:]]


def tools_in_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """For a template that knows no tools: the tools described in the system message, calls and results as text.

    The format is the one many open models were trained on (Hermes): JSON between <tool_call> tags.
    """
    out: list[Message] = []
    for message in messages:
        _append(out, _as_text(message))
    if not tools:
        return out
    first = out.pop(0)["content"] + "\n\n" if out and out[0]["role"] == "system" else ""
    return [{"role": "system", "content": first + _instructions(tools)}, *out]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>", "tool": True}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
    content = "\n".join(filter(None, [message["content"], *calls]))
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _append(out: list[Message], message: Message) -> None:
    """Results that follow each other are one user message: templates want roles to alternate."""
    if message.get("tool") and out and out[-1].get("tool"):
        out[-1]["content"] += "\n" + message["content"]
    else:
        out.append(message)


def _instructions(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(described(tool), ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. The functions, one JSON description a line:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments as JSON between these tags, and nothing else:\n"
        '<tool_call>\n{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>'
    )
