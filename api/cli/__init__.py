"""The command line `onecopy`.

`main` parses, runs one command and answers with its exit code. Commands live in modules of their own that are
imported only when they are asked for, so `onecopy --help` loads no model code; a command whose module is not
installed is not offered. Each module has one function that adds its parser, with `run` set to what runs it:
a function from the parsed arguments to an exit code.

serve.py    serve a model           chat.py    talk to one in the terminal
models.py   what there is           inspect.py     what a model costs and can do
audit.py, bench.py, store.py    checks, measurements, the rows store
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NoReturn, cast

from onecopy.runtime.errors import OnecopyError, StartupError
from onecopy.runtime.seams.pages import ask_for_large_pages

__all__ = ["COMMANDS", "Command", "entry", "main", "offered"]

Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command lives: module (in this package), the function that adds its parser, one line of help."""

    module: str
    add: str
    help: str


COMMANDS: dict[str, Command] = {
    "serve": Command("serve", "add_serve_command", "serve a model over HTTP"),
    "chat": Command("chat", "add_chat_command", "talk to a model in the terminal"),
    "models": Command("models", "add_models_command", "list models"),
    "inspect": Command("inspect", "add_inspect_command", "what a model costs and can do on this machine"),
    "audit": Command("audit", "add_audit_command", "check the exactness contract on a model"),
    "bench": Command("bench", "add_bench_command", "measure a model on this machine"),
    "store": Command("store", "add_store_commands", "look after the rows kept on disk"),
}


def entry() -> NoReturn:
    """The program `onecopy`: a process whose memory comes in large pages where the system has them, then `main`.

    It leaves without the destructors of the libraries it loaded: MLX's may find a thread of its own still there, and
    abort a process that has done all its work.
    """
    ask_for_large_pages()
    try:
        code = main()
    except SystemExit as left:  # argparse: usage and help
        code = left.code if isinstance(left.code, int) else 2 if left.code else 0
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0 done, 1 failed, 2 could not start or wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser(arguments).parse_args(arguments)
    run: Run | None = getattr(args, "run", None)
    if run is None:
        _parser([]).print_help()
        return 2
    return _guarded(run, args)


def offered() -> dict[str, Command]:
    """The commands whose modules are installed."""
    return {name: command for name, command in COMMANDS.items() if find_spec(f"{__name__}.{command.module}")}


def _guarded(run: Run, args: argparse.Namespace) -> int:
    try:
        return run(args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, OnecopyError, BaseExceptionGroup) as error:
        return _explained(error)


def _explained(error: BaseException) -> int:
    """One line on stderr for an error a user can act on; a bug keeps its traceback."""
    found = _only(error)
    if isinstance(found, KeyboardInterrupt):
        return 130
    if not isinstance(found, OnecopyError):
        raise error
    print(f"onecopy: {found.message}", file=sys.stderr)
    return found.exit_code if isinstance(found, StartupError) else 1


def _only(error: BaseException) -> BaseException:
    """The one error inside nested groups, or the first that stopped a start."""
    while isinstance(error, BaseExceptionGroup):
        startup = error.subgroup(StartupError)
        error = (startup or error).exceptions[0]
    return error


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the command named first gets its real options."""
    parser = argparse.ArgumentParser(prog="onecopy", description="Serves a language model to agents, from one copy.")
    parser.add_argument("--version", action="version", version=f"onecopy {metadata.version('onecopy')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, command in offered().items():
        if name == asked:
            module = importlib.import_module(f"{__name__}.{command.module}")
            cast(Callable[[Any], object], getattr(module, command.add))(subparsers)
        else:
            subparsers.add_parser(name, help=command.help)
    return parser
