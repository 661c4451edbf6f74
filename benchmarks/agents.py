"""A day of an agent: a long session, subagents of all shapes, bursts, and the long session again.

    python -m benchmarks.agents [--quick] [--peers mlx-openblas] [--long TOKENS]

Replayed on each server: the long session is built, then in every round subagents start at once, some of them going on
from the session and some with prompts of their own, each with other lengths, and the session takes its next turn right
behind them. What counts: no request fails, and the session's next turn still finds its rows. A burst then asks a small
server of ours for more than it can hold: five times eight long prompts, and after each a medium one.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from .cache import row_bytes_of
from .client import Timed, metrics, stream, together
from .common import MIB, Report, Table, flags, median, mib, model_of, ms, ratio, sized
from .peers import PeerMissing
from .prompts import Messages, assistant, fresh, prose, system, user
from .servers import OURS, Server, add_peers_flag, peers_of, side_by_side, started

SHAPES = ((True, 20, 8), (True, 130, 24), (False, 40, 8), (False, 300, 16), (True, 60, 40), (False, 700, 4))
"""Of a subagent: whether it goes on from the session, tokens of its question, tokens of its reply."""


LEAST_ROWS = 64 * MIB
"""What the least --memory leaves for rows."""
SLACK = 8 * MIB
"""By how much the footprint of the same process may differ from one start to the next."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """long: tokens of the session. burst: tokens of each prompt of the burst."""

    long: int
    rounds: int
    agents: int
    reply: int
    burst: int
    bursts: int = 5


FULL, QUICK, SMOKE = Sizes(4096, 3, 10, 16, 1024), Sizes(1024, 1, 4, 8, 256, 2), Sizes(2000, 2, 4, 4, 600, 2)


@dataclass(slots=True)
class Day:
    """What one server did. turns: of the session, the first one cold."""

    turns: list[Timed] = field(default_factory=list)
    agents: list[Timed] = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0

    @property
    def failed(self) -> int:
        return sum(not r.ok for r in self.turns + self.agents)


def main(argv: list[str] | None = None) -> None:
    parser = flags(__doc__)
    add_peers_flag(parser, "mlx-openblas")
    parser.add_argument("--long", type=int, metavar="TOKENS", help="tokens of the long session")
    options = parser.parse_args(argv)
    report = Report("agents", options)
    with model_of(options) as model:
        trio.run(measure, options, report, model)
    report.finish()


async def measure(options: argparse.Namespace, report: Report, model: str) -> None:
    sizes: Sizes = sized(options, full=FULL, quick=QUICK, smoke=SMOKE)
    long = options.long or sizes.long
    days = report.table(
        f"A session of {long} tokens and its subagents",
        *("server", "requests", "failed", "seconds", "session's next turn: first token ms", "its first one ms"),
        *("reused", "peak memory MiB"),
    )
    async with side_by_side(report, peers_of(options), model) as servers:
        for server in servers:
            await stream(server.http, server.body(fresh("Say hello.", "warm"), 4))
            add(days, server.kind, await lived(server, model, sizes, long))
        row_bytes = await row_bytes_of(servers[0])
    await burst(report, model, sizes, row_bytes)
    report.bar("failed requests of ours", float(days.rows[0][2] or 0), "at most", 0)


# --- the day


async def lived(server: Server, model: str, sizes: Sizes, long: int) -> Day:
    day, begun = Day(), time.perf_counter()
    history = [system(prose(model, long, 21)), user("What is to be done?")]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, server, day)
        history = await turn(server, history, sizes, day)
        for n in range(sizes.rounds):
            asked = list(subagents(server, model, history, sizes, n))
            day.agents += await together(server.http, asked, apart=0.02)
            history = await turn(server, [*history, user(f"Round {n} is over. What next?")], sizes, day)
        nursery.cancel_scope.cancel()
    day.seconds = time.perf_counter() - begun
    return day


async def turn(server: Server, history: Messages, sizes: Sizes, day: Day) -> Messages:
    """The session's next turn, and its history after it."""
    reply = await stream(server.http, server.body(history, sizes.reply))
    day.turns.append(reply)
    return [*history, assistant("".join(reply.text))]


def subagents(server: Server, model: str, history: Messages, sizes: Sizes, n: int) -> Iterator[dict[str, Any]]:
    for i in range(sizes.agents):
        spawned, asked, reply = SHAPES[i % len(SHAPES)]
        question = prose(model, asked + 7 * i, 1000 * (n + 1) + i)
        messages = [*history, user(question)] if spawned else fresh(question, f"agent {n} {i}")
        yield server.body(messages, reply)


async def watch(server: Server, day: Day) -> None:
    while True:
        day.peak = max(day.peak, server.memory())
        await trio.sleep(0.1)


def add(table: Table, kind: str, day: Day) -> None:
    later = day.turns[1:]
    asked = sum(r.prompt or 0 for r in later)
    table.add(
        kind,
        len(day.turns) + len(day.agents),
        day.failed,
        day.seconds,
        ms(median(r.ttft for r in later)),
        ms(day.turns[0].ttft),
        ratio(sum(r.cached or 0 for r in later), asked) if any(r.cached is not None for r in later) else None,
        mib(day.peak),
    )


# --- the burst


async def burst(report: Report, model: str, sizes: Sizes, row_bytes: int) -> None:
    """Eight long prompts at once where four fit, then a medium one; the allocator's old peaks must not count."""
    table = report.table(
        "Bursts at a server that holds about four of eight prompts",
        *("burst", "failed", "slowest first token ms", "medium one: ok", "its first token ms", "rows held MiB"),
    )
    for number, (replies, medium, held) in enumerate(await bursts(model, sizes, row_bytes)):
        slowest = max((r.ttft for r in replies if r.ttft is not None), default=None)
        failed = sum(not r.ok for r in replies)
        table.add(number + 1, failed, ms(slowest), "yes" if medium.ok else medium.error, ms(medium.ttft), mib(held))
    report.bar("refused after a burst", float(sum(row[3] != "yes" for row in table.rows)), "at most", 0)


async def bursts(model: str, sizes: Sizes, row_bytes: int) -> list[tuple[Sequence[Timed], Timed, float]]:
    rows = 4 * (sizes.burst + 512) * row_bytes
    found = []
    memory = await least_memory(model) + max(rows - LEAST_ROWS, 0)
    async with started(OURS, model, ("--no-store", "--memory", str(memory))) as server:
        for n in range(sizes.bursts):
            texts = [fresh(prose(model, sizes.burst, 5000 + 10 * n + i), f"burst {n} {i}") for i in range(8)]
            replies = await together(server.http, [server.body(text, 4) for text in texts])
            medium = await stream(server.http, server.body(fresh(prose(model, sizes.burst // 2, 31 + n), n), 4))
            found.append((replies, medium, (await metrics(server.http)).get("onecopy_bank_bytes_used", 0.0)))
    return found


async def least_memory(model: str) -> int:
    """The least --memory our server accepts for a model, which a start with too little names."""
    try:
        async with started(OURS, model, ("--no-store", "--memory", "1")):
            return 1
    except PeerMissing as refused:
        named = re.search(r"--memory (\d+)", str(refused))
        if named is None:
            raise
        return int(named[1]) + SLACK


if __name__ == "__main__":
    main()
