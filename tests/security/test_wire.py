"""Bytes on the socket that no client would send, and clients that hold on: others are served all the while."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

import hypothesis
import psutil
import trio
from hypothesis import strategies as st

from tests.support.http import Running, running
from tests.support.scripted import ScriptedService

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"messages":[{"role":"user","content":"q"}],"max_tokens":4}'
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def healthy(server: Running) -> bool:
    with server.connect() as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return line.recv(65536).startswith(b"HTTP/1.1 200")


def send(server: Running, data: bytes) -> bytes:
    """What comes back for `data` and the end of it; the server may close at any time."""
    with server.connect() as line:
        line.settimeout(10)
        try:
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            return line.recv(65536)
        except (ConnectionError, TimeoutError):
            return b""


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A right request with some of its bytes changed, cut out or put twice."""
    data = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(("change", "cut", "twice", "line"))):
            case "change":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=3))
            case "cut":
                del data[at : at + draw(st.integers(1, 30))]
            case "twice":
                data[at:at] = data[at : at + 40]
            case _:
                data[at:at] = b"\r\n"
    return bytes(data)


def attack(server: Running) -> None:
    @hypothesis.settings(
        max_examples=150,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.binary(max_size=300) | mangled())
    def run(data: bytes) -> None:
        answer = send(server, data)
        assert not answer.startswith(b"HTTP/1.1 5"), (data, answer[:200])

    run()
    assert healthy(server)


async def test_bytes_of_any_kind_are_no_server_error() -> None:
    async with running(ScriptedService("Hello.")) as server:
        await server.call(attack, server)


SMUGGLED = (
    HEAD + b"Content-Length: 4\r\nContent-Length: 60\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/sessions HTTP/1.1\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + BODY,
    HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 1e9\r\n\r\n" + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + BODY,
)


async def test_a_length_said_twice_does_not_hide_a_second_request() -> None:
    async with running(ScriptedService("Hello.")) as server:
        for data in SMUGGLED:
            answer = await server.call(send, server, data)
            assert answer.count(b"HTTP/1.1 2") == 0, (data, answer)
        assert await server.call(healthy, server)


def ask(server: Running) -> bytes:
    """The first bytes of the answer to a right request of a client that stays."""
    with server.connect() as line:
        line.sendall(WHOLE)
        return line.recv(65536)


def hold_on(server: Running, held: ExitStack) -> None:
    parts = (b"", b"GET /hea", HEAD, HEAD + b"Content-Length: 100000\r\n\r\n" + BODY)
    for i in range(150):
        held.enter_context(server.connect()).sendall(parts[i % len(parts)])


async def test_clients_that_hold_on_keep_nobody_out() -> None:
    """Half a head, half a body, nothing at all: 150 of them, and a request is still answered."""
    async with running(ScriptedService("Hello.")) as server:
        with ExitStack() as held:
            await server.call(hold_on, server, held)
            with trio.fail_after(30):
                assert await server.call(healthy, server)
                answer = await server.call(ask, server)
            assert answer.startswith(b"HTTP/1.1 200")
        assert await server.call(healthy, server)


def come_and_go(server: Running) -> None:
    for _ in range(20):
        ask(server)


async def test_a_connection_ends_when_its_client_closes_it() -> None:
    """Clients that open one for each request would use up a process's handles otherwise."""
    async with running(ScriptedService("Hello.")) as server:
        await server.call(come_and_go, server)
        with trio.fail_after(10):
            while any(c.status == "CLOSE_WAIT" and c.laddr.port == server.port for c in handles()):
                await trio.sleep(0.01)


def handles() -> list[Any]:
    return psutil.Process().net_connections("tcp4")
