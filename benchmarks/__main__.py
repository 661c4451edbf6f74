"""The short set, in under ten minutes: every script with `--quick`, one after another.

    python -m benchmarks [--minutes 10] [--only openai,cache] [--smoke]

What does not fit in the time is left out, and said so. llama.cpp takes part when it is built:
`python -m benchmarks.peers build`. Tables of all results: `python -m benchmarks.report`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from .common import RESULTS, console
from .peers import ROOT

DRAFTS = "import sys; from onecopy.api.cli import main; sys.exit(main())"
SCRIPTS = ("internals", "openai", "concurrent", "store", "cache", "fairness", "agents", "drafts", "rows")
"""In the order of what should not be left out."""
LEAST = 5.0
"""Seconds below which no script is begun."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all of them (10)")
    parser.add_argument("--only", default=",".join(SCRIPTS), metavar="NAMES", help="which ones")
    parser.add_argument("--smoke", action="store_true", help="tiny models: do the scripts work?")
    parser.add_argument("--out", default=str(RESULTS), metavar="DIR", help="where the JSON goes")
    options = parser.parse_args(argv)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.minutes * 60
    results = {name: run(name, options, ends) for name in options.only.split(",")}
    for name, said in results.items():
        console.print(f"{name:12} {said}")
    return 1 if "failed" in results.values() else 0


def run(name: str, options: argparse.Namespace, ends: float) -> str:
    """How one script went, in a word."""
    begun = time.monotonic()
    if ends - begun < LEAST:
        return "left out: the time is up"
    console.rule(name)
    try:
        done = subprocess.run(command(name, options), cwd=ROOT, timeout=ends - begun, check=False)
    except subprocess.TimeoutExpired:
        return "cut off: the time is up"
    return "failed" if done.returncode else f"{time.monotonic() - begun:.0f} s"


def command(name: str, options: argparse.Namespace) -> list[str]:
    size = "--smoke" if options.smoke else "--quick"
    if name != "drafts":
        return [sys.executable, "-m", f"benchmarks.{name}", size, "--out", options.out]
    file = str(Path(options.out) / "drafts.json")
    return [sys.executable, "-c", DRAFTS, "bench", "drafts", "--quick", "--json", file]


if __name__ == "__main__":
    sys.exit(main())
