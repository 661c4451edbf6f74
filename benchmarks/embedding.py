"""The programmatic API: what a token costs on its way to a program, what a spawn costs, what a parked chat keeps.

    python -m benchmarks.embedding [--quick]

No model runs: replies are scripted and cost nothing, so what is measured is all overhead. The spawn runs over the
bank's real books and the bundled model's vocabulary; its time ends when the last child has its rows, before any
prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import trio
from onecopy.api import Runtime, aio, sync
from onecopy.runtime.models import list_models
from onecopy.runtime.models.gguf_header import read_header
from onecopy.runtime.models.gguf_vocab import tokenizer_of
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.turn import Finished, Piece, Receipt, Started, Text, TurnSpec, Usage

from examples.subagent_spawn.scripted import LAYOUT, LedgerService
from tests.support.scripted import Say, ScriptedService

from .common import Report, flags, median, sized

CHILDREN = 64
PARENT = 4096
PARKED = 1000
REPEAT = 5


class Instant(ScriptedService):
    """Replies of as many tokens as asked for, one piece a token, at no cost."""

    async def _pieces(self, spec: TurnSpec, say: Say) -> AsyncIterator[Piece]:
        yield Started("s", len(spec.tokens), 0, 0)
        piece = Text("a", (97,))
        for _ in range(spec.max_new):
            await trio.lowlevel.checkpoint()
            yield piece
        yield Finished("length", Usage(len(spec.tokens), spec.max_new, 0), Receipt("fresh"), "", 0)


def main(argv: list[str] | None = None) -> None:
    options = flags(__doc__).parse_args(argv)
    report = Report("embedding", options)
    tokens(options, report)
    trio.run(spawn, report)
    trio.run(parked, report)
    report.finish()


# --- a token's way


def tokens(options: argparse.Namespace, report: Report) -> None:
    n = sized(options, full=3000, quick=2000, smoke=200)
    bare = median([trio.run(directly, n) for _ in range(REPEAT)])
    table = report.table("A token on its way to the program", "from", "us a token beyond the service's own")
    ways: dict[str, Callable[[], float]] = {
        "trio": lambda: trio.run(under_trio, n),
        "asyncio": lambda: asyncio.run(under_asyncio(n)),
        "plain code": lambda: plainly(n),
    }
    for name, way in ways.items():
        took = median([way() for _ in range(REPEAT)])
        over = (took - bare) / n * 1e6
        table.add(name, over)
        report.bar(f"overhead per token, {name}, us", over, "at most", 100)


def service(n: int) -> Instant:
    return Instant(context=n + 1000)


async def directly(n: int) -> float:
    made = service(n)
    async with Runtime.over(made) as runtime:
        await runtime.conversation(max_tokens=n).send("warm", max_tokens=1)
        [spec] = made.specs
        begun = time.perf_counter()
        async with made.turn(replace(spec, max_new=n)) as pieces:
            async for _ in pieces:
                pass
        return time.perf_counter() - begun


async def under_trio(n: int) -> float:
    async with Runtime.over(service(n)) as runtime:
        chat = runtime.conversation(max_tokens=n)
        begun = time.perf_counter()
        async for _ in chat.send("go"):
            pass
        return time.perf_counter() - begun


async def under_asyncio(n: int) -> float:
    async with aio.Runtime.over(service(n)) as runtime:
        chat = runtime.conversation(max_tokens=n)
        begun = time.perf_counter()
        async for _ in chat.send("go"):
            pass
        return time.perf_counter() - begun


def plainly(n: int) -> float:
    with sync.Runtime.over(service(n)) as runtime:
        chat = runtime.conversation(max_tokens=n)
        begun = time.perf_counter()
        for _ in chat.send("go"):
            pass
        return time.perf_counter() - begun


# --- a spawn


async def spawn(report: Report) -> None:
    took, copied = [], []
    for _ in range(REPEAT):
        seconds, copies = await one_spawn()
        took.append(seconds * 1e3)
        copied += copies
    ms = median(took)
    worst = max(copied)
    table = report.table(f"{CHILDREN} children of a parent of {PARENT} tokens", "what", "value")
    table.add("ms until the last child has its rows", ms)
    table.add("rows copied for a child, at most", worst / LAYOUT.row_bytes)
    report.bar("spawn before the first prefill, ms", ms, "at most", 50)
    report.bar("rows copied for a child", worst / LAYOUT.row_bytes, "at most", BLOCK - 1)


async def one_spawn() -> tuple[float, list[int]]:
    """Seconds until all children are admitted, and the bytes copied for each."""
    admitted = [0]
    all_in = trio.Event()
    ended = [0.0]

    async def prefill() -> None:
        admitted[0] += 1
        if admitted[0] == CHILDREN:
            ended[0] = time.perf_counter()
            all_in.set()
        await all_in.wait()

    books = LedgerService(tokenizer_of(read_header(list_models()[0].path)))
    async with Runtime.over(books) as runtime:
        parent = runtime.conversation("You are brief.")
        while len(parent.tokens) < PARENT:
            await parent.send("The bank holds every row once, and each fork reads what came before it. " * 32)
        books.before = prefill
        begun = time.perf_counter()
        children = await runtime.spawn(parent, [f"Errand {i}." for i in range(CHILDREN)], max_tokens=1)
        return ended[0] - begun, [child.result.receipt.bytes_copied for child in children]


# --- a parked conversation


async def parked(report: Report) -> None:
    """Bytes that the API keeps for a parked conversation, its messages' text not counted."""
    made = ScriptedService("Noted.")
    async with Runtime.over(made) as runtime:
        await one_parked(runtime, "warm")
        made.specs.clear()
        made.seen.clear()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        chats = [await one_parked(runtime, "hello") for _ in range(PARKED)]
        made.specs.clear()
        made.seen.clear()
        made.known.clear()
        kept = (tracemalloc.get_traced_memory()[0] - before) / len(chats)
        tracemalloc.stop()
    table = report.table("A parked conversation", "what", "bytes")
    table.add("the API's own part", kept)
    report.bar("parked conversation, API side, bytes", kept, "at most", 4096)


async def one_parked(runtime: Runtime, text: str) -> Any:
    chat = runtime.conversation()
    await chat.send(text)
    await chat.park()
    return chat


if __name__ == "__main__":
    main()
