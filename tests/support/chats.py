"""Chat completions asked without a socket, and what tests read of the answers."""

from __future__ import annotations

from typing import Any

from tests.support.http import Answer, Direct
from tests.support.scripted import ScriptedService

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


async def chat(service: ScriptedService, **fields: Any) -> Answer:
    return await Direct(service).post(CHAT, HI | fields)


def joined(answer: Answer, key: str, index: int = 0) -> str:
    """One field of all deltas of a choice."""
    assert answer.status == 200
    chunks = [event for event in answer.events() if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(key) or "" for choice in choices)


def reasons(answer: Answer) -> list[str]:
    chunks = [event for event in answer.events() if event != "[DONE]"]
    return [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]


def streamed_calls(answer: Answer) -> dict[int, dict[str, Any]]:
    """Tool calls put together from deltas, as a client does it."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in answer.events()[:-1]:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(delta["index"], {"ids": [], "names": [], "arguments": ""})
                call["ids"] += [delta["id"]] if "id" in delta else []
                call["names"] += [delta["function"]["name"]] if "name" in delta["function"] else []
                call["arguments"] += delta["function"]["arguments"]
    return calls
