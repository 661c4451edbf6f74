"""What the person sees: a live table of sessions, and the comparison at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from onecopy.actors.service import SessionInfo
from onecopy.api import Runtime
from rich.console import Console
from rich.live import Live
from rich.table import Table

REFRESH = 0.25
"""Seconds between two looks at the sessions."""


@dataclass(slots=True)
class Line:
    """One agent. tokens are delivered ones; copied in bytes; began and ended in seconds."""

    name: str
    began: float
    session: str | None = None
    tokens: int = 0
    prefilled: int = 0
    copied: int = 0
    ended: float | None = None
    report: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the errands, measured. kept: bytes of rows more than before; sent: bytes over HTTP."""

    name: str
    seconds: float
    prefilled: int
    copied: int
    kept: int
    tokens: int
    sent: int = 0


@dataclass(slots=True)
class Board:
    """Lines of one way at a time, and a table of them whenever somebody looks."""

    now: Callable[[], float]
    row_bytes: int
    title: str = ""
    lines: dict[str, Line] = field(default_factory=dict)
    sessions: dict[str, SessionInfo] = field(default_factory=dict)

    def begin(self, title: str, names: Sequence[str]) -> None:
        self.title = title
        self.lines = {name: Line(name, self.now()) for name in names}

    def started(self, name: str, session: str) -> None:
        self.lines[name].session = session

    def heard(self, name: str, tokens: int) -> None:
        self.lines[name].tokens += tokens

    def cost(self, name: str, prefilled: int, copied: int) -> None:
        self.lines[name].prefilled += prefilled
        self.lines[name].copied += copied

    def ended(self, name: str, report: str) -> None:
        self.lines[name].ended, self.lines[name].report = self.now(), report

    def way(self, seconds: float, kept: int, sent: int = 0) -> Way:
        """The lines summed up."""
        lines = self.lines.values()
        prefilled, copied = sum(line.prefilled for line in lines), sum(line.copied for line in lines)
        return Way(self.title, seconds, prefilled, copied, kept, sum(line.tokens for line in lines), sent)

    def table(self) -> Table:
        made = Table(title=self.title, caption="shared, owned: rows")
        for head in ("agent", "state", "shared", "owned", "KiB copied", "tokens", "tok/s", "report"):
            text = head in ("agent", "state", "report")
            made.add_column(head, justify="left" if text else "right", no_wrap=True)
        for line in self.lines.values():
            made.add_row(*self._cells(line))
        return made

    def _cells(self, line: Line) -> list[str]:
        info = self.sessions.get(line.session or "")
        owned = min(info.tokens, info.held // self.row_bytes) if info else 0
        shared = info.tokens - owned if info else 0
        seconds = (line.ended or self.now()) - line.began
        state = "done" if line.ended else info.state if info else "waiting"
        speed = line.tokens / seconds if seconds > 0 else 0.0
        report = " ".join(line.report.split())[:28]
        numbers = [f"{shared}", f"{owned}", f"{line.copied / 1024:.0f}", f"{line.tokens}", f"{speed:.1f}"]
        return [line.name, state, *numbers, report]


@asynccontextmanager
async def shown(board: Board, runtime: Runtime, console: Console) -> AsyncIterator[None]:
    """The table on the terminal while the block runs, looked up from the running system."""

    async def look(live: Live) -> None:
        while True:
            board.sessions = {info.id: info for info in await runtime.service.sessions()}
            live.update(board.table())
            await trio.sleep(REFRESH)

    with Live(board.table(), console=console, auto_refresh=True, refresh_per_second=4) as live:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look, live)
            yield
            nursery.cancel_scope.cancel()
        board.sessions = {info.id: info for info in await runtime.service.sessions()}
        live.update(board.table())
    console.print()


def comparison(ways: Sequence[Way], row_bytes: int) -> Table:
    """The ways side by side; the first one is the measure."""
    made = Table(title="the same errands, three ways")
    for head in ("way", "seconds", "rows computed", "rows kept", "MiB kept", "KiB copied", "KiB sent"):
        made.add_column(head, justify="left" if head == "way" else "right", no_wrap=head == "way")
    for way in ways:
        kept = [f"{way.kept // row_bytes}", f"{way.kept / (1 << 20):.1f}"]
        costs = [f"{way.copied / 1024:.0f}", f"{way.sent / 1024:.0f}"]
        made.add_row(way.name, f"{way.seconds:.1f}", f"{way.prefilled}", *kept, *costs)
    return made
