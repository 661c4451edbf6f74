"""Servers as subprocesses: started on free ports, asked until they answer, stopped whatever happens."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import trio

from .client import client
from .common import Report, sized
from .peers import ROOT, PeerMissing, build_llama, exported, llama_python
from .prompts import without_end

START = 300.0
"""Seconds a server may take until it answers."""
STOP = 30.0
OURS = "onecopy"
ALIVE = {"llama.cpp": "/v1/models"}
"""Where a server says that it serves; /health unless named here."""
CLI = "from onecopy.api.cli import entry; entry()"


@dataclass(slots=True)
class Server:
    """A running server. http: a client at it. fields: what every request to it carries. ready: seconds to the first
    answer."""

    kind: str
    process: subprocess.Popen[bytes]
    http: httpx.AsyncClient
    ready: float
    fields: dict[str, Any] = field(default_factory=dict)

    def body(self, messages: Sequence[dict[str, str]], tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy chat request for exactly `tokens` tokens."""
        return {"messages": list(messages), "max_tokens": tokens, "temperature": 0, **self.fields, **more}

    def memory(self) -> int:
        """Bytes of memory the server's processes use now."""
        root = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in (root, *root.children(recursive=True)))


# --- command lines


def onecopy(model: str, port: int, more: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", CLI, "serve", model, "--port", str(port), "--log-level", "warning", *more]


def mlx_stock(model: str, port: int, more: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "mlx_lm", "server", *_mlx(model, port), *more]


def mlx_openblas(model: str, port: int, more: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.peers", "mlx", *_mlx(model, port), *more]


def _mlx(model: str, port: int) -> list[str]:
    return ["--model", str(exported(model)), "--port", str(port), "--log-level", "WARNING"]


def llama(model: str, port: int, more: Sequence[str]) -> list[str]:
    from onecopy.runtime.models import resolve

    python, source = llama_python(), resolve(model)
    if source.kind != "gguf":
        raise PeerMissing("llama.cpp needs a GGUF file")
    if python is None:
        raise PeerMissing("llama.cpp is not built here: python -m benchmarks.peers build")
    flags = ["--n_ctx", "8192", "--interrupt_requests", "false", "--verbose", "false", "--logits_all", "false"]
    threads = ["--n_threads", str(psutil.cpu_count()), "--n_threads_batch", str(psutil.cpu_count())]
    return [str(python), "-m", "llama_cpp.server", "--model", str(source.path), "--port", str(port), *flags, *threads]


Line = Callable[[str, int, Sequence[str]], list[str]]
KINDS: dict[str, Line] = {
    OURS: onecopy,
    "mlx-lm": mlx_stock,
    "mlx-lm + OpenBLAS": mlx_openblas,
    "llama.cpp": llama,
}
SHORT = {"mlx": "mlx-lm", "mlx-openblas": "mlx-lm + OpenBLAS", "llama": "llama.cpp"}
"""Names of the peers on the command line."""


def add_peers_flag(parser: argparse.ArgumentParser, default: str = ",".join(SHORT)) -> None:
    parser.add_argument(
        "--peers", default=default, metavar="NAMES", help=f"of {', '.join(SHORT)}, or none (default: {default})"
    )


def peers_of(options: argparse.Namespace, *, leave_when_quick: Sequence[str] = ()) -> list[str]:
    """The peers to measure beside ours. A smoke run has none."""
    named = [name for name in options.peers.split(",") if name and name != "none"]
    if unknown := set(named) - set(SHORT):
        raise SystemExit(f"unknown peers: {', '.join(sorted(unknown))}; known are {', '.join(SHORT)}")
    wanted = [name for name in named if not (options.quick and name in leave_when_quick)]
    return sized(options, full=[SHORT[n] for n in wanted], quick=[SHORT[n] for n in wanted], smoke=[])


# --- running


@asynccontextmanager
async def started(
    kind: str, model: str, more: Sequence[str] = (), *, stop: signal.Signals = signal.SIGTERM
) -> AsyncIterator[Server]:
    """A server around the block. PeerMissing when it does not start, with the end of what it said."""
    port = free_port()
    command = KINDS[kind](model, port, more)
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"onecopy-bench-{port}.log"
    begun = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=_environment())
    try:
        async with client(f"http://127.0.0.1:{port}") as http:
            await _answers(http, process, kind, log)
            yield Server(kind, process, http, time.perf_counter() - begun, without_end(model))
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_end, process, stop)
        log.unlink(missing_ok=True)


@asynccontextmanager
async def side_by_side(
    report: Report, kinds: Sequence[str], model: str, ours: Sequence[str] = ("--no-store",)
) -> AsyncIterator[list[Server]]:
    """Ours and its peers, all running: requests then alternate between them. A peer that is missing is a note."""
    build_wanted(report, kinds)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(started(OURS, model, ours))]
        for kind in kinds:
            try:
                servers.append(await stack.enter_async_context(started(kind, model)))
            except PeerMissing as missing:
                report.note(f"{kind} is left out: {missing}")
        yield servers


def build_wanted(report: Report, kinds: Sequence[str]) -> None:
    """llama.cpp is built when a full run wants it; the short set takes it only if it is there."""
    if "llama.cpp" in kinds and not report.settings.get("quick"):
        try:
            build_llama()
        except PeerMissing as missing:
            report.note(str(missing))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _answers(http: httpx.AsyncClient, process: subprocess.Popen[bytes], kind: str, log: Path) -> None:
    with trio.move_on_after(START):
        while process.poll() is None:
            try:
                if (await http.get(ALIVE.get(kind, "/health"))).status_code == 200:
                    return
            except httpx.HTTPError:
                await trio.sleep(0.05)
    said = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise PeerMissing(f"it did not start: {' / '.join(said)}")


def _end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(how)
    try:
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
