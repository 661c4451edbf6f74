"""Raw bytes over a real socket: connections that stay usable, streams as any parser reads them, clients that leave."""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

import pytest
import trio
from onecopy.api.doors import Options

from tests.support.http import Running, events, running
from tests.support.scripted import Say, ScriptedService

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
KEYED = Options(keys=("sk-1",), body_limit=1 << 20)
GOOD = {"authorization": "Bearer sk-1"}


def request(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    lines = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **(headers or {})}.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def chunked(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    parts = [body[i : i + 4096] for i in range(0, len(body), 4096)]
    chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    start = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n{head}\r\n"
    return start.encode() + chunks + b"0\r\n\r\n"


class Connection:
    """One keep-alive connection, read response by response."""

    def __init__(self, server: Running) -> None:
        self.socket = server.connect()
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def head(self) -> tuple[int, dict[str, str]]:
        status = int(self.file.readline().split()[1])
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers

    def response(self, *, body: bool = True) -> tuple[int, dict[str, str], bytes]:
        status, headers = self.head()
        if not body or status == 204:
            return status, headers, b""
        if "content-length" in headers:
            return status, headers, self.file.read(int(headers["content-length"]))
        return status, headers, self.chunks()

    def chunks(self) -> bytes:
        found = b""
        while size := int(self.file.readline(), 16):
            found += self.file.read(size)
            self.file.readline()
        self.file.readline()
        return found


def first_then_good(server: Running, first: bytes) -> tuple[int, int]:
    """The statuses of `first` and of a good request behind it, on one connection or, if it was closed, on a new one."""
    good = request("POST", CHAT, json.dumps(HI).encode(), GOOD)
    with Connection(server) as connection:
        connection.send(first)
        status, headers, _ = connection.response()
        if headers.get("connection") != "close":
            connection.send(good)
            return status, connection.response()[0]
    with Connection(server) as connection:
        connection.send(good)
        return status, connection.response()[0]


EARLY = {
    "bad key": (request("POST", CHAT, b"x" * 70_000, {"authorization": "Bearer no"}), 401),
    "bad key, chunked": (chunked(CHAT, b"x" * 70_000, {"x-api-key": "no"}), 401),
    "too large": (request("POST", CHAT, b"x" * (3 << 20), GOOD), 413),
    "too large, chunked": (chunked(CHAT, b"x" * (3 << 20), GOOD), 413),
    "no route": (request("POST", "/v1/nothing", b"x" * 70_000, GOOD), 404),
    "no method": (request("DELETE", CHAT, b"x" * 70_000, GOOD), 405),
    "malformed": (request("POST", CHAT, b"{", GOOD), 400),
    "content type": (request("POST", CHAT, b"x" * 70_000, {**GOOD, "content-type": "text/plain"}), 400),
    "other host": (request("POST", CHAT, b"x" * 70_000, {**GOOD, "host": "evil.example"}), 403),
}


@pytest.mark.parametrize("name", EARLY)
async def test_f22_after_an_early_refusal_the_next_request_gets_its_own_answer(name: str) -> None:
    first, status = EARLY[name]
    async with running(ScriptedService("Hello."), KEYED) as server:
        assert await server.call(first_then_good, server, first) == (status, 200)


async def test_f22_a_refusal_that_was_read_to_its_end_keeps_the_connection() -> None:
    def talk(server: Running) -> list[int]:
        with Connection(server) as connection:
            statuses = []
            for data in (EARLY["bad key"][0], EARLY["too large"][0], request("GET", "/v1/models", b"", GOOD)):
                connection.send(data)
                statuses.append(connection.response()[0])
            return statuses

    async with running(ScriptedService("Hello."), KEYED) as server:
        assert await server.call(talk, server) == [401, 413, 200]


async def test_f22_pipelined_requests_are_answered_in_order() -> None:
    def talk(server: Running) -> list[int]:
        with Connection(server) as connection:
            connection.send(EARLY["bad key"][0] + request("GET", "/v1/models", b"", GOOD))
            return [connection.response()[0], connection.response()[0]]

    async with running(ScriptedService("Hello."), KEYED) as server:
        assert await server.call(talk, server) == [401, 200]


async def test_f22_head_has_headers_and_no_body() -> None:
    def talk(server: Running) -> tuple[int, int, int]:
        with Connection(server) as connection:
            connection.send(request("HEAD", "/v1/models", b"", GOOD))
            status, headers, _ = connection.response(body=False)
            connection.send(request("GET", "/v1/models", b"", GOOD))
            return status, int(headers["content-length"]), len(connection.response()[2])

    async with running(ScriptedService("Hello."), KEYED) as server:
        status, told, real = await server.call(talk, server)
        assert (status, told) == (200, real)


async def test_a_client_that_waits_for_100_continue_is_told_to_go_on() -> None:
    def talk(server: Running) -> tuple[bytes, int]:
        body = json.dumps(HI).encode()
        whole = request("POST", CHAT, body, {**GOOD, "expect": "100-continue"})
        with Connection(server) as connection:
            connection.send(whole[: -len(body)])
            line = connection.file.readline()
            while connection.file.readline().strip():
                pass
            connection.send(body)
            return line, connection.response()[0]

    async with running(ScriptedService("Hello."), KEYED) as server:
        assert await server.call(talk, server) == (b"HTTP/1.1 100 \r\n", 200)


async def test_headers_past_their_limit_are_refused() -> None:
    def talk(server: Running) -> int:
        with Connection(server) as connection:
            connection.send(request("GET", "/health", b"", {"x-long": "x" * (200 << 10)}))
            return connection.head()[0]

    async with running(ScriptedService("Hello.")) as server:
        assert await server.call(talk, server) == 431


async def test_f14_a_stream_is_plain_events_on_a_connection_that_stays() -> None:
    def talk(server: Running) -> tuple[dict[str, str], bytes, int]:
        with Connection(server) as connection:
            connection.send(request("POST", CHAT, json.dumps(HI | {"stream": True}).encode()))
            _, headers, body = connection.response()
            connection.send(request("GET", "/v1/models"))
            return headers, body, connection.response()[0]

    async with running(ScriptedService("Hello.")) as server:
        headers, body, after = await server.call(talk, server)
    assert headers["content-type"].startswith("text/event-stream")
    assert events(body)[-1] == "[DONE]"
    assert body.count(b"[DONE]") == 1
    assert after == 200


def leave(server: Running, how: str, stream: bool, prefilling: threading.Event) -> None:
    """Send a request, wait until it is being worked on, and go."""
    made = server.connect()
    made.sendall(request("POST", CHAT, json.dumps(HI | {"stream": stream, "max_tokens": 2000}).encode()))
    prefilling.wait(30)
    if how == "reset":
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half-close":
        made.shutdown(socket.SHUT_WR)
        made.settimeout(30)
        while made.recv(65536):
            pass
    made.close()


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [True, False])
async def test_c4_a_client_that_leaves_before_the_first_token_ends_its_turn(how: str, stream: bool) -> None:
    started, ended = threading.Event(), trio.Event()

    async def prefill() -> None:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    service = ScriptedService(Say("x", before=prefill))
    async with running(service) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, leave, server, how, stream, started)
        with trio.fail_after(30):
            await ended.wait()
        service.script = lambda spec: Say("Hello.")
        assert await server.call(first_then_good, server, request("GET", "/health")) == (200, 200)
    assert service.active == 0


async def test_f12_a_client_that_leaves_in_the_middle_of_three_choices_ends_all_three() -> None:
    body = json.dumps(HI | {"stream": True, "n": 3, "max_tokens": 100_000}).encode()

    def talk(server: Running) -> None:
        with Connection(server) as connection:
            connection.send(request("POST", CHAT, body))
            connection.head()
            connection.file.readline()

    async def pace() -> None:
        await trio.sleep(0.005)

    service = ScriptedService(Say("word ", ends=False, between=pace), context=200_000)
    async with running(service) as server:
        await server.call(talk, server)
        with trio.fail_after(30):
            while service.active:
                await trio.sleep(0.01)
    assert service.cancelled == 3


async def test_a_reader_that_stops_reading_pauses_its_turn_and_no_other() -> None:
    body = json.dumps(HI | {"stream": True, "max_tokens": 150_000}).encode()
    service = ScriptedService(Say("word ", ends=False), context=200_000)
    async with running(service) as server:
        slow = server.connect()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(request("POST", CHAT, body))
        assert await server.call(first_then_good, server, request("GET", "/health")) == (200, 200)
        assert service.active == 1
        slow.close()
        with trio.fail_after(30):
            while service.active:
                await trio.sleep(0.01)
