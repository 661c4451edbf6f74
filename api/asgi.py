"""The doors for any ASGI server: `uvicorn onecopy.api.asgi:app`, gunicorn's uvicorn worker, `hypercorn -k trio`.

`app` is made when a server asks for it, from the arguments of `onecopy serve` in the variable ONECOPY_SERVE
(`ONECOPY_SERVE="smollm2 --memory 8GB --alias '*'"`); the address is the server's own affair, but `--host` tells the
doors which one it is. The model is opened in the app's lifespan: one process, one copy, so run one worker.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import trio
from onecopy.actors.service import Options as SystemOptions
from onecopy.actors.service import Service
from starlette.applications import Starlette

from .app import create_app
from .bridge import PortalService
from .cli.flags import system_options
from .cli.serve import add_serve_command, door_options
from .doors import Options
from .portal import hosted
from .runtime import Runtime

VARIABLE = "ONECOPY_SERVE"


def create(arguments: Sequence[str] | None = None) -> Starlette:
    """An app that opens what these `onecopy serve` arguments say; by default those in ONECOPY_SERVE."""
    parser = argparse.ArgumentParser(prog=VARIABLE)
    add_serve_command(parser.add_subparsers())
    given = shlex.split(os.environ.get(VARIABLE, "")) if arguments is None else arguments
    args = parser.parse_args(["serve", *given])
    return app_of(system_options(args), door_options(args))


def app_of(system: SystemOptions, doors: Options | None = None) -> Starlette:
    """An app that opens this system in its lifespan, whatever loop its server runs."""
    return create_app(lambda: opened(system), doors)


@asynccontextmanager
async def opened(options: SystemOptions) -> AsyncIterator[Service]:
    """A system for the loop that runs now: in place under trio, on a thread that runs trio under any other."""
    if trio.lowlevel.in_trio_run():
        async with Runtime.open(**asdict(options)) as runtime:
            yield runtime.service
        return
    async with hosted(lambda: Runtime.open(**asdict(options))) as (portal, inner):
        yield PortalService(inner, portal)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["app"] = create()
    return made


__all__ = ["VARIABLE", "app_of", "create", "opened"]
