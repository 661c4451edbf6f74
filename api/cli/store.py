"""`onecopy store`: look at, check, tidy, move and drop the rows kept on disk. Works beside a running server where it
only reads; what changes the directory needs it for itself."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onecopy.runtime.errors import BadRequest, Conflict, NotFound, OnecopyError
from onecopy.runtime.seams import RealClock, RealDisk
from onecopy.runtime.store import KEY_BYTES, Conversation, RowsOnDisk
from onecopy.runtime.store.portable import export_conversation, import_conversation, read_exported

from .terminal import say

Progress = Callable[[int, int], None]
NO_MODEL = bytes(KEY_BYTES)


def default_directory() -> Path:
    """Where rows are kept when no directory is named."""
    from platformdirs import user_cache_path

    return user_cache_path("onecopy") / "rows"


def add_store_commands(subparsers: Any) -> None:
    parser = subparsers.add_parser("store", help="look after the rows kept on disk")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--store", metavar="DIR", default=str(default_directory()), help="the directory (%(default)s)")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(name, help=text, parents=[shared])
        made.set_defaults(run=run)
        return made

    add("ls", run_ls, "list conversations").add_argument("--json", action="store_true", help="one object a line")
    add("verify", run_verify, "read everything and report damage")
    add("sweep", run_sweep, "give the room of dropped rows back")
    export = add("export", run_export, "write one conversation to a safetensors file")
    export.add_argument("conversation", help="its id in `ls`, or the beginning of it")
    export.add_argument("file")
    import_ = add("import", run_import, "take in a conversation from such a file")
    import_.add_argument("file")
    import_.add_argument("--salt", type=bytes.fromhex, default=b"", metavar="HEX", help="the API key's salt, if any")
    drop = add("drop", run_drop, "forget one conversation, and its bytes")
    drop.add_argument("conversation", help="its id in `ls`, or the beginning of it")


def run_ls(args: argparse.Namespace) -> int:
    with _opened(args.store, changes=False) as store:
        rows = store.conversations()
    if args.json:
        print("\n".join(json.dumps(_as_json(c)) for c in rows), end="\n" if rows else "")
    elif sys.stdout.isatty():
        _show(rows)
    else:
        print("\n".join("\t".join(_as_row(c)) for c in rows), end="\n" if rows else "")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    with _opened(args.store, changes=None) as store, _bar("verifying", bytes_=True) as progress:
        result = store.verify(progress)
    say(
        f"{result.good} records are good ({result.size} bytes read), {result.bad} damaged"
        f"{' and given up' if result.bad else ''}, {result.skipped} of another version, {result.unread} unreadable."
    )
    return 1 if result.bad or result.unread else 0


def run_sweep(args: argparse.Namespace) -> int:
    with _opened(args.store, changes=True) as store, _bar("sweeping", bytes_=True) as progress:
        freed = store.sweep(progress)
    say(f"{freed} bytes freed.")
    return 0


def run_export(args: argparse.Namespace) -> int:
    with _opened(args.store, changes=False) as store, _bar("exporting", bytes_=True) as progress:
        tip = _find(store, args.conversation).tip
        exported = export_conversation(store, tip, RealDisk(), args.file, progress)
    say(f"{len(exported.tokens)} tokens written to {args.file}.")
    return 0


def run_import(args: argparse.Namespace) -> int:
    about = _file(lambda: read_exported(RealDisk(), args.file), args.file)
    with (
        _opened(args.store, changes=True, create=True, fingerprint=about.fingerprint, model=about.model) as store,
        _bar("importing") as progress,
    ):
        _, new = _file(lambda: import_conversation(store, RealDisk(), args.file, args.salt, progress), args.file)
    say(f"{len(about.tokens)} tokens of {about.model or 'an unnamed model'}: {new} new records.")
    return 0


def run_drop(args: argparse.Namespace) -> int:
    with _opened(args.store, changes=True) as store, _bar("sweeping", bytes_=True) as progress:
        dropped = store.drop_conversation(_find(store, args.conversation).tip)
        freed = store.sweep(progress)
    say(f"{dropped} records dropped, {freed} bytes freed.")
    return 0


@contextmanager
def _opened(
    path: str,
    *,
    changes: bool | None,
    create: bool = False,
    fingerprint: bytes = NO_MODEL,
    model: str = "",
) -> Iterator[RowsOnDisk]:
    """The store at `path`. changes: False reads beside a server, True needs the directory alone, None takes either."""
    if not create and not Path(path).is_dir():
        raise NotFound(f"There is no rows store in {path}.")
    store = RowsOnDisk.open(
        RealDisk(), path, fingerprint=fingerprint, model=model, wall=RealClock().wall, read_only=changes is False
    )
    if changes and store.read_only:
        raise Conflict(f"{path} is in use by process {store.owner}; stop it first.")
    try:
        yield store
    except OSError as error:
        raise OnecopyError(f"The rows store in {path} failed: {error}.") from error
    finally:
        store.close()


@contextmanager
def _bar(what: str, *, bytes_: bool = False) -> Iterator[Progress]:
    """A progress bar on a terminal; nothing in a log file."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if bytes_ else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _find(store: RowsOnDisk, name: str) -> Conversation:
    found = [c for c in store.conversations() if c.tip.hex().startswith(name.lower())]
    if len(found) != 1:
        what = "No conversation begins" if not found else f"{len(found)} conversations begin"
        raise NotFound(f"{what} with {name!r}; see `onecopy store ls`.")
    return found[0]


def _file(read: Callable[[], Any], path: str) -> Any:
    try:
        return read()
    except FileNotFoundError:
        raise BadRequest(f"There is no file {path}.") from None


def _as_json(c: Conversation) -> dict[str, object]:
    return {
        "id": c.tip.hex(),
        "tokens": c.tokens,
        "records": c.records,
        "bytes": c.size,
        "bytes_own": c.size_own,
        "model": c.model,
        "fingerprint": c.fingerprint.hex(),
        "used": c.used,
        "whole": c.whole,
    }


def _as_row(c: Conversation) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(c.used))
    return (c.tip.hex()[:16], c.model, str(c.tokens), str(c.size), str(c.size_own), used, "" if c.whole else "partial")


def _show(rows: list[Conversation]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "model", "tokens", "bytes", "own bytes", "last used", "")
    for row in rows:
        table.add_row(*_as_row(row))
    Console().print(table)
