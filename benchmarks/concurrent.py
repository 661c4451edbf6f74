"""Many streams at once, server against server over HTTP: tokens a second of all together and of one of them.

    python -m benchmarks.concurrent [--quick] [--streams 1,3,8,16,32] [--peers mlx,mlx-openblas,llama]
    python -m benchmarks.concurrent --alone --serial

With --alone every reply of ours is asked for again with nothing beside it, with --serial again alone and without
drafts, each from rows nobody kept; the token hashes are printed side by side and the exit code is 1 when one differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import trio

from .client import Timed, aggregate, stream, together
from .common import Report, flags, median, model_of, ms, ratio, sized
from .prompts import KINDS, fresh
from .servers import OURS, Server, add_peers_flag, peers_of, side_by_side

TEMPERATURES = (0.0, 0.6)
Key = tuple[float, int, str]
"""Temperature, streams, server."""


@dataclass(frozen=True, slots=True)
class Sizes:
    streams: tuple[int, ...]
    tokens: int
    repeat: int
    temperatures: tuple[float, ...] = TEMPERATURES


FULL = Sizes((1, 3, 8, 16, 32), 64, 2)
QUICK = Sizes((1, 8), 24, 2, (0.0,))
SMOKE = Sizes((1, 3), 6, 1)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    checks = options.alone or options.serial
    report = Report("concurrent-equal" if checks else "concurrent", options)
    with model_of(options) as model:
        equal = trio.run(checked if checks else compared, options, report, model)
    report.finish()
    return 0 if equal else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = flags(__doc__)
    add_peers_flag(parser)
    parser.add_argument("--streams", metavar="N,N", help="how many at once (1,3,8,16,32)")
    parser.add_argument("--alone", action="store_true", help="check each reply against the same request alone")
    parser.add_argument("--serial", action="store_true", help="check each reply against the same one alone, undrafted")
    return parser.parse_args(argv)


def sizes_of(options: argparse.Namespace) -> Sizes:
    sizes: Sizes = sized(options, full=FULL, quick=QUICK, smoke=SMOKE)
    if not options.streams:
        return sizes
    return Sizes(tuple(map(int, options.streams.split(","))), sizes.tokens, sizes.repeat, sizes.temperatures)


def bodies(server: Server, sizes: Sizes, n: int, temperature: float, run: object) -> list[dict[str, Any]]:
    """`n` different requests. Ours are seeded, which costs nothing; a seed would keep mlx-lm from batching."""
    texts = list(KINDS.values())
    return [
        server.body(
            fresh(texts[i % len(texts)], f"{run} {i}"),
            sizes.tokens,
            temperature=temperature,
            **({"seed": 1000 + i} if server.kind == OURS else {}),
        )
        for i in range(n)
    ]


# --- speed


async def compared(options: argparse.Namespace, report: Report, model: str) -> bool:
    sizes = sizes_of(options)
    found: dict[Key, list[list[Timed]]] = {}
    ours = ("--no-store", "--parallel", str(max(sizes.streams)))
    async with side_by_side(report, peers_of(options, leave_when_quick=("mlx",)), model, ours) as servers:
        for server in servers:
            await stream(server.http, server.body(fresh("Say hello.", "warm"), 4))
        for temperature, n, run in plan(sizes):
            for server in servers:
                asked = bodies(server, sizes, n, temperature, f"{temperature} {n} {run}")
                found.setdefault((temperature, n, server.kind), []).append(await together(server.http, asked))
    tell(report, found)
    return True


def plan(sizes: Sizes) -> Iterator[tuple[float, int, int]]:
    for temperature in sizes.temperatures:
        for n in sizes.streams:
            for run in range(sizes.repeat):
                yield temperature, n, run


def tell(report: Report, found: dict[Key, list[list[Timed]]]) -> None:
    columns = ("tokens/s together", "ours ÷ it", "tokens/s of one", "first token ms", "failed")
    table = report.table("Many streams", "temperature", "streams", "server", *columns)
    for (temperature, n, kind), runs in found.items():
        every = [reply for run in runs for reply in run]
        table.add(
            temperature,
            n,
            kind,
            total(runs),
            ratio(total(found[temperature, n, OURS]), total(runs)),
            median(r.rate for r in every),
            ms(median(r.ttft for r in every)),
            sum(not r.ok for r in every),
        )
    bar(report, found, 1, 1.0)
    bar(report, found, 8, 1.2)
    bar(report, found, 16, 1.2)


def total(runs: list[list[Timed]] | None) -> float | None:
    return median(aggregate(run) for run in runs) if runs else None


def bar(report: Report, found: dict[Key, list[list[Timed]]], n: int, least: float) -> None:
    ours, theirs = (total(found.get((0.0, n, kind))) for kind in (OURS, "mlx-lm + OpenBLAS"))
    if ours is not None:
        report.bar(f"{n} streams: tokens/s ÷ mlx-lm, same BLAS", ratio(ours, theirs), "at least", least)


# --- equality


async def checked(options: argparse.Namespace, report: Report, model: str) -> bool:
    """Whether every reply equals its solo and its undrafted run."""
    sizes = sizes_of(options)
    others = [("alone", {})] * options.alone + [("serial", {"draft": False})] * options.serial
    names = ["together", *(name for name, _ in others)]
    table = report.table("Token hashes", "temperature", "streams", "reply", *names, "equal")
    equal = True
    async with side_by_side(report, [], model, ("--no-store", "--parallel", str(max(sizes.streams)))) as (server,):
        for temperature in sizes.temperatures:
            for n in sizes.streams:
                asked = bodies(server, sizes, n, temperature, f"{temperature} {n}")
                runs = [await together(server.http, asked)]
                for name, fields in others:
                    runs.append([await stream(server.http, {**b, **fields, "cache_salt": name}) for b in asked])
                for i, replies in enumerate(zip(*runs, strict=True)):
                    hashes = [sha(reply) for reply in replies]
                    same = None not in hashes and len(set(hashes)) == 1
                    equal = equal and same
                    table.add(temperature, n, i, *hashes, "yes" if same else "NO")
    report.note("every reply is equal" if equal else "REPLIES DIFFER")
    return equal


def sha(reply: Timed) -> str | None:
    return reply.onecopy.get("token_sha") if reply.ok else None


if __name__ == "__main__":
    sys.exit(main())
