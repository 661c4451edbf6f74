"""Who waits for whom: short requests behind a long prompt, a running reply beside it, and silence on the wire.

    python -m benchmarks.fairness [--quick] [--peers mlx-openblas,llama]

Each server runs a reply; in the middle of it a long prompt arrives, and behind that short requests one after another.
Each of the three is compared with the same request alone on the same server.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import trio

from .client import Timed, stream
from .common import Report, flags, median, model_of, ms, ratio, sized
from .prompts import fresh, prose
from .servers import OURS, Server, add_peers_flag, peers_of, side_by_side

HEAD_START = 4
"""Pieces of the running reply that come before the long prompt is sent."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the long prompt, of the running reply and of short replies; how many short ones in a row."""

    long: int
    running: int
    short: int = 8
    count: int = 5


FULL, QUICK, SMOKE = Sizes(4096, 160), Sizes(1024, 64, 4, 3), Sizes(3000, 40, 2, 2)


@dataclass(slots=True)
class Crowd:
    """The replies of one run: alone, and all at once."""

    running: list[Timed] = field(default_factory=list)
    long: list[Timed] = field(default_factory=list)
    short: list[Timed] = field(default_factory=list)


def main(argv: list[str] | None = None) -> None:
    parser = flags(__doc__)
    add_peers_flag(parser, "mlx-openblas,llama")
    options = parser.parse_args(argv)
    report = Report("fairness", options)
    with model_of(options) as model:
        trio.run(measure, options, report, model)
    report.finish()


async def measure(options: argparse.Namespace, report: Report, model: str) -> None:
    sizes: Sizes = sized(options, full=FULL, quick=QUICK, smoke=SMOKE)
    waits = report.table(
        "Beside a long prompt",
        *("server", "short: first token ms", "alone ms", "longest pause of a reply ms", "alone ms"),
        *("long: first token ms", "alone ms", "failed"),
    )
    wire = report.table(
        "Signs of life of the long prompt",
        *("server", "headers after ms", "longest silence ms"),
        note="silence: no byte at all, neither text nor comment",
    )
    async with side_by_side(report, peers_of(options, leave_when_quick=("llama",)), model) as servers:
        for server in servers:
            await stream(server.http, server.body(fresh("Say hello.", "warm"), 4))
            alone, crowded = await by_themselves(server, model, sizes), await crowd(server, model, sizes)
            every = [*crowded.running, *crowded.long, *crowded.short]
            waits.add(
                server.kind,
                first(crowded.short),
                first(alone.short),
                pause(crowded.running, crowded.long[0].sent),
                pause(alone.running, 0.0),
                first(crowded.long),
                first(alone.long),
                sum(not r.ok for r in every),
            )
            wire.add(server.kind, ms(crowded.long[0].headers), ms(crowded.long[0].silence))
    compare(report, waits.rows)


def running_body(server: Server, sizes: Sizes, run: str) -> dict[str, Any]:
    return server.body(fresh("Tell a long story about a lighthouse.", f"running {run}"), sizes.running)


def long_body(server: Server, model: str, sizes: Sizes, seed: int) -> dict[str, Any]:
    return server.body(fresh(prose(model, sizes.long, seed), f"long {seed}"), sizes.short)


def short_body(server: Server, sizes: Sizes, run: str) -> dict[str, Any]:
    return server.body(fresh("Name a colour.", f"short {run}"), sizes.short)


async def by_themselves(server: Server, model: str, sizes: Sizes) -> Crowd:
    return Crowd(
        [await stream(server.http, running_body(server, sizes, "alone"))],
        [await stream(server.http, long_body(server, model, sizes, 1))],
        [await stream(server.http, short_body(server, sizes, f"alone {i}")) for i in range(sizes.count)],
    )


async def crowd(server: Server, model: str, sizes: Sizes) -> Crowd:
    """The long prompt is sent in the middle of the running reply, and short requests once it is on its way."""
    running = Timed(0.0)
    found = Crowd([running])

    async def one(body: dict[str, Any], where: list[Timed]) -> None:
        where.append(await stream(server.http, body))

    async def shorts() -> None:
        for i in range(sizes.count):
            await one(short_body(server, sizes, f"crowd {i}"), found.short)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream, server.http, running_body(server, sizes, "crowd"), running)
        while len(running.pieces) < HEAD_START and not running.error and not running.finish:
            await trio.sleep(0.002)
        nursery.start_soon(one, long_body(server, model, sizes, 2), found.long)
        await trio.sleep(0.05)
        nursery.start_soon(shorts)
    return found


def first(replies: list[Timed]) -> float | None:
    return ms(median(r.ttft for r in replies))


def pause(replies: list[Timed], since: float) -> float | None:
    """Milliseconds of the longest gap that ended after `since`; None when the replies were over by then."""
    gaps = (b - a for r in replies for a, b in pairwise(r.pieces) if b > since)
    return ms(max(gaps, default=None))


def compare(report: Report, rows: list[tuple[Any, ...]]) -> None:
    """How much longer a short request and a running reply wait at our peers than here."""
    ours = next(row for row in rows if row[0] == OURS)
    table = report.table("Theirs ÷ ours", "server", "short: first token", "longest pause of a reply")
    for row in rows:
        if row[0] != OURS:
            table.add(row[0], ratio(row[1], ours[1]), ratio(row[3], ours[3]))


if __name__ == "__main__":
    main()
