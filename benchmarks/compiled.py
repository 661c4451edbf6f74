"""What compiling the rounds of one conversation saves: run `python -m benchmarks.compiled`.

Rounds of one and of four rows behind a long prompt, as one kept graph and as a graph built anew, taking turns in one
process on the same rows: the time until a round's graph stands, until it is computed, and the memory that it takes at
its height. On a CPU nothing is compiled when serving; there NumPy is kept out and MLX computes on the CPU in place of a
device, so what is worth reading is the time until the graph stands.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import mlx.core as mx
from onecopy.runtime import blas
from onecopy.runtime.compiled import BUCKET, CompiledRounds
from onecopy.runtime.engine import Engine
from onecopy.runtime.models import load
from onecopy.runtime.numerics import exponential
from onecopy.runtime.rows.layout import round_up
from onecopy.runtime.rows.ops import Allocate, Chain, Link
from onecopy.runtime.rows.plan import Strip

from .common import Report, flags, mib, model_of, ms, ratio, sized

CHUNK = 512
"""Rows of a prompt computed at once."""
WIDTHS = (1, 4)


@dataclass(slots=True)
class Times:
    """Seconds until graphs stood and until they were computed, and the bytes that rounds took at their height."""

    built: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)


class Conversation:
    """Rows of one conversation in a leaf of whole buckets; rounds behind it move no frontier."""

    def __init__(self, engine: Engine, rows: int) -> None:
        self._engine, self._rows, self._room = engine, rows, round_up(rows + CHUNK, BUCKET)
        self._tokens = [(7 * i * i + 3 * i) % 256 for i in range(rows + max(WIDTHS))]
        engine.pool.apply((Allocate(1, 0, self._room),))
        for at in range(0, rows, CHUNK):
            strip = self._strip(at, min(at + CHUNK, rows), 0)
            engine.settle([strip], engine.forward([strip]))

    def round(self, width: int, compiled: CompiledRounds | None, times: Times) -> None:
        strip = self._strip(self._rows, self._rows + width, width)
        mx.reset_peak_memory()
        held, begun = mx.get_active_memory(), time.perf_counter()
        with mock.patch.object(self._engine, "_compiled", compiled):
            logits = self._engine.forward([strip])
        times.built.append(time.perf_counter() - begun)
        self._engine.settle([strip], logits)
        times.done.append(time.perf_counter() - begun)
        times.peak.append(mx.get_peak_memory() - held)

    def _strip(self, start: int, stop: int, wanted: int) -> Strip:
        chain = Chain((Link(1, 0, start),), self._room)
        return Strip(chain, start, tuple(self._tokens[start:stop]), wanted)


def main(argv: list[str] | None = None) -> int:
    options = flags(__doc__).parse_args(argv)
    blas.install()
    report = Report("compiled", options)
    rows = sized(options, full=2000, quick=2000, smoke=300)
    repeat = sized(options, full=40, quick=15, smoke=2)
    with model_of(options) as model, in_graphs():
        engine = Engine.open(load(model), context=2 * rows + BUCKET, stopwatch=time.perf_counter)
        if engine._compiled is None:
            report.note(f"nothing to measure: {engine.eager}")
        else:
            measure(report, Conversation(engine, rows), engine._compiled, rows, repeat)
    report.finish()
    return 0


@contextmanager
def in_graphs() -> Iterator[None]:
    """In the block every round stays in MLX's graphs, on a CPU too."""
    with mock.patch.object(exponential, "HOST", mx.DeviceType.gpu):
        yield


def measure(report: Report, talk: Conversation, compiled: CompiledRounds, rows: int, repeat: int) -> None:
    columns = ("rows", "round", "graph stands, ms", "computed, ms", "MiB at its height", "graph, ÷ eager")
    table = report.table(f"Rounds behind {rows:,} tokens", *columns)
    for width in WIDTHS:
        ways: dict[str, tuple[CompiledRounds | None, Times]] = {
            "eager": (None, Times()),
            "compiled": (compiled, Times()),
        }
        for way in ways.values():
            talk.round(width, way[0], Times())
        for _ in range(repeat):
            for way in ways.values():
                talk.round(width, *way)
        eager = statistics.median(ways["eager"][1].built)
        for name, (_, found) in ways.items():
            built, done, peak = (statistics.median(x) for x in (found.built, found.done, found.peak))
            table.add(width, name, ms(built), ms(done), mib(int(peak)), ratio(built, eager))
        report.bar(f"time until the graph of {width} rows stands, compiled ÷ eager", _last(table), "at most", 1)


def _last(table: Any) -> float:
    return float(table.rows[-1][-1])


if __name__ == "__main__":
    main()
