"""`onecopy serve`: the system and its doors, until a signal asks them to stop."""

from __future__ import annotations

import argparse
import logging
import math
import os
import socket
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import trio
from onecopy.actors.service import Options as SystemOptions
from onecopy.actors.service import Service

from ..app import create_app
from ..doors import Options
from ..gate import loopback
from ..server import listen, on_signals, serve, url_of
from .flags import add_system_flags, size, system_options
from .terminal import busy, say

KEY_VARIABLE = "ONECOPY_API_KEY"
GRACE = 3.0
"""Seconds clients get to take the end of their replies, once the system has stopped."""
log = logging.getLogger("onecopy.serve")


def add_serve_command(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="serve a model over HTTP")
    add_system_flags(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on, 0 for any (8080)")
    parser.add_argument("--api-key", action="append", default=[], metavar="[LABEL:]KEY", help="repeatable")
    parser.add_argument("--api-key-file", metavar="FILE", help="one [LABEL:]KEY a line, mode 0600, read on change")
    parser.add_argument("--alias", action="append", default=[], help="another name of the model; * for any")
    parser.add_argument("--allow-host", action="append", default=[], help="another Host name of this server")
    parser.add_argument("--cors-origin", action="append", default=[], help="a web origin that may call; * for any")
    parser.add_argument("--body-limit", type=size, default=32 << 20, metavar="SIZE", help="largest body (32MiB)")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    level = getattr(logging, args.log_level.upper())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("onecopy").setLevel(level)
    trio.run(_serve, args)
    return 0


def door_options(args: argparse.Namespace) -> Options:
    key = os.environ.get(KEY_VARIABLE, "")
    return Options(
        aliases=tuple(args.alias),
        keys=(*args.api_key, *([key] if key else [])),
        key_file=args.api_key_file,
        hosts=(args.host, *args.allow_host),
        origins=tuple(args.cors_origin),
        loopback=loopback([args.host]),
        body_limit=args.body_limit,
    )


def open_system(options: SystemOptions) -> AbstractAsyncContextManager[Service]:
    from onecopy.actors.system import System

    opened: AbstractAsyncContextManager[Service] = System.open(options)
    return opened


async def _serve(args: argparse.Namespace) -> None:
    """The socket first, so that a taken port costs no loading; the doors stay until the system has drained."""
    options = door_options(args)
    if not options.loopback and not options.keys and not options.key_file:
        log.warning("anyone who reaches %s can use this server; --api-key asks for a key", args.host)
    with listen(args.host, args.port) as listener:
        async with trio.open_nursery() as nursery:
            stop, doors = trio.Event(), Doors()
            nursery.start_soon(on_signals, stop.set, _give_up)
            async with AsyncExitStack() as stack:
                with busy(f"loading {args.model}"):
                    service = await stack.enter_async_context(open_system(system_options(args)))
                await nursery.start(doors.run, create_app(service, options), listener, stop)
                say(f"onecopy serves {service.card.id} on {url_of(listener)}")
                await stop.wait()
            await doors.close()
            nursery.cancel_scope.cancel()


@dataclass(slots=True)
class Doors:
    """The running doors. They accept nothing new once `stop` is set, and wait for as long as the system drains: its
    turns end with an error event that still has to reach their clients."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    closed: trio.Event = field(default_factory=trio.Event)

    async def run(
        self,
        app: Any,
        listener: socket.socket,
        stop: trio.Event,
        task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with self.scope:
            await serve(app, listener, stop=stop.wait, grace=math.inf, task_status=task_status)
        self.closed.set()

    async def close(self) -> None:
        """Give clients `GRACE` seconds to take what is left, then cut them off."""
        with trio.move_on_after(GRACE):
            await self.closed.wait()
        self.scope.cancel()
        with trio.move_on_after(GRACE):
            await self.closed.wait()
            return
        log.warning("a client takes nothing of what was written to it; its connection is cut")
        _leave(0)


def _leave(code: int) -> None:
    """End the process. Needed where a write is shielded and never ends; what the store acknowledged is durable."""
    logging.shutdown()
    os._exit(code)


def _give_up() -> None:
    """The second signal: end now."""
    os._exit(1)
