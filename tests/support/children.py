"""A real server process over a checkpoint: started, asked, stopped and killed as an operating system would."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import trio

from tests.support.system import CHAT, PATIENCE, Reply

CLI = "from onecopy.api.cli import entry; entry()"
START = 120.0
_SERVES = re.compile(r"onecopy serves .* on (http://\S+)")
_SAVED = re.compile(r"saved (\S+): (\d+) tokens on disk")
_salts = count(1)


class Child:
    """One server process. log: its lines on stderr so far. url: set once it serves.

    before: a program that runs the server's command line. cli: Python that runs the arguments.
    """

    def __init__(self, model: Path, *more: str, before: Sequence[str] = (), cli: str = CLI) -> None:
        serve = ["serve", str(model), "--port", "0", "--context", "16384", *more]
        command = [*before, sys.executable, "-c", cli, *serve]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url = ""
        self.http: httpx.AsyncClient
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if found := _SERVES.search(line):
                self.url = found[1]

    @property
    def acknowledged(self) -> dict[str, int]:
        """Rows that the log says are on disk, by session."""
        found = (_SAVED.search(line) for line in list(self.log))
        return {f[1]: int(f[2]) for f in found if f}

    async def started(self) -> None:
        with trio.fail_after(START):
            while not self.url:
                assert self.process.poll() is None, "\n".join(self.log)
                await trio.sleep(0.02)

    async def ask(self, wanted: dict[str, Any]) -> Reply:
        answer = await self.http.post(CHAT, json=wanted)
        assert answer.status_code == 200, answer.text
        return Reply.of(answer.json())

    async def cold(self, wanted: dict[str, Any]) -> Reply:
        reply = await self.ask({**wanted, "cache_salt": f"cold {next(_salts)}"})
        assert reply.cached == 0
        return reply

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    async def ended(self) -> int:
        """The exit code, once the process has ended."""
        with trio.fail_after(PATIENCE):
            while self.process.poll() is None:
                await trio.sleep(0.02)
        self._reader.join()
        return self.process.returncode


@asynccontextmanager
async def child(
    model: Path, store: str, *more: str, before: Sequence[str] = (), cli: str = CLI
) -> AsyncIterator[Child]:
    """A serving process around the block; whatever is left of it at the end is killed."""
    made = Child(model, "--store", store, *more, before=before, cli=cli)
    try:
        await made.started()
        async with httpx.AsyncClient(base_url=made.url, timeout=PATIENCE) as made.http:
            yield made
    finally:
        made.kill()
        assert made.process.stderr is not None
        made.process.stderr.close()


async def stopped(made: Child) -> None:
    """SIGTERM, and an orderly end."""
    made.signal(signal.SIGTERM)
    code = await made.ended()
    assert code == 0, "\n".join(made.log[-20:])
