"""Subagents from one long conversation: `python -m examples.subagent_spawn [--scripted]`.

A parent reads files of a project until its prompt is long. Subagents fork from it, use tools in a sandbox and report
back. Then the same errands run in sessions that share nothing, and over HTTP by clients that resend everything; a
table compares rows computed, memory and time.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import trio
from onecopy.api import Runtime
from rich.console import Console

from .board import Way
from .scenario import Plan, Scenario

HERE = Path(__file__).parents[2]


def runtime_of(args: argparse.Namespace) -> AbstractAsyncContextManager[Runtime]:
    if args.scripted:
        from .scripted import LedgerService

        return Runtime.over(LedgerService())
    return Runtime.open(args.model, store="")


async def main(args: argparse.Namespace, console: Console) -> list[Way]:
    plan = Plan(args.folder, args.context, args.children, args.limit, args.max_tokens)
    if args.scripted:
        # Its tokens are bytes.
        plan = replace(plan, context=4 * plan.context, max_tokens=8 * plan.max_tokens)
    async with runtime_of(args) as runtime:
        return await Scenario(runtime, plan, console).run()


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.subagent_spawn", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="bundled name, directory or GGUF file")
    parser.add_argument("--scripted", action="store_true", help="no model: scripted replies over the real books")
    parser.add_argument("--folder", type=Path, default=HERE, help="project whose files the parent reads")
    parser.add_argument("--context", type=int, default=1000, help="prompt tokens the parent grows to")
    parser.add_argument("--children", type=int, default=4, help="subagents")
    parser.add_argument("--limit", type=int, help="subagents at work at one time")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens of one answer")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    trio.run(main, parsed(), Console())
