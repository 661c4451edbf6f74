"""`python -m tests.sim --seeds A..B`: runs seeds until one breaks a promise, and shows the smallest run that does."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.sim.run import Report, run_scenario
from tests.sim.scenario import Scenario, scenario, small, stored
from tests.sim.shrink import shrink

ERR = Console(stderr=True)
EACH = 50
"""Runs after which garbage is collected: a run leaves little, and looking for it all the time costs an eighth."""


def main(argv: list[str] | None = None) -> int:
    """0 when every run kept every promise, 1 at the first that did not."""
    options = _options(argv)
    draw = small if options.small else stored if options.disk else scenario
    if options.replay is not None:
        return _replay(draw(options.replay), options.step)
    run_scenario(draw(0))
    gc.collect()
    gc.freeze()  # what is loaded by now stays: nobody has to look through it again
    gc.disable()
    begun, runs = time.process_time(), 0
    for report in _reports(options, draw):
        runs += 1
        if report.broken:
            _show(report, draw)
            return 1
    seconds = time.process_time() - begun
    print(f"{runs} runs, {runs / seconds:.0f} a second of one core, no promise broken")
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0..200", help="A..B: from A up to but not including B")
    parser.add_argument("--until", type=float, help="minutes: go on past B until then")
    parser.add_argument("--small", action="store_true", help="scenarios of one or two short conversations")
    parser.add_argument("--disk", action="store_true", help="with a rows store, and several lives on one disk")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print its events")
    parser.add_argument("--step", action="store_true", help="with --replay: wait for Enter after each event")
    return parser.parse_args(argv)


def _reports(options: argparse.Namespace, draw: Callable[[int], Scenario]) -> Iterator[Report]:
    first, last = map(int, options.seeds.split(".."))
    end = None if options.until is None else time.monotonic() + options.until * 60
    columns = (TextColumn("seed {task.fields[seed]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=ERR, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None if end else last - first, seed=first)
        seed = first
        while time.monotonic() < end if end is not None else seed < last:
            yield run_scenario(draw(seed))
            seed += 1
            if seed % EACH == 0:
                gc.collect()
            bar.update(task, advance=1, seed=seed)


def _show(report: Report, draw: Callable[[int], Scenario]) -> None:
    print(f"seed {report.seed} breaks a promise; trace {report.trace}")
    for sentence in dict.fromkeys(report.broken):
        print(f"  {sentence}")
    smallest, least = shrink(draw(report.seed))
    print(f"the smallest scenario that does:\n  {smallest}\nits events (trace {least.trace}):")
    for event in least.events:
        print("  ", *event)


def _replay(chosen: Scenario, step: bool) -> int:
    report = run_scenario(chosen)
    print(chosen)
    for event in report.events:
        print(*event, flush=True)
        if step and input().strip():
            break
    print(f"seed {report.seed}, trace {report.trace}, {len(report.broken)} broken promises")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
