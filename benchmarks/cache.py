"""What is kept, and what it saves: first tokens cold, warm and after a restart; bytes resident, copied and written.

    python -m benchmarks.cache [--quick] [--peers mlx-openblas,llama]

Scenarios: a conversation of several turns, an edit of its second question, many chats behind one system text, children
of one parent side by side, and the same long prompt before and after a restart. All servers do the same work in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio

from .client import Timed, aggregate, metrics, stream, together
from .common import Report, Table, flags, median, mib, model_of, ms, ratio, sized
from .peers import PeerMissing
from .prompts import Messages, assistant, fresh, prose, system, user
from .servers import OURS, Server, add_peers_flag, peers_of, side_by_side, started


@dataclass(frozen=True, slots=True)
class Sizes:
    """text: tokens of the long texts. said: tokens of each question. reply: tokens of each reply."""

    text: int
    said: int
    reply: int
    turns: int
    chats: int
    children: int


FULL, QUICK, SMOKE = Sizes(2048, 60, 32, 8, 6, 16), Sizes(768, 30, 12, 4, 3, 4), Sizes(400, 20, 4, 3, 2, 2)


@dataclass(slots=True)
class Seen:
    """One scenario on one server. cold: replies with nothing kept; warm: replies that something kept could help."""

    cold: list[Timed] = field(default_factory=list)
    warm: list[Timed] = field(default_factory=list)
    grown: int | None = None
    bank: float | None = None
    rows: int = 0
    on_disk: int | None = None

    def replies(self) -> list[Timed]:
        return self.cold + self.warm


@dataclass(frozen=True, slots=True)
class Work:
    server: Server
    model: str
    sizes: Sizes

    def prose(self, tokens: int, seed: int) -> str:
        return prose(self.model, tokens, seed)

    async def ask(self, messages: Messages) -> Timed:
        return await stream(self.server.http, self.server.body(messages, self.sizes.reply))


# --- scenarios


async def turns(work: Work) -> Seen:
    """A conversation; every turn sends the whole history."""
    seen, history = Seen(), [system(work.prose(work.sizes.text // 2, 11))]
    for k in range(work.sizes.turns):
        history.append(user(work.prose(work.sizes.said, 100 + k)))
        reply = await work.ask(history)
        (seen.warm if k else seen.cold).append(reply)
        history.append(assistant("".join(reply.text)))
    return seen


async def edited(work: Work) -> Seen:
    """Three turns, then the second question in other words: everything before it may be reused."""
    seen, history = Seen(), [system(work.prose(work.sizes.text // 2, 12))]
    for k in range(3):
        history.append(user(work.prose(work.sizes.said, 200 + k)))
        reply = await work.ask(history)
        if not k:
            seen.cold.append(reply)
        history.append(assistant("".join(reply.text)))
    seen.warm.append(await work.ask([*history[:3], user(work.prose(work.sizes.said, 999))]))
    return seen


async def shared(work: Work) -> Seen:
    """Chats that have nothing but a long system text in common."""
    head = system(work.prose(work.sizes.text, 13))
    asked = [[head, user(work.prose(work.sizes.said, 300 + i))] for i in range(work.sizes.chats)]
    replies = [await work.ask(messages) for messages in asked]
    return Seen(replies[:1], replies[1:])


async def fanned(work: Work) -> Seen:
    """A parent's first turn, then children that go on from it side by side."""
    parent = [system(work.prose(work.sizes.text, 14)), user("Plan the work.")]
    before, held = work.server.memory(), await bank(work.server)
    first = await work.ask(parent)
    parent.append(assistant("".join(first.text)))
    asked = [
        work.server.body([*parent, user(work.prose(work.sizes.said, 400 + i))], work.sizes.reply)
        for i in range(work.sizes.children)
    ]
    children = await together(work.server.http, asked)
    grown = await bank(work.server)
    return Seen(
        [first],
        children,
        grown=work.server.memory() - before,
        bank=None if grown is None or held is None else grown - held,
        rows=rows_needed(first, children),
    )


def rows_needed(first: Timed, children: Iterable[Timed]) -> int:
    """Rows of a parent and of its children's own parts."""
    parent = (first.prompt or 0) + first.tokens
    return parent + sum(max(0, (c.prompt or 0) - parent) + c.tokens for c in children)


async def bank(server: Server) -> float | None:
    if server.kind != OURS:
        return None
    return (await metrics(server.http)).get("onecopy_bank_bytes_used")


SCENARIOS: dict[str, Callable[[Work], Awaitable[Seen]]] = {
    "turns of one conversation": turns,
    "an edited question": edited,
    "shared system text": shared,
    "children of one parent": fanned,
}


async def restarted(report: Report, kind: str, model: str, sizes: Sizes) -> Seen | None:
    """A long prompt, the same again, and once more from a new process."""
    with TemporaryDirectory(prefix="onecopy-bench-rows-") as folder:
        more: Sequence[str] = ("--store", folder) if kind == OURS else ()
        messages = fresh(prose(model, sizes.text, 15), "restart")
        seen = Seen()
        try:
            async with started(kind, model, more) as server:
                seen.cold.append(await stream(server.http, server.body(messages, sizes.reply)))
            seen.on_disk = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file()) or None
            async with started(kind, model, more) as server:
                await stream(server.http, server.body(fresh("Say hello.", "warm"), 2))
                seen.warm.append(await stream(server.http, server.body(messages, sizes.reply)))
        except PeerMissing as missing:
            report.note(f"{kind}: {missing}")
            return None
        return seen


# --- the run


def main(argv: list[str] | None = None) -> None:
    parser = flags(__doc__)
    add_peers_flag(parser, "mlx-openblas,llama")
    options = parser.parse_args(argv)
    report = Report("cache", options)
    with model_of(options) as model:
        trio.run(measure, options, report, model)
    report.finish()


async def measure(options: argparse.Namespace, report: Report, model: str) -> None:
    sizes: Sizes = sized(options, full=FULL, quick=QUICK, smoke=SMOKE)
    kinds = peers_of(options, leave_when_quick=("llama",))
    times = report.table(
        "First token: with nothing kept, and with what was kept",
        *("scenario", "server", "cold ms", "warm ms", "cold ÷ warm", "reused", "tokens/s together", "failed"),
        note="reused: share of the warm prompts' tokens that were not computed again",
    )
    found: dict[tuple[str, str], Seen] = {}
    async with side_by_side(report, kinds, model, ("--no-store", "--parallel", str(sizes.children))) as servers:
        for server in servers:
            await stream(server.http, server.body(fresh("Say hello.", "warm"), 4))
        for name, scenario in SCENARIOS.items():
            for server in servers:
                found[name, server.kind] = await scenario(Work(server, model, sizes))
        row_bytes = await row_bytes_of(servers[0])
    for kind in (OURS, *(k for k in kinds if any(k == s.kind for s in servers))):
        seen = await restarted(report, kind, model, sizes)
        if seen is not None:
            found["after a restart", kind] = seen
    for (name, kind), seen in found.items():
        add_times(times, name, kind, seen)
    costs(report, found, row_bytes)


def add_times(table: Table, name: str, kind: str, seen: Seen) -> None:
    cold, warm = (median(r.ttft for r in replies) for replies in (seen.cold, seen.warm))
    asked = sum(r.prompt or 0 for r in seen.warm)
    table.add(
        name,
        kind,
        ms(cold),
        ms(warm),
        ratio(cold, warm),
        ratio(sum(r.cached or 0 for r in seen.warm), asked) if any(r.cached is not None for r in seen.warm) else None,
        aggregate(seen.warm) if name == "children of one parent" else None,
        sum(not r.ok for r in seen.replies()),
    )


def costs(report: Report, found: dict[tuple[str, str], Seen], row_bytes: int) -> None:
    """What reuse cost us in bytes, and what the children of one parent cost each server in memory."""
    copies = report.table("Bytes of our turns", "scenario", "copied a warm turn", "on disk MiB", "met as")
    for (name, kind), seen in found.items():
        if kind == OURS:
            copies.add(name, copied(seen), mib(seen.on_disk), ways(seen))
    memory = report.table(
        "Memory of a parent and its children",
        *("server", "process grew MiB", "rows held MiB", "rows needed MiB", "held ÷ needed"),
        note="needed: the parent's rows once and each child's own",
    )
    for (name, kind), seen in found.items():
        if name == "children of one parent":
            needed = float(seen.rows * row_bytes)
            memory.add(kind, mib(seen.grown), mib(seen.bank), mib(needed), ratio(seen.bank, needed))


def copied(seen: Seen) -> float | None:
    return median(r.onecopy.get("bytes_copied") for r in seen.warm)


def ways(seen: Seen) -> str:
    return ", ".join(sorted({str(r.onecopy.get("how")) for r in seen.warm}))


async def row_bytes_of(server: Server) -> int:
    found: Any = (await server.http.get("/v1/models")).json()
    return int(found["data"][0]["features"]["row_bytes"])


if __name__ == "__main__":
    main()
