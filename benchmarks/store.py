"""Rows on disk: restore against prefill and against a plain read, bytes written, a slow disk, and a full restart.

    python -m benchmarks.store [--quick] [--conversations 200]

The restore of a conversation is timed as its first token from disk less its first token from memory: both evaluate one
token. The plain read takes the same files into new memory. Both find them in the page cache or, as after a start of
the machine, on the disk. The slow disk takes a megabyte a second. The restart uses a tiny model: a start reads the
manifest, whose size does not depend on the model.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import trio
from onecopy.actors.service import Options
from onecopy.actors.system import System
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.seams.disk import Readable, StrPath
from onecopy.runtime.seams.pages import ask_for_large_pages
from onecopy.runtime.seams.real_disk import RealDisk, RealFile
from onecopy.runtime.turn import Finished, Sampling, Started, Text, TurnSpec

from .client import stream
from .common import Report, flags, median, mib, model_of, ms, percentile, ratio, sized, tiny_model
from .prompts import prose, user, vocabulary
from .servers import OURS, started


@dataclass(frozen=True, slots=True)
class Sizes:
    """restored: whole blocks of each restored conversation. said: tokens a turn adds. slow: tokens of the state that
    a slow disk takes, and of the reply meanwhile. again: how often the two sides of a comparison take turns."""

    restored: tuple[int, ...]
    repeat: int
    turns: int
    said: int
    slow: tuple[int, int]
    conversations: int
    again: int = 2


FULL = Sizes((16, 28), 5, 30, 100, (2048, 300), 200)
QUICK = Sizes((4,), 3, 30, 30, (512, 60), 200, 1)
SMOKE = Sizes((2,), 2, 3, 100, (600, 30), 5, 1)


def main(argv: list[str] | None = None) -> None:
    parser = flags(__doc__)
    parser.add_argument("--conversations", type=int, help="on disk when the restart is timed (200)")
    options = parser.parse_args(argv)
    if argv is None:
        ask_for_large_pages()  # as `onecopy serve` does
    report = Report("store", options)
    sizes: Sizes = sized(options, full=FULL, quick=QUICK, smoke=SMOKE)
    with model_of(options) as model:
        trio.run(restores, report, model, sizes)
        trio.run(written, report, model, sizes)
        trio.run(gaps, report, model, sizes)
    trio.run(restarts, report, options.conversations or sizes.conversations, sizes.again + 1)
    report.finish()


# --- turns in this process


@dataclass(slots=True)
class Took:
    """One turn. at: when each piece of text came, seconds from its start."""

    at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    session: str = ""
    restored: int = 0


@asynccontextmanager
async def system(model: str, store: str, disk: RealDisk | None = None) -> AsyncIterator[System]:
    async with System.open(Options(model, store=store, seed=1, draft=False), disk=disk) as opened:
        yield opened


async def turn(opened: System, tokens: list[int], reply: int = 1) -> Took:
    spec = TurnSpec(tuple(tokens), reply, Sampling(seed=0, temperature=0.0), draft=False, ignore_eos=True)
    took, begun = Took(), time.perf_counter()
    async with opened.turn(spec) as pieces:
        async for piece in pieces:
            if isinstance(piece, Started):
                took.session = piece.session
            elif isinstance(piece, Text) and piece.tokens:
                took.at.append(time.perf_counter() - begun)
                took.tokens += piece.tokens
            elif isinstance(piece, Finished):
                took.restored = piece.receipt.rows_restored
    return took


def tokens_of(model: str, n: int, seed: int) -> list[int]:
    """Exactly `n` ids."""
    return vocabulary(model).encode(prose(model, n + 64, seed), special=False)[:n]


async def park_all(opened: System) -> None:
    """Everything to disk and out of memory."""
    for found in await opened.sessions():
        if found.state == "idle":
            await opened.park(found.id)


def row_bytes(opened: System) -> int:
    return int(opened.card.features["row_bytes"])


# --- restore


async def restores(report: Report, model: str, sizes: Sizes) -> None:
    table = report.table(
        "Restore of a conversation",
        *("tokens", "MiB", "read from", "prefill ms", "from memory ms", "restored ms", "prefill ÷ restore"),
        *("restore MiB/s", "plain read MiB/s", "restore ÷ plain read"),
    )
    with TemporaryDirectory(prefix="onecopy-bench-rows-") as folder:
        async with system(model, folder) as opened:
            await turn(opened, tokens_of(model, 20, 1))
            for blocks in sizes.restored:
                before = stored(folder)
                rows = blocks * BLOCK
                tokens = tokens_of(model, rows + 1, 40 + blocks)
                cold = (await turn(opened, tokens)).at[0]
                size = rows * row_bytes(opened)
                for place, warm, disk, plain in await alternate(opened, tokens, folder, before, sizes.repeat):
                    restore = max(disk - warm, 1e-6)
                    speed = size / restore
                    table.add(
                        rows, mib(size), place, ms(cold), ms(warm), ms(disk), (cold - warm) / restore,
                        mib(speed), mib(plain), ratio(speed, plain),
                    )  # fmt: skip
    for row in table.rows:
        report.bar(f"{row[0]} tokens from {row[2]}: prefill ÷ restore", as_float(row[6]), "at least", 100)
        if row[2] == "disk":  # as after a start; out of the page cache both sides are copies in memory
            report.bar(f"{row[0]} tokens from {row[2]}: restore ÷ plain read", as_float(row[9]), "at least", 0.7)


async def alternate(
    opened: System, tokens: list[int], folder: str, before: dict[Path, int], repeat: int
) -> list[tuple[str, float, float, float]]:
    """For the disk, as after a start of the machine, and for the system's page cache: median seconds to the first token
    from memory and restored, and bytes a second of a plain read, by turns.
    """
    found: dict[str, list[tuple[float, float, float]]] = {"disk": [], "page cache": []}
    for place, kept in [*found.items()] * repeat:
        warm = (await turn(opened, tokens)).at[0]
        await park_all(opened)
        forgotten(folder, place)
        took = await turn(opened, tokens)
        if took.restored < len(tokens) - 1:
            raise AssertionError(f"{took.restored} of {len(tokens) - 1} rows came from disk")
        forgotten(folder, place)
        kept.append((warm, took.at[0], plain_read(folder, before)))
    return [
        (place, *(median(list(column)) or 0.0 for column in zip(*kept, strict=True)))  # type: ignore[misc]
        for place, kept in found.items()
    ]


def forgotten(folder: str, place: str) -> None:
    """Takes the files out of the page cache, where they are to come from the disk and the system can be told."""
    if place == "disk" and hasattr(os, "posix_fadvise"):
        for path in stored(folder):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stored(folder: str) -> dict[Path, int]:
    """Files below a directory, and their sizes."""
    return {path: path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()}


def plain_read(folder: str, before: dict[Path, int]) -> float:
    """Bytes a second of reading into new memory, where restored rows go too, what was written since `before`."""
    sizes = {path: size - before.get(path, 0) for path, size in stored(folder).items()}
    begun = time.perf_counter()
    for path, size in sizes.items():
        with path.open("rb", buffering=0) as file:
            file.seek(before.get(path, 0))
            into = memoryview(np.empty(size, np.uint8))
            while into and (got := file.readinto(into)):
                into = into[got:]
    return sum(sizes.values()) / (time.perf_counter() - begun)


def as_float(cell: Any) -> float | None:
    return None if cell is None else float(cell)


# --- bytes written


async def written(report: Report, model: str, sizes: Sizes) -> None:
    """A conversation of many turns: what was written in all, against what its rows are in the end."""
    table = report.table(
        "A conversation kept on disk", "turns", "tokens", "its rows MiB", "written MiB", "written ÷ rows", "file MiB"
    )
    with TemporaryDirectory(prefix="onecopy-bench-rows-") as folder:
        async with system(model, folder) as opened:
            tokens: list[int] = []
            for k in range(sizes.turns):
                tokens += tokens_of(model, sizes.said, 60 + k)
                tokens += (await turn(opened, tokens, 8)).tokens
            await park_all(opened)
            wrote = int((await opened.metrics())["rows store"]["written_bytes"])
            rows = len(tokens) * row_bytes(opened)
            files = sum(stored(folder).values())
            table.add(sizes.turns, len(tokens), mib(rows), mib(wrote), wrote / rows, mib(files))
            report.bar(f"bytes written over {sizes.turns} turns ÷ rows", wrote / rows, "at most", 1.05)


# --- a slow disk


class SlowFile(RealFile):
    """Appends take as long as `rate` bytes a second need."""

    def __init__(self, fd: int, hurry: threading.Event, rate: float) -> None:
        super().__init__(fd)
        self._hurry = hurry
        self._rate = rate

    def append(self, data: Readable) -> int:
        took = super().append(data)
        self._hurry.wait(took / self._rate)
        return took


class SlowDisk(RealDisk):
    """hurry: once set, the disk is fast again, so that a run can end."""

    def __init__(self, rate: float = 1e6) -> None:
        super().__init__()
        self.hurry = threading.Event()
        self._rate = rate

    def open_append(self, path: StrPath) -> RealFile:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return SlowFile(os.open(path, flags, 0o600), self.hurry, self._rate)


async def gaps(report: Report, model: str, sizes: Sizes) -> None:
    """Gaps between tokens while a slow disk is written to, and with nothing kept, by turns."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for keep in (False, True) * sizes.again:
        found[keep] += await gaps_of(model, sizes, keep)
    table = report.table("Gaps between tokens", "rows are saved", "p50 ms", "p99 ms", "longest ms")
    for keep, values in found.items():
        table.add(str(keep).lower(), *(ms(percentile(values, q)) for q in (0.5, 0.99, 1.0)))
    both = ratio(percentile(found[True], 0.99), percentile(found[False], 0.99))
    report.bar("p99 gap, saving to a slow disk ÷ not saving", both, "at most", 1.1)


async def gaps_of(model: str, sizes: Sizes, keep: bool) -> list[float]:
    disk = SlowDisk()
    state, reply = sizes.slow
    with TemporaryDirectory(prefix="onecopy-bench-rows-") as folder:
        async with system(model, folder if keep else "", disk) as opened:
            tokens = tokens_of(model, state, 80)
            tokens += (await turn(opened, tokens, 4)).tokens
            took = await turn(opened, [*tokens, *tokens_of(model, 8, 81)], reply)
            disk.hurry.set()
    return [b - a for a, b in zip(took.at, took.at[1:], strict=False)]


# --- a restart


async def restarts(report: Report, conversations: int, repeat: int) -> None:
    """A start with many conversations on disk beside one with none, by turns."""
    with tiny_model() as model, TemporaryDirectory(prefix="onecopy-bench-rows-") as folder:
        full, empty = Path(folder) / "full", Path(folder) / "empty"
        await fill(model, full, conversations)
        found: dict[Path, list[tuple[float, int]]] = {full: [], empty: []}
        for path in (empty, full) * repeat:
            async with started(OURS, model, ("--store", str(path)), stop=signal.SIGTERM) as server:
                found[path].append((server.ready, server.memory()))
        table = report.table("A restart", "conversations on disk", "ready after ms", "memory MiB", "files MiB")
        for path, name in ((empty, 0), (full, conversations)):
            files = float(sum(stored(str(path)).values()))
            ready, memory = (median(values) for values in zip(*found[path], strict=True))
            table.add(name, ms(ready), mib(memory), mib(files))


async def fill(model: str, path: Path, conversations: int) -> None:
    async with started(OURS, model, ("--store", str(path))) as server:
        for i in range(conversations):
            await stream(server.http, server.body([user(prose(model, 300, 90_000 + i))], 2))


if __name__ == "__main__":
    main()
