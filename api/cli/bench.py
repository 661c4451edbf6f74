"""`onecopy bench drafts`: what drafting brings on a user's own model and machine, and that it changes no token."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from onecopy.runtime import blas
from onecopy.runtime.costs import prices
from onecopy.runtime.decode import Drafter, Prices, drafter_for, verify, wants_for
from onecopy.runtime.drafting import drafter_for as device_drafter_for
from onecopy.runtime.engine import Engine
from onecopy.runtime.errors import BadRequest
from onecopy.runtime.models import Loaded, load
from onecopy.runtime.rows.caches import Strip
from onecopy.runtime.rows.layout import BLOCK, round_up
from onecopy.runtime.rows.ops import Allocate, Chain, Drop, Link
from onecopy.runtime.seams.clock import RealClock
from onecopy.runtime.text import ChatFormat
from onecopy.runtime.turn import Sampling
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .flags import add_fast, count

SEGMENT = 1 << 40
"""The one segment in use: far from any that a bank hands out."""
CHUNK = 512
BARS = {"rewriting": 2.0, "chat": 0.97}
"""Least speed-up: copying must pay, and talk that copies nothing must cost next to nothing."""
CHAT = "Explain to a curious ten-year-old why the sky is blue in the day and red in the evening. Give an example."
JSON = 'Write a JSON list of twelve cities, each with "name", "country" and "population", one a line.'


@dataclass(frozen=True, slots=True)
class Task:
    """begun: how the reply begins, given to the model. new: tokens of the reply after that."""

    name: str
    asked: str
    begun: str
    new: int


@dataclass(slots=True)
class Reply:
    """proposed[d], kept[d]: drafts at depth d + 1, and those of them that stayed. seconds: of all rounds of decode."""

    tokens: tuple[int, ...] = ()
    seconds: float = 0.0
    rounds: int = 0
    proposed: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second after the first."""
        return (len(self.tokens) - 1) / self.seconds

    def note(self, proposed: int, kept: int) -> None:
        self.rounds += 1
        for depth in range(proposed):
            if depth == len(self.proposed):
                self.proposed.append(0)
                self.kept.append(0)
            self.proposed[depth] += 1
            self.kept[depth] += depth < kept


@dataclass(frozen=True, slots=True)
class Pair:
    """A task done with drafts and without, as often as was asked, by turns."""

    task: Task
    drafted: list[Reply]
    plain: list[Reply]

    @property
    def equal(self) -> bool:
        return len({r.tokens for r in (*self.drafted, *self.plain)}) == 1

    @property
    def speedup(self) -> float:
        return median(r.rate for r in self.drafted) / median(r.rate for r in self.plain)


def add_bench_command(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure a model on this machine")
    parser.set_defaults(run=lambda args: _usage(parser))
    drafts = parser.add_subparsers(metavar="WHAT").add_parser("drafts", help="acceptance and speed-up of drafts")
    drafts.add_argument("model", nargs="?", default="smollm2", help="bundled name, directory or GGUF file (smollm2)")
    drafts.add_argument("--drafter", metavar="DIR", help="a block drafter for the model (DFlash)")
    add_fast(drafts)
    drafts.add_argument("--quick", action="store_true", help="shorter texts, fewer repeats")
    drafts.add_argument("--tokens", type=count, metavar="N", help="tokens of each reply")
    drafts.add_argument("--json", metavar="FILE", help="also write the figures here")
    drafts.set_defaults(run=run)


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def run(args: argparse.Namespace) -> int:
    """0 when every drafted reply equals its plain one, whatever the speed; else 1."""
    blas.install()
    loaded = load(args.model)
    tasks, repeat = tasks_of(args.quick, args.tokens), 2 if args.quick else 3
    prompts = [prompt_of(loaded, task) for task in tasks]
    need = max(len(p) + t.new for p, t in zip(prompts, tasks, strict=True))
    if need > loaded.context:
        raise BadRequest(f"{args.model} serves {loaded.context} tokens, the longest text needs {need}; try --quick.")
    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("replies", total=2 * repeat * len(tasks))
        engine, costs = opened(loaded, args.drafter, args.fast)
        work = list(zip(tasks, prompts, strict=True))
        pairs = pairs_of(engine, costs, work, repeat, partial(progress.advance, bar))
    console.print(f"who drafts: {' and '.join(costs.drafters)}; arithmetic: {engine.verdict}")
    tables = [speeds(pairs), *([depths(pairs)] if any(p.drafted[0].proposed for p in pairs) else [])]
    for table in tables:
        console.print(rich(table))
    for name, least, value in bars(pairs):
        console.print(f"{'holds' if value >= least else 'MISSED':7} {name}: {value:.2f}x, bar {least:g}x")
    if args.json:
        Path(args.json).write_text(json.dumps(plain(tables, pairs), indent=1) + "\n")
    console.print("every drafted reply equals its plain one" if all(p.equal for p in pairs) else "REPLIES DIFFER")
    return 0 if all(p.equal for p in pairs) else 1


# --- what is asked


def tasks_of(quick: bool, tokens: int | None) -> list[Task]:
    lines, new = (40, 48) if quick else (300, 256)
    source = source_file(lines)
    asked = f"Write this file again, without any change.\n```python\n{source}```"
    head = "```python\n" + "".join(source.splitlines(keepends=True)[:4])
    return [
        Task("rewriting", asked, head, tokens or new),
        Task("chat", CHAT, "", tokens or new),
        Task("json", JSON, '[\n{"name": "Paris", "country": "France", "population": 2100000},\n', tokens or new),
    ]


def source_file(lines: int) -> str:
    """A plain Python file of about so many lines."""
    nouns = ("order", "invoice", "parcel", "account", "ticket", "report", "journey", "room", "pupil", "engine")
    made = [
        f"def {verb}_{noun}({noun}, limit):\n    if {noun}.size > limit:\n        return None\n"
        f"    return {noun}.{verb}(limit)\n\n\n"
        for verb in ("open", "close", "check", "send", "print")
        for noun in nouns
    ]
    return "".join("".join(made).splitlines(keepends=True)[:lines])


def prompt_of(loaded: Loaded, task: Task) -> tuple[int, ...]:
    """The prompt's ids: a chat where the model has a template, bare text otherwise."""
    if loaded.tokenizer is None:
        raise BadRequest(f"{loaded.id} has no tokenizer, so there is nothing to ask it.")
    if loaded.template is None:
        return tuple(loaded.tokenizer.encode(task.asked + "\n" + task.begun, bos=True))
    chat = ChatFormat(loaded.tokenizer, loaded.template, wall=RealClock().wall)
    head = chat.render([{"role": "user", "content": task.asked}])
    return tuple(loaded.tokenizer.encode(head + task.begun))


# --- decoding


def opened(loaded: Loaded, beside: str | None = None, fast: bool = False) -> tuple[Engine, Prices]:
    """An engine with the drafter that a server would have, and what drafting costs on it. beside: its directory.

    fast: without the search for exact arithmetic, so that a drafted reply may differ from its plain one.
    """
    now = RealClock().now
    drafter = device_drafter_for(loaded, beside)
    engine = Engine.open(loaded, context=loaded.context, stopwatch=now, drafter=drafter, fast=fast)
    return engine, prices(engine, now)


def pairs_of(
    engine: Engine,
    costs: Prices,
    work: Sequence[tuple[Task, tuple[int, ...]]],
    repeat: int,
    done: Callable[[], None],
) -> list[Pair]:
    """Every task both ways, by turns."""
    now = RealClock().now
    pairs = [Pair(task, [], []) for task, _ in work]
    for _ in range(repeat):
        for pair, (task, prompt) in zip(pairs, work, strict=True):
            for draft, replies in ((True, pair.drafted), (False, pair.plain)):
                replies.append(decoded(engine, prompt, task.new, costs, draft, now))
                done()
    return pairs


def decoded(
    engine: Engine,
    prompt: Sequence[int],
    new: int,
    costs: Prices,
    draft: bool,
    now: Callable[[], float],
) -> Reply:
    """One greedy reply of `new` tokens, with rounds as the lane makes them. Leaves no segment behind.

    Who drafts has rows at the size at which rounds are compiled, as the bank gives them.
    """
    end = round_up(len(prompt) + new, (draft and engine.fixed_rows) or BLOCK)
    engine.pool.apply((Allocate(SEGMENT, 0, end),))
    try:
        tokens = [*prompt, _prefilled(engine, prompt, end)]
        drafter = drafter_for(tokens, costs) if draft else None
        reply, begun = Reply(), now()
        while (left := len(prompt) + new - len(tokens)) > 0:
            proposal = drafter.propose(min(costs.limit, left - 1)) if drafter is not None else ()
            kept = _round(engine, tokens, proposal, end, drafter, min(costs.limit, left - 2))
            reply.note(len(proposal), kept)
        reply.seconds, reply.tokens = max(now() - begun, 1e-9), tuple(tokens[len(prompt) :])
        return reply
    finally:
        engine.pool.apply((Drop(SEGMENT),))


SAMPLING = Sampling(seed=0, temperature=0.0)


def _prefilled(engine: Engine, prompt: Sequence[int], end: int) -> int:
    """Writes the prompt's rows and answers with the first token of the reply."""
    for start in range(0, len(prompt), CHUNK):
        stop = min(start + CHUNK, len(prompt))
        last = stop == len(prompt)
        then = None if last else prompt[stop]
        strip = Strip(_chain(start, end), start, tuple(prompt[start:stop]), int(last), then)
        result = engine.run([strip], wants_for(SAMPLING, stop) if last else ())
    return result.picks[0][0].token


def _round(
    engine: Engine, tokens: list[int], proposal: tuple[int, ...], end: int, drafter: Drafter | None, most: int
) -> int:
    """One round: appends the tokens it delivers, and answers how many of the proposed ones are among them.

    most: tokens that the device may propose for the next one.
    """
    at = len(tokens) - 1
    ahead = drafter.ahead(most) if drafter is not None and most > 0 else 0
    strip = Strip(_chain(at, end), at, (tokens[-1], *proposal), 1 + len(proposal), draft=ahead)
    found = engine.run([strip], wants_for(SAMPLING, len(tokens), proposal))
    verdict = verify(proposal, [pick.token for pick in found.picks[0]])
    engine.accept([(strip, verdict.kept + 1)])
    tokens += verdict.tokens
    if drafter is not None:
        drafter.accept(verdict.tokens)
        if found.drafts and found.drafts[0]:
            drafter.offer(found.drafts[0])
    return verdict.kept


def _chain(at: int, end: int) -> Chain:
    return Chain((Link(SEGMENT, 0, at),), end)


# --- what is told


@dataclass(frozen=True, slots=True)
class Figures:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str | float | None, ...]]


def speeds(pairs: Sequence[Pair]) -> Figures:
    columns = ("task", "tokens/s drafted", "tokens/s plain", "speed-up", "tokens a round", "drafts", "kept", "equal")
    return Figures("Drafts", columns, [_speed(p) for p in pairs])


def _speed(pair: Pair) -> tuple[str | float | None, ...]:
    one = pair.drafted[0]
    drafts, kept = sum(one.proposed), sum(one.kept)
    return (
        pair.task.name,
        median(r.rate for r in pair.drafted),
        median(r.rate for r in pair.plain),
        pair.speedup,
        (len(one.tokens) - 1) / max(1, one.rounds),
        float(drafts),
        kept / drafts if drafts else None,
        "yes" if pair.equal else "NO",
    )


def depths(pairs: Sequence[Pair]) -> Figures:
    """Of the drafts made at each depth, the share that stayed."""
    deepest = max(len(p.drafted[0].proposed) for p in pairs)
    columns = ("task", *(f"depth {d + 1}" for d in range(deepest)))
    return Figures("Kept of the drafts at each depth", columns, [_depth(p, deepest) for p in pairs])


def _depth(pair: Pair, deepest: int) -> tuple[str | float | None, ...]:
    one = pair.drafted[0]
    shares = (k / p if p else None for k, p in zip(one.kept, one.proposed, strict=True))
    return (pair.task.name, *shares, *(None,) * (deepest - len(one.proposed)))


def bars(pairs: Sequence[Pair]) -> Iterator[tuple[str, float, float]]:
    for pair in pairs:
        if pair.task.name in BARS:
            yield f"{pair.task.name}: speed-up of drafts", BARS[pair.task.name], pair.speedup


def rich(figures: Figures) -> Table:
    made = Table(title=figures.title, title_justify="left")
    for i, column in enumerate(figures.columns):
        made.add_column(column, justify="right" if i else "left")
    for row in figures.rows:
        made.add_row(*("–" if c is None else c if isinstance(c, str) else f"{c:.3g}" for c in row))
    return made


def plain(tables: Sequence[Figures], pairs: Sequence[Pair]) -> dict[str, Any]:
    """The figures in the form of the files in `benchmarks/results`."""
    return {
        "benchmark": "drafts",
        "tables": [{"title": t.title, "columns": t.columns, "rows": t.rows, "note": ""} for t in tables],
        "bars": [
            {"what": name, "value": value, "better": "at least", "bar": bar, "holds": value >= bar}
            for name, bar, value in bars(pairs)
        ],
    }
