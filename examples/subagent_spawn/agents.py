"""A subagent: an errand, a tool, a report. The same loop for a fork in this process and for an HTTP client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
from onecopy.api import Answer, Conversation, Reasoning, Receipt, Requested, Started, Text, ToolCall

from .board import Board
from .sandbox import TOOLS, Sandbox

STEPS = 2
"""Tool calls an agent may make before it must report."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What one subagent is for. tool: the one it begins with."""

    name: str
    prompt: str
    tool: str


ERRANDS = (
    Errand("layout", "List the top folder and say in one sentence what kind of project this is.", "list_dir"),
    Errand("errors", "Read a file of this project and name one thing that it defines.", "read_file"),
    Errand("users", "Find a line that defines a class and name that class.", "grep"),
    Errand("review", "Read a file that was shown and say one thing that could be better.", "read_file"),
)


@dataclass(frozen=True, slots=True)
class Said:
    """What an agent's model said, and what it cost."""

    text: str
    calls: tuple[Requested, ...]
    tokens: int
    prefilled: int
    copied: int


class Speaker(Protocol):
    """A conversation of some kind."""

    async def say(self, messages: Sequence[dict[str, Any]], **settings: Any) -> Said: ...


async def errand(speaker: Speaker, task: Errand, sandbox: Sandbox, max_tokens: int) -> str:
    """Run one errand: its tool first, more if the model asks, then a report.

    The tool is chosen by tool_choice, not by offering only that one: the tools are part of the prompt, and all agents
    must begin with the same prompt to share its rows.
    """
    choice: Any = {"type": "function", "function": {"name": task.tool}}
    said = await speaker.say([user(task.prompt)], tool_choice=choice, max_tokens=max_tokens)
    for _ in range(STEPS):
        if not said.calls:
            break
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": sandbox.call(call)} for call in said.calls[:STEPS]
        ]
        said = await speaker.say(results, tool_choice="none", max_tokens=max_tokens)
    return said.text.strip() or "(no report)"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@dataclass(slots=True)
class Forked:
    """A conversation in this process, watched piece by piece."""

    chat: Conversation
    board: Board
    name: str

    async def say(self, messages: Sequence[dict[str, Any]], **settings: Any) -> Said:
        sent = self.chat.send(list(messages), **settings)
        async with sent:
            async for piece in sent:
                if isinstance(piece, Started):
                    self.board.started(self.name, piece.session)
                elif isinstance(piece, Text | Reasoning | ToolCall):
                    self.board.heard(self.name, len(piece.tokens))
        answer: Answer = sent.whole
        receipt: Receipt = answer.receipt
        self.board.cost(self.name, receipt.rows_prefilled, receipt.bytes_copied)
        return Said(answer.text, answer.calls, len(answer.tokens), receipt.rows_prefilled, receipt.bytes_copied)


@dataclass(slots=True)
class Resending:
    """A client of the HTTP doors that sends its whole history in every request."""

    client: httpx.AsyncClient
    history: list[dict[str, Any]]
    board: Board
    name: str
    defaults: dict[str, Any] = field(default_factory=dict)
    sent_bytes: int = 0

    async def say(self, messages: Sequence[dict[str, Any]], **settings: Any) -> Said:
        self.history += messages
        body = {"messages": self.history, "tools": [function(tool) for tool in TOOLS], **self.defaults, **settings}
        response = await self.client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        self.sent_bytes += len(response.request.content)
        return self._read(response.json())

    def _read(self, found: dict[str, Any]) -> Said:
        message, extra = found["choices"][0]["message"], found["onecopy"]
        self.history.append({k: v for k, v in message.items() if k in ("role", "content", "tool_calls") and v})
        calls = tuple(
            Requested(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        )
        tokens = found["usage"]["completion_tokens"]
        self.board.started(self.name, extra["session"])
        self.board.heard(self.name, tokens)
        self.board.cost(self.name, extra["rows_prefilled"], extra["bytes_copied"])
        return Said(message["content"] or "", calls, tokens, extra["rows_prefilled"], extra["bytes_copied"])


def function(tool: Any) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": about}
