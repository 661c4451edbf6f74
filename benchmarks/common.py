"""What every benchmark shares: flags, tables on the terminal and as JSON, bars, and a line about the hardware."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table as RichTable

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MIB = 1 << 20
PACKAGES = ("onecopy", "mlx", "mlx-lm", "numpy", "trio")
Cell = str | float | int | bool | None
Better = Literal["at least", "at most"]

console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass(slots=True)
class Table:
    """Rows under columns. A cell that could not be measured is None."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    note: str = ""

    def add(self, *cells: Cell) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells under {len(self.columns)} columns")
        self.rows.append(cells)


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and what it should be."""

    what: str
    value: float | None
    better: Better
    bar: float

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bar if self.better == "at least" else self.value <= self.bar


class Report:
    """The tables of one benchmark run. `finish` prints them and writes `results/NAME.json`."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.out = Path(options.out)
        self.settings = {k: v for k, v in vars(options).items() if isinstance(v, str | int | float | bool | list)}
        self.tables: list[Table] = []
        self.bars: list[Bar] = []
        self.notes: list[str] = []
        self.hardware = hardware()

    def table(self, title: str, *columns: str, note: str = "") -> Table:
        made = Table(title, columns, note=note)
        self.tables.append(made)
        return made

    def bar(self, what: str, value: float | None, better: Better, bar: float) -> None:
        self.bars.append(Bar(what, value, better, bar))

    def note(self, text: str) -> None:
        """A line for reader and JSON: a peer that was skipped, a figure that is not comparable."""
        console.print(text, style="yellow")
        self.notes.append(text)

    def finish(self) -> None:
        console.print(f"{hardware_line(self.hardware)}; load at the start {self.hardware['load']}", style="dim")
        for table in self.tables:
            console.print(rich(table))
        for bar in self.bars:
            console.print(f"{VERDICTS[bar.holds]:7} {bar.what}: {shown(bar.value)}, bar {bar.better} {shown(bar.bar)}")
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{self.name}.json").write_text(json.dumps(self.plain(), indent=1) + "\n")

    def plain(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "hardware": self.hardware,
            "settings": self.settings,
            "tables": [asdict(table) for table in self.tables],
            "bars": [{**asdict(bar), "holds": bar.holds} for bar in self.bars],
            "notes": self.notes,
        }


VERDICTS = {True: "holds", False: "MISSED", None: "?"}


def rich(table: Table) -> RichTable:
    made = RichTable(title=table.title, caption=table.note or None, title_justify="left", caption_justify="left")
    for i, column in enumerate(table.columns):
        numeric = any(isinstance(row[i], int | float) for row in table.rows)
        made.add_column(column, justify="right" if numeric else "left")
    for row in table.rows:
        made.add_row(*map(shown, row))
    return made


def shown(cell: Cell) -> str:
    """Three significant digits; whole numbers in full; a dash for what was not measured."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


# --- numbers


def median(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return statistics.median(found) if found else None


def percentile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that a share `q` of the values does not exceed."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))]


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def mib(size: float | None) -> float | None:
    return None if size is None else size / MIB


# --- the machine


def hardware() -> dict[str, Any]:
    """Processor, memory, BLAS kernels, versions, and how busy the machine was when the run began."""
    from onecopy.runtime import blas

    found = blas.install()
    return {
        "cpu": _cpu(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "system": f"{platform.system()} {platform.machine()}",
        "blas": found.name,
        "load": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
    }


def hardware_line(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['threads']} threads, {found['memory_gib']} GiB, "
        f"{found['system']}; matmul on {found['blas']}; {versions}"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


# --- flags and models


def flags(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks offer."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="bundled name, directory or GGUF file (smollm2)")
    parser.add_argument("--quick", action="store_true", help="the short set: fewer and smaller measurements")
    parser.add_argument("--smoke", action="store_true", help="seconds, on a tiny random model: does the script work?")
    parser.add_argument("--out", default=str(RESULTS), metavar="DIR", help="where the JSON goes (benchmarks/results)")
    return parser


def sized(options: argparse.Namespace, *, full: Any, quick: Any, smoke: Any) -> Any:
    """The size of a measurement for this run."""
    return smoke if options.smoke else quick if options.quick else full


@contextmanager
def model_of(options: argparse.Namespace) -> Iterator[str]:
    """The model to measure: the one asked for, or for a smoke run the tiny random one of the tests."""
    if not options.smoke:
        yield options.model
        return
    with tiny_model() as path:
        yield path


@contextmanager
def tiny_model() -> Iterator[str]:
    """A random two-layer llama that serves 65,536 positions, one byte a token."""
    from tests.support.system import write_tiny

    with TemporaryDirectory(prefix="onecopy-bench-") as folder:
        yield str(write_tiny(Path(folder) / "tiny"))
