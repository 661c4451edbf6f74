"""One stream, server against server over HTTP: tokens a second, time to first token, gaps between tokens.

    python -m benchmarks.openai [--quick] [--peers mlx,mlx-openblas,llama]

Every server gets the same requests in turn: code, chat, JSON and a long text to read, greedy, the same number of
tokens from all. Prompts differ in their first words each time, so that nothing kept by any server helps. Figures are
medians; ratios are ours over theirs, both from this run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import trio

from .client import Timed, gap, stream
from .common import Report, flags, median, model_of, ms, ratio, sized
from .prompts import KINDS, Messages, fresh, prose
from .servers import OURS, Server, add_peers_flag, peers_of, side_by_side

PLAIN = "onecopy, no drafts"
SLOWEST = "mlx-lm"
Found = dict[tuple[str, str], list[Timed]]
"""Replies by prompt and server."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """reply: tokens of each reply. read: tokens of the long text, answered with `short` tokens."""

    repeat: int
    reply: int
    read: int
    short: int = 4


FULL, QUICK, SMOKE = Sizes(5, 128, 512), Sizes(2, 24, 96), Sizes(1, 4, 40, 2)


def main(argv: list[str] | None = None) -> None:
    parser = flags(__doc__)
    add_peers_flag(parser)
    options = parser.parse_args(argv)
    report = Report("openai", options)
    with model_of(options) as model:
        found = trio.run(measure, options, report, model)
    tell(report, found)
    report.finish()


async def measure(options: argparse.Namespace, report: Report, model: str) -> Found:
    sizes: Sizes = sized(options, full=FULL, quick=QUICK, smoke=SMOKE)
    found: Found = {}
    async with side_by_side(report, peers_of(options), model) as servers:
        for server in servers:
            await stream(server.http, server.body(fresh("Say hello.", "warm"), 4))
        for n in range(sizes.repeat):
            for kind, messages, tokens in prompts(model, sizes, n):
                for name, server, draft in sides(servers, options.quick and n > 0):
                    timed = await stream(server.http, server.body(messages, tokens, draft=draft, cache_salt=name))
                    found.setdefault((kind, name), []).append(timed)
                    count_prompt(timed, found[kind, OURS][-1])
    return found


def count_prompt(timed: Timed, ours: Timed) -> None:
    """A server that counts no prompt tokens was sent as many as we were: model and template are the same."""
    if timed.prompt is None and ours.prompt is not None:
        timed.usage = {**timed.usage, "prompt_tokens": ours.prompt}


def prompts(model: str, sizes: Sizes, n: int) -> Iterator[tuple[str, Messages, int]]:
    for kind, text in KINDS.items():
        yield kind, fresh(text, n), sizes.reply
    yield "read", fresh(prose(model, sizes.read, n), f"read {n}"), sizes.short


def sides(servers: list[Server], once: bool) -> Iterator[tuple[str, Server, bool]]:
    """Ours twice: as it comes, and without drafts. The slowest one is asked once only in a short run."""
    for server in servers:
        if once and server.kind == SLOWEST:
            continue
        yield server.kind, server, True
        if server.kind == OURS:
            yield PLAIN, server, False


def tell(report: Report, found: Found) -> None:
    columns = ("tokens/s", "ours ÷ it", "prompt tokens/s", "ours ÷ it", "first token ms", "gap p50 ms", "gap p99 ms")
    table = report.table("One stream", "prompt", "server", *columns, note="ours ÷ it: against onecopy as it comes")
    for (kind, name), replies in found.items():
        for failed in (r for r in replies if not r.ok):
            report.note(f"{name}, {kind}: {failed.error}")
        ours = found[kind, OURS]
        table.add(
            kind,
            name,
            rate(replies) if kind != "read" else None,
            ratio(rate(ours), rate(replies)) if kind != "read" else None,
            prefill(replies),
            ratio(prefill(ours), prefill(replies)),
            ms(median(r.ttft for r in replies)),
            ms(gap(replies, 0.5)),
            ms(gap(replies, 0.99)),
        )
    bars(report, found)


def bars(report: Report, found: Found) -> None:
    def over(prompt: str, value: object, peer: str, side: str = OURS) -> float | None:
        if (prompt, peer) not in found:
            return None
        return ratio(value(found[prompt, side]), value(found[prompt, peer]))  # type: ignore[operator]

    report.bar("prompt tokens/s ÷ mlx-lm as installed", over("read", prefill, "mlx-lm"), "at least", 20)
    report.bar("tokens/s ÷ mlx-lm as installed, no drafts", over("chat", rate, "mlx-lm", PLAIN), "at least", 2)
    same = "mlx-lm + OpenBLAS"
    report.bar("prompt tokens/s ÷ mlx-lm, same BLAS", over("read", prefill, same), "at least", 1)
    report.bar("tokens/s ÷ mlx-lm, same BLAS, no drafts", over("chat", rate, same, PLAIN), "at least", 1)
    report.bar("chat tokens/s, drafts ÷ no drafts", over("chat", rate, PLAIN), "at least", 0.97)


def rate(replies: list[Timed]) -> float | None:
    return median(r.rate for r in replies)


def prefill(replies: list[Timed]) -> float | None:
    return median(r.prefill for r in replies)


if __name__ == "__main__":
    main()
