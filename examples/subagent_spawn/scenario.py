"""The scenario: a long parent, its subagents as forks, then the same errands without forks and over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio
from onecopy.api import Conversation, Runtime
from onecopy.api.app import create_app
from onecopy.api.server import listen, serve, url_of
from rich.console import Console

from .agents import ERRANDS, Errand, Forked, Resending, errand, user
from .board import Board, Way, comparison, shown
from .sandbox import TOOLS, Sandbox

SYSTEM = "You are a careful engineer. Files of a project follow, then questions about them."
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run. context: prompt tokens the parent grows to. children: subagents. max_tokens: of an answer."""

    root: Path
    context: int = 1000
    children: int = 4
    limit: int | None = None
    max_tokens: int = 24

    def errands(self) -> list[Errand]:
        every = [ERRANDS[i % len(ERRANDS)] for i in range(self.children)]
        return [Errand(f"{i + 1} {task.name}", task.prompt, task.tool) for i, task in enumerate(every)]


@dataclass(slots=True)
class Scenario:
    """One run over an open runtime. `ways` fills as the ways are done."""

    runtime: Runtime
    plan: Plan
    console: Console
    board: Board = field(init=False)
    sandbox: Sandbox = field(init=False)
    ways: list[Way] = field(default_factory=list)

    def __post_init__(self) -> None:
        row_bytes = int(self.runtime.card.features.get("row_bytes", 1))
        self.board = Board(trio.current_time, row_bytes)
        self.sandbox = Sandbox(self.plan.root)

    async def run(self) -> list[Way]:
        parent = await self.grow()
        self.console.print(f"parent: {len(parent.tokens)} tokens in {len(parent.messages)} messages")
        await self.forks(parent)
        await self.independent(parent)
        await self.over_http(parent)
        self.console.print(comparison(self.ways, self.board.row_bytes))
        return self.ways

    async def grow(self) -> Conversation:
        """The parent reads files, one turn each, until it is as long as planned."""
        parent = self.runtime.conversation(SYSTEM, tools=TOOLS, tool_choice="none", **GREEDY)
        for path in self.sandbox.files():
            text = path.read_text(encoding="utf-8")
            room = 3 * (self.plan.context - len(parent.tokens))
            if room < 200:
                break
            await parent.send(f"{path.relative_to(self.plan.root)}:\n{text[: min(room, 2400)]}", max_tokens=2)
        return parent

    async def forks(self, parent: Conversation) -> None:
        """Subagents as children; their reports come back as they finish and go into the parent."""
        tasks = self.plan.errands()
        reports: list[str] = []
        before, begun = await self.kept(), trio.current_time()
        self.board.begin("forks of one parent", [task.name for task in tasks])
        async with shown(self.board, self.runtime, self.console):
            spawn = self.runtime.spawn(parent, tasks, run=self.work, limit=self.plan.limit)
            chats = []
            async with spawn as children:
                async for child in children:
                    reports.append(f"{child.prompt.name}: {child.result}")
                    chats.append(child.chat)
        self.ways.append(self.board.way(trio.current_time() - begun, await self.kept() - before))
        summary = await parent.send("Reports:\n" + "\n".join(reports) + "\nSum up.", max_tokens=self.plan.max_tokens)
        self.console.print(f"parent, after the reports: {' '.join(summary.text.split())}")
        await self.forget(chats)

    async def independent(self, parent: Conversation) -> None:
        """The same errands in sessions that share nothing: each computes and keeps the whole parent itself."""
        tasks = self.plan.errands()
        history = parent.messages[:-2]
        chats = [
            self.runtime.conversation(messages=history, tools=TOOLS, cache_salt=task.name, **GREEDY) for task in tasks
        ]
        before, begun = await self.kept(), trio.current_time()
        self.board.begin("independent sessions", [task.name for task in tasks])
        async with shown(self.board, self.runtime, self.console), trio.open_nursery() as nursery:
            for chat, task in zip(chats, tasks, strict=True):
                nursery.start_soon(self.work, chat, task)
        self.ways.append(self.board.way(trio.current_time() - begun, await self.kept() - before))
        await self.forget(chats)

    async def over_http(self, parent: Conversation) -> None:
        """The same errands by clients that resend everything; the server finds their rows by token identity."""
        tasks = self.plan.errands()
        before, begun = await self.kept(), trio.current_time()
        self.board.begin("HTTP clients that resend", [task.name for task in tasks])
        async with trio.open_nursery() as nursery:
            listener, stop = listen("127.0.0.1", 0), trio.Event()
            nursery.start_soon(lambda: serve(create_app(self.runtime.service), listener, stop=stop.wait, grace=0.5))
            async with httpx.AsyncClient(base_url=url_of(listener), timeout=None) as client:
                sent = await self.clients(client, tasks, parent.messages[:-2])
            stop.set()
        self.ways.append(self.board.way(trio.current_time() - begun, await self.kept() - before, sent))

    async def clients(
        self, client: httpx.AsyncClient, tasks: Sequence[Errand], history: Sequence[dict[str, Any]]
    ) -> int:
        """Bytes the clients sent."""
        speakers = [Resending(client, [*history], self.board, task.name, {**GREEDY}) for task in tasks]
        async with shown(self.board, self.runtime, self.console), trio.open_nursery() as nursery:
            for speaker, task in zip(speakers, tasks, strict=True):
                nursery.start_soon(self._report, speaker, task)
        return sum(speaker.sent_bytes for speaker in speakers)

    async def work(self, chat: Conversation, task: Errand) -> str:
        """What a child does: one errand."""
        return await self._report(Forked(chat, self.board, task.name), task)

    async def _report(self, speaker: Any, task: Errand) -> str:
        report = await errand(speaker, task, self.sandbox, self.plan.max_tokens)
        self.board.ended(task.name, report)
        return report

    async def kept(self) -> int:
        """Bytes of rows in memory now."""
        status = await self.runtime.status()
        return int(status.metrics["bank"]["bytes_used"])

    async def forget(self, chats: Sequence[Conversation]) -> None:
        for chat in chats:
            await chat.drop()


__all__ = ["Plan", "Scenario", "user"]
