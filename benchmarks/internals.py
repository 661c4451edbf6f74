"""Part by part: asks and tells, the device hop, the doors, plans of rounds, the bank's books, the store's index.

    python -m benchmarks.internals [--quick]

Costs that could grow are shown at 100, 1,000, 10,000 and 100,000 things; the last column says how much the largest
costs over the smallest. Medians of several runs; only the client of the whole path has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import httpx
import trio
from onecopy.runtime.core import Child, Supervisor
from onecopy.runtime.decode import Costs, Limits, View, plan
from onecopy.runtime.device import DeviceThread
from onecopy.runtime.rows.layout import LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ledger import Grant, Ledger, Wanted
from onecopy.runtime.store import index as store_index
from onecopy.runtime.store import manifest
from onecopy.runtime.store.record import Kind

from . import ask
from .common import HERE, Report, flags, median, ms, ratio, sized

REPEAT = 5
SIZES = (100, 1_000, 10_000, 100_000)
LAYOUT = Layout((LayerLayout("attention", (RowTensor("k", 1, 1), RowTensor("v", 1, 1))),) * 2)


def main(argv: list[str] | None = None) -> None:
    parser = flags(__doc__)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.client:
        answer(options.client)
        return
    report = Report("internals", options)
    trio.run(messages, options, report)
    trio.run(doors, options, report)
    trio.run(whole, options, report)
    sizes: tuple[int, ...] = sized(options, full=SIZES, quick=SIZES, smoke=SIZES[:2])
    plans(report, sizes)
    growing(report, "The bank's books", "conversations kept", sizes, bank_operations)
    growing(report, "The store's index", "blocks", sizes, index_operations)
    report.finish()


# --- messages


async def messages(options: argparse.Namespace, report: Report) -> None:
    n = sized(options, full=20_000, quick=5_000, smoke=300)
    table = report.table("Messages", "what", "us each")
    async with Supervisor([Child("echo", lambda: ask.Echo("echo"))]) as supervisor:
        ref = supervisor.ref("echo")
        asked = await ask.best(ask.asks, ref, n, REPEAT)
        table.add("ask and its answer", asked)
        table.add("ask with a deadline", await ask.best(ask.asks_with_deadline, ref, n, REPEAT))
        table.add("tell", await ask.best(ask.tells, ref, n, REPEAT))
    with DeviceThread() as device:
        table.add("to the device thread and back", await hops(device, n))
    report.bar("ask round trip, us", asked, "at most", 20)


async def hops(device: DeviceThread, n: int) -> float | None:
    """Microseconds of one empty call, one after another."""
    took = []
    for _ in range(REPEAT):
        begun = time.perf_counter()
        for _ in range(n // 10):
            await device.run(int)
        took.append((time.perf_counter() - begun) / (n // 10) * 1e6)
    return median(took)


# --- doors


async def doors(options: argparse.Namespace, report: Report) -> None:
    """HTTP alone: a scripted service gives tokens as fast as they are taken. The client shares the process."""
    from tests.support.http import running
    from tests.support.scripted import Say, ScriptedService

    tokens = sized(options, full=4_000, quick=2_000, smoke=50)
    table = report.table(
        "Doors over a scripted service", "streams", "events a second", "ms an event", note="client in the same process"
    )
    service = ScriptedService(Say("abcdefgh ", ends=False), context=1 << 20)
    async with running(service) as server, httpx.AsyncClient(base_url=server.url, timeout=600) as http:
        for n in (1, 8):
            rate = median([await streamed(http, n, tokens // n) for _ in range(REPEAT)])
            table.add(n, rate, None if rate is None else 1e3 / rate)
        took = [await once(http) for _ in range(sized(options, full=300, quick=100, smoke=5))]
        requests = report.table("A request with one token", "what", "ms")
        requests.add("doors over a scripted service", ms(median(took)))


async def streamed(http: httpx.AsyncClient, streams: int, tokens: int) -> float:
    """Events a second of all streams together."""
    begun = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(swallow, http, tokens)
    return streams * tokens / (time.perf_counter() - begun)


async def swallow(http: httpx.AsyncClient, tokens: int) -> None:
    async with http.stream(
        "POST", "/v1/chat/completions", json={**QUESTION, "max_tokens": tokens, "stream": True}
    ) as a:
        async for _ in a.aiter_raw():
            pass


async def once(http: httpx.AsyncClient) -> float:
    begun = time.perf_counter()
    (await http.post("/v1/chat/completions", json={**QUESTION, "max_tokens": 1})).raise_for_status()
    return time.perf_counter() - begun


QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "ignore_eos": True,
    "draft": False,
}


# --- the whole path


@dataclass(slots=True)
class Stopwatch:
    """Seconds and calls of a function, measured where it runs."""

    seconds: float = 0.0
    calls: int = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - begun
                self.calls += 1

        return timed


async def whole(options: argparse.Namespace, report: Report) -> None:
    """Real actors, real engine, real socket, a tiny model: what a token and a request cost beside the device's work."""
    from tests.support.system import serving, write_tiny

    with TemporaryDirectory() as folder:
        async with serving(write_tiny(Path(folder) / "tiny")) as server:
            watch = Stopwatch()
            engine: Any = server.system._engine
            engine.run = watch.around(engine.run)
            await idle_conversations(server.http, sized(options, full=1_000, quick=50, smoke=3))
            async with elsewhere(str(server.http.base_url)) as ask:
                await ask(1)
                token = await beside(watch, ask, sized(options, full=400, quick=200, smoke=20))
                request = await beside(watch, ask, 1)
    note = "client in a process of its own, as a user's is; 1,000 idle conversations are kept at full size"
    table = report.table("Actors and HTTP beside the device's work", "what", "ms", note=note)
    table.add("a streamed token", token)
    table.add("a request of one token", request)
    report.bar("actors and HTTP beside device time, ms a token", token, "at most", 0.15)
    report.bar("actors and HTTP beside device time, ms a request", request, "at most", 3.0)


async def idle_conversations(http: httpx.AsyncClient, n: int) -> None:
    for i in range(n):
        asked = {**QUESTION, "messages": [{"role": "user", "content": f"{i} idle"}], "max_tokens": 1}
        (await http.post("/v1/chat/completions", json=asked)).raise_for_status()


@asynccontextmanager
async def elsewhere(url: str) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """A client in a process of its own: asks for so many streamed tokens, and returns when it has read the last."""
    command = [sys.executable, "-m", "benchmarks.internals", "--client", url]
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE.parent)
        child: trio.Process = await nursery.start(run)
        assert child.stdin is not None
        assert child.stdout is not None
        told, heard = child.stdin, child.stdout

        async def ask(tokens: int) -> None:
            await told.send_all(b"%d\n" % tokens)
            if await heard.receive_some() != b"read\n":
                raise RuntimeError("the client failed")

        yield ask
        await told.aclose()


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
LAST = b"\r\n0\r\n\r\n"
"""How a reply in chunks ends."""


def answer(url: str) -> None:
    """The client: a blocking one, which does nothing but read, since it shares the server's cores."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        for line in sys.stdin:
            body = json.dumps({**QUESTION, "max_tokens": int(line), "stream": True}).encode()
            connection.sendall(HEAD % len(body) + body)
            begin = end = connection.recv(65536)
            while not end.endswith(LAST):
                end = end[-len(LAST) :] + connection.recv(65536)
            print("read" if begin.startswith(b"HTTP/1.1 200 ") else begin.decode(), flush=True)


async def beside(watch: Stopwatch, run: Callable[[int], Awaitable[Any]], n: int) -> float | None:
    """Milliseconds per unit of `run(n)` that were not spent in the engine."""
    took = []
    for _ in range(REPEAT):
        watch.seconds, begun = 0.0, time.perf_counter()
        await run(n)
        took.append((time.perf_counter() - begun - watch.seconds) / n * 1e3)
    return median(took)


# --- things that could grow


def plans(report: Report, sizes: tuple[int, ...]) -> None:
    """A plan looks at every running conversation once; idle ones are not in it."""
    table = report.table("Plan of a round", "running conversations", "us", "us a conversation")
    for n in sizes:
        views = [View(i, 100 + i, 0 if i % 4 else 500, i, draft=i % 3) for i in range(n)]
        took = each(lambda v=views: plan(v, Costs(50, 500), Limits()), 20)
        table.add(n, took, None if took is None else took / n)


Operations = Callable[[int], Iterator[tuple[str, Callable[[], object], int]]]
"""Given a size: names, what to time, and how many times to run it."""


def growing(report: Report, title: str, noun: str, sizes: tuple[int, ...], operations: Operations) -> None:
    """One row an operation, one column a size. Flat or logarithmic growth stays within a small factor."""
    table = report.table(f"{title}: us an operation", "operation", *(f"{n:,} {noun}" for n in sizes), "growth")
    found: dict[str, list[float | None]] = {}
    for n in sizes:
        for name, run, times in operations(n):
            found.setdefault(name, []).append(each(run, times))
    for name, costs in found.items():
        table.add(name, *costs, ratio(costs[-1], costs[0]))
        report.bar(
            f"{title}, {name}: growth from {sizes[0]:,} to {sizes[-1]:,}", ratio(costs[-1], costs[0]), "at most", 4
        )


def each(run: Callable[[], object], times: int) -> float | None:
    """Microseconds of one call, the median of several series."""
    took = []
    for _ in range(REPEAT):
        begun = time.perf_counter()
        for _ in range(times):
            run()
        took.append((time.perf_counter() - begun) / times * 1e6)
    return median(took)


@dataclass(slots=True)
class Books:
    """A ledger with `n` idle conversations of 24 tokens each, and turns to put through it."""

    n: int
    ledger: Ledger = field(default_factory=lambda: Ledger(LAYOUT, 1 << 50))
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        for i in range(self.n):
            self.turn(words(i))

    def turn(self, tokens: tuple[int, ...]) -> str:
        """A whole turn: admission, its rows, and the lease given back."""
        number = next(self.numbers)
        got = self.ledger.admit(number, Wanted(tokens, 8), f"c{number}", float(number))
        if not isinstance(got, Grant):
            raise AssertionError(got)
        self.ledger.commit(number, tokens[got.matched :])
        self.ledger.release(number, len(tokens), float(number))
        self.ledger.take_orders()
        return got.conversation

    def fresh(self) -> None:
        self.ledger.forget(self.turn(words(self.n + 7)))

    def next_turn(self) -> None:
        self.turn((*words(self.n // 2), 1, 2, 3))

    def match(self) -> None:
        self.ledger.longest(Wanted(words(self.n // 3), 8))


def words(i: int) -> tuple[int, ...]:
    """24 tokens that share nothing with those of another number but perhaps the first."""
    return (i % 251, i // 251 % 251, i // 63001, *range(21))


def bank_operations(n: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    books = Books(n)
    yield "a new conversation, and forgotten", books.fresh, 50
    yield "the next turn of one", books.next_turn, 50
    yield "longest kept prefix", books.match, 200


CHAIN = 32
"""Blocks of one conversation in the index."""


def index_operations(n: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    index, keys = store_index.Index(), [i.to_bytes(32, "big") for i in range(1, n + 2)]
    for i in range(n):
        index.apply(added(keys, i))
    last = keys[n // CHAIN * CHAIN - 1]
    yield "look up a block", lambda: index.entries.get(last), 1000
    yield f"a chain of {CHAIN} blocks", lambda: index.chain(last), 100
    yield "add and drop a block", lambda: replaced(index, keys, n), 100
    yield "note a use", lambda: index.apply(manifest.Touch(2, (last,))), 100
    yield "find the coldest block", lambda: next(iter(index.coldest(()))), 100


def added(keys: list[bytes], i: int) -> manifest.Add:
    parent = keys[i - 1] if i % CHAIN else bytes(32)
    return manifest.Add(keys[i], parent, Kind.BLOCK, 1 + i // 1000, i << 12, 4000, 256 * (i % CHAIN), 256, 1, 1)


def replaced(index: store_index.Index, keys: list[bytes], i: int) -> None:
    index.apply(added(keys, i))
    index.apply(manifest.Drop((keys[i],)))


if __name__ == "__main__":
    main()
