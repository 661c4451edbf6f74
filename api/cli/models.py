"""`onecopy models`: what can be served, read from headers and configs alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .terminal import say


def add_models_command(subparsers: Any) -> None:
    parser = subparsers.add_parser("models", help="list models")
    parser.add_argument("directory", nargs="?", type=Path, help="a directory that holds models")
    parser.set_defaults(run=run_models)


def run_models(args: argparse.Namespace) -> int:
    from onecopy.runtime.models import list_models

    rows = [(m.id, m.kind, human(m.nbytes), str(m.path)) for m in list_models(args.directory)]
    if not rows:
        say("no models here")
        return 1
    table(("name", "kind", "size", "path"), rows)
    return 0


def human(nbytes: float) -> str:
    """Bytes in the largest fitting unit of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table on a terminal; tab-separated lines for other programs."""
    if not sys.stdout.isatty():
        print("\n".join("\t".join(row) for row in rows))
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(*head, box=None)
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
