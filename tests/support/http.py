"""The doors over a real socket, and an ASGI transport that streams: what a client sees, with nothing in between."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import trio
from onecopy.api.app import create_app
from onecopy.api.doors import Options
from onecopy.api.server import listen, serve, url_of

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Running:
    """A server on a free port of 127.0.0.1."""

    url: str
    port: int

    async def call(self, function: Callable[..., R], *args: Any) -> R:
        """Run a synchronous client in a worker thread."""
        return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


@asynccontextmanager
async def running(service: Any, options: Options | None = None) -> AsyncIterator[Running]:
    """hypercorn on trio around the doors of `service`; stopped at the end of the block."""
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        app = create_app(service, options)

        async def start(task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
            await serve(app, listener, stop=stop.wait, grace=0.2, task_status=task_status)

        await nursery.start(start)
        yield Running(url, int(url.rpartition(":")[2]))
        stop.set()


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        return events(self.body)


def events(body: bytes) -> list[Any]:
    """Data of all events, by a parser as strict as the specification: JSON where it is JSON."""
    found = []
    for block in body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        assert all(line.startswith(("data: ", "event: ")) for line in lines), block
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        if data:
            assert len(data) == 1, block
            found.append(data[0] if data[0] == "[DONE]" else json.loads(data[0]))
    return found


class Direct:
    """A client without a socket: calls the application itself and sees each message as it is sent."""

    def __init__(self, service: Any, options: Options | None = None) -> None:
        self.app = create_app(service, options)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, content, headers)

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return await self.request("GET", path, b"", headers)

    async def request(
        self, method: str, path: str, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        send, receive = trio.open_memory_channel[dict[str, Any]](math.inf)
        async with send, receive:
            await self.exchange(method, path, content, headers, trio.Event(), send.send)
            return collected([receive.receive_nowait() for _ in range(receive.statistics().current_buffer_used)])

    async def exchange(
        self,
        method: str,
        path: str,
        content: bytes,
        headers: dict[str, str] | None,
        leave: trio.Event,
        send: Callable[[dict[str, Any]], Any],
    ) -> None:
        """One exchange; the client leaves when `leave` is set."""
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": content, "more_body": False}
            await leave.wait()
            return {"type": "http.disconnect"}

        await self.app(scope(method, path, headers), receive, send)


def scope(method: str, path: str, headers: dict[str, str] | None) -> dict[str, Any]:
    path, _, query = path.partition("?")
    all_headers = {"host": "127.0.0.1:8080", "content-type": "application/json", **(headers or {})}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in all_headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8080),
        "state": {},
        "extensions": {},
    }


def collected(messages: list[dict[str, Any]]) -> Answer:
    start, *rest = messages
    assert start["type"] == "http.response.start"
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], headers, b"".join(message.get("body", b"") for message in rest))
