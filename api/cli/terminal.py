"""What a person at a terminal sees and a log file does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner beside `what` on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def say(text: str) -> None:
    """One line for the person who started the command."""
    print(text, file=sys.stderr, flush=True)
