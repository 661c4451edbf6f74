"""hypercorn on trio: one listening socket, a stop that is asked for, and signals as events."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import hypercorn.trio.run
import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio import serve as hypercorn_serve
from hypercorn.trio.tcp_server import TCPServer
from onecopy.runtime.errors import StartupError

BACKLOG = 256
HEADER_LIMIT = 64 << 10
"""Bytes of request line and headers; more is answered with 431."""
IDLE = 75.0
"""Seconds an idle connection stays open; also the time a client has to send its headers."""
UNREAD = 300
"""Seconds the system keeps a connection whose peer takes nothing of what was written."""


class Connection(TCPServer):  # type: ignore[misc]
    """hypercorn's connection, but gone when its peer is: hypercorn keeps a closed one until its idle time is over."""

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


hypercorn.trio.run.TCPServer = Connection  # hypercorn has no other way to say it


class ListenerConfig(Config):  # type: ignore[misc]
    """hypercorn's configuration around a socket that is already listening."""

    def __init__(self, listener: socket.socket, grace: float) -> None:
        self.listener = listener
        self.graceful_timeout = grace
        self.keep_alive_timeout = IDLE
        self.keep_alive_max_requests = 1 << 30
        self.h11_max_incomplete_size = HEADER_LIMIT
        self.include_server_header = False
        self.accesslog = None
        self.errorlog = logging.getLogger("onecopy.server")
        self.errorlog.setLevel(logging.WARNING)

    def create_sockets(self) -> Sockets:
        return Sockets([], [self.listener], [])


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. port 0 takes any free one. Raises `StartupError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD * 1000)
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise StartupError(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from None
    made.setblocking(False)
    return made


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: Any,
    listener: socket.socket,
    *,
    stop: Callable[[], Awaitable[None]],
    grace: float = 3.0,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until `stop` returns; then accept nothing new and give running requests `grace` seconds."""
    await hypercorn_serve(app, ListenerConfig(listener, grace), shutdown_trigger=stop, task_status=task_status)


async def on_signals(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Call `first` on the first SIGTERM or SIGINT, `second` on every later one. Runs until cancelled."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        act = first
        async for _ in signals:
            act()
            act = second
