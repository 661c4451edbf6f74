"""`onecopy audit`: the exactness contract, checked on a user's own model and machine."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import trio
from onecopy.actors.service import Options, Service
from onecopy.actors.system import System
from onecopy.runtime import blas
from onecopy.runtime.audit import Verdict, checks
from onecopy.runtime.engine import Engine
from onecopy.runtime.fidelity import Fidelity
from onecopy.runtime.models import load
from onecopy.runtime.seams.clock import RealClock
from onecopy.runtime.turn import Finished, Sampling, TurnSpec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .flags import add_arithmetic_flags, count

ENGINE_CHECKS = 15
"""Checks that `runtime.audit.checks` makes with its default widths, for a bar; with compiled rounds two more."""


def add_audit_command(subparsers: Any) -> None:
    parser = subparsers.add_parser("audit", help="check the exactness contract on a model")
    parser.add_argument("model", nargs="?", default="smollm2", help="bundled name, directory or GGUF file (smollm2)")
    parser.add_argument("--tokens", type=count, default=500, metavar="N", help="reply tokens compared (500)")
    add_arithmetic_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when everything is bit-equal and the engine promises it, else 1."""
    console, options = Console(), Options(model=args.model, kv_bits=args.kv_bits, fast=args.fast)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("rounds", total=ENGINE_CHECKS + 5)

        def note(verdict: Verdict) -> None:
            progress.update(task, advance=1, description=verdict.name)

        found, stated, quantized = _rounds(options, args.tokens, note)
        found += trio.run(_replies, options, args.tokens, note)
    if quantized is not None:
        console.print(f"Quantized rows change answers: {quantized}.")
    return report(console, args.model, found, stated)


def _rounds(
    options: Options, tokens: int, note: Callable[[Verdict], None]
) -> tuple[list[Verdict], str, Fidelity | None]:
    """Logits, bit for bit, on this thread; and what the self-checks said."""
    blas.install()
    loaded = load(options.model)
    context, now = min(loaded.context, 300 + tokens + 256), RealClock().now
    engine = Engine.open(loaded, context=context, stopwatch=now, fast=options.fast, kv_bits=options.kv_bits)
    vocab = loaded.vocab_size or 256
    out = []
    for verdict in checks(engine, vocab, tokens):
        note(verdict)
        out.append(verdict)
    return out, engine.verdict, engine.fidelity


async def _replies(options: Options, tokens: int, note: Callable[[Verdict], None]) -> list[Verdict]:
    """Token ids of whole replies: drafted, in company, sampled, resumed in memory, resumed from disk."""
    out: list[Verdict] = []

    def compare(name: str, got: Sequence[Finished], want: Finished) -> None:
        wrong = sum(f.token_sha != want.token_sha for f in got)
        out.append(Verdict(name, len(got), wrong, wrong))
        note(out[-1])

    with tempfile.TemporaryDirectory() as store:
        options = replace(options, store=store)
        async with System.open(options) as system:
            prompt = _prompt(system)
            plain = await _ask(system, prompt, tokens, draft=False)
            compare("drafted", [await _ask(system, prompt, tokens)], plain)
            warm = await _ask(system, prompt, tokens, temperature=0.8, draft=False)
            compare("sampled and drafted", [await _ask(system, prompt, tokens, temperature=0.8)], warm)
            company: list[Finished] = []
            async with trio.open_nursery() as nursery:
                for k in range(4):
                    nursery.start_soon(_gather, system, prompt, tokens, company)
                    nursery.start_soon(_gather, system, prompt[: -1 - k], tokens // 2, [])
            compare("in company", company, plain)
            compare("resumed in memory", [await _ask(system, prompt, tokens)], plain)
        async with System.open(options) as system:
            compare("resumed from disk", [await _ask(system, prompt, tokens)], plain)
    return out


def _prompt(system: Service) -> tuple[int, ...]:
    """Repetitive enough that drafts are made and kept, long enough for blocks on disk."""
    vocab = system.card.vocab_size or 256
    return tuple((7 * i * i + 3 * (i % 23)) % vocab for i in range(600))


async def _ask(
    system: Service, prompt: tuple[int, ...], tokens: int, *, temperature: float = 0.0, draft: bool = True
) -> Finished:
    spec = TurnSpec(prompt, tokens, Sampling(seed=11, temperature=temperature), draft=draft, ignore_eos=True)
    async with system.turn(spec) as pieces:
        async for piece in pieces:
            if isinstance(piece, Finished):
                return piece
    raise AssertionError("a turn ended without its last piece")


async def _gather(system: Service, prompt: tuple[int, ...], tokens: int, into: list[Finished]) -> None:
    into.append(await _ask(system, prompt, max(1, tokens)))


def report(console: Console, model: str, found: Sequence[Verdict], stated: str) -> int:
    """Prints all that was found; the exit status. stated: the engine's own verdict, which no check can better."""
    table = Table(title=f"exactness of {model}")
    for heading in ("check", "compared", "differ", "other token"):
        table.add_column(heading, justify="left" if heading == "check" else "right")
    for v in found:
        table.add_row(v.name, str(v.rows), str(v.differ), str(v.flips))
    console.print(table)
    bad = [v.name for v in found if not v.exact]
    if bad:
        console.print(f"NOT EXACT: {', '.join(bad)}. The engine says: {stated}.")
        return 1
    if stated != "exact":
        console.print(
            f"NOT EXACT, though nothing differed here: equal tokens are not promised. The engine says: {stated}."
        )
        return 1
    console.print("EXACT: the same request gives the same tokens, however it is computed.")
    return 0
