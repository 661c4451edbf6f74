"""What quantized rows (`--kv-bits`) cost in time and spare in memory: run `python -m benchmarks.quantized`.

The same model on rows in float and in 8 and 4 bits, taking turns in one process: a prompt, then one stream and several
streams decoding behind it, each on rows of its own. What they do to the output is what the check at load says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from onecopy.runtime import blas
from onecopy.runtime.engine import Engine
from onecopy.runtime.models import load
from onecopy.runtime.rows.layout import round_up
from onecopy.runtime.rows.ops import Allocate, Chain, CopyRows, Link
from onecopy.runtime.rows.plan import Strip

from .common import Report, flags, ratio, sized

CHUNK = 512
"""Rows of a prompt computed at once."""
STREAMS = 8


class Kept:
    """A model on rows of one kind, and conversations of `rows` rows in it. bits: None for rows as they are."""

    def __init__(self, model: str, bits: int | None, rows: int) -> None:
        self.engine = Engine.open(load(model), context=2 * rows, stopwatch=time.perf_counter, kv_bits=bits)
        self.bits, self._rows, self._room = bits, rows, round_up(rows + 1)
        self._tokens = [(7 * i * i + 3 * i) % 256 for i in range(rows + 1)]
        self.prefill: list[float] = []
        self.decode: dict[int, list[float]] = {1: [], STREAMS: []}

    def fill(self) -> None:
        """Computes the prompt of the first conversation; the others get copies of its rows."""
        self.engine.pool.segments.clear()
        self.engine.pool.apply(tuple(Allocate(i, 0, self._room) for i in range(STREAMS)))
        begun = time.perf_counter()
        for at in range(0, self._rows, CHUNK):
            self._round([self._strip(0, at, min(at + CHUNK, self._rows))])
        self.prefill.append(time.perf_counter() - begun)
        self.engine.pool.apply(tuple(CopyRows(0, i, 0, self._rows) for i in range(1, STREAMS)))

    def step(self, streams: int) -> None:
        """One token each; the frontiers stay, so every step costs the same."""
        begun = time.perf_counter()
        self._round([self._strip(i, self._rows, self._rows + 1) for i in range(streams)])
        self.decode[streams].append(time.perf_counter() - begun)

    def _strip(self, segment: int, start: int, stop: int) -> Strip:
        return Strip(Chain((Link(segment, 0, start),), self._room), start, tuple(self._tokens[start:stop]), 1)

    def _round(self, strips: Sequence[Strip]) -> None:
        self.engine.settle(strips, self.engine.forward(strips))


def main(argv: list[str] | None = None) -> int:
    parser = flags(__doc__)
    parser.add_argument("--rows", type=int, default=2000, metavar="N", help="rows of a conversation (2000)")
    options = parser.parse_args(argv)
    blas.install()
    kinds = sized(options, full=(None, 8, 4), quick=(None, 8, 4), smoke=(None, 8))
    rows = sized(options, full=options.rows, quick=options.rows, smoke=300)
    with _model(options) as model:
        sides = [Kept(model, bits, rows) for bits in kinds]
        measure(sides, sized(options, full=40, quick=15, smoke=2))
        report(options, sides, rows)
    return 0


def measure(sides: Sequence[Kept], steps: int) -> None:
    for _ in range(2):
        for side in sides:
            side.fill()
    for streams in (1, STREAMS):
        for _ in range(steps):
            for side in sides:
                side.step(streams)


def report(options: Any, sides: Sequence[Kept], rows: int) -> None:
    made = Report("quantized", options)
    what = ("prefill", "one stream", f"{STREAMS} streams")
    columns = ("rows", "bytes a row", *(f"{name}{unit}" for name in what for unit in (" tok/s", ", ratio")))
    table = made.table(f"Quantized rows, {rows} tokens", *columns)
    plain = speeds(sides[0], rows)
    for side in sides:
        pairs = [(own, ratio(own, of)) for own, of in zip(speeds(side, rows), plain, strict=True)]
        kind = "as computed" if side.bits is None else f"{side.bits} bits"
        table.add(kind, side.engine.layout.row_bytes, *(cell for pair in pairs for cell in pair))
        if side.engine.fidelity is not None:
            made.note(str(side.engine.fidelity))
    made.finish()


def speeds(side: Kept, rows: int) -> tuple[float, ...]:
    """Tokens a second: of the prompt, one stream, and all streams together."""
    decoded = (streams / statistics.median(times) for streams, times in side.decode.items())
    return rows / min(side.prefill), *decoded


@contextmanager
def _model(options: Any) -> Iterator[str]:
    """The model to measure; for a smoke run a tiny one with heads wide enough."""
    if not options.smoke:
        yield options.model
        return
    from tests.support.system import write_tiny

    with TemporaryDirectory(prefix="onecopy-bench-") as folder:
        yield str(write_tiny(Path(folder) / "wide", head_dim=64))


if __name__ == "__main__":
    raise SystemExit(main())
