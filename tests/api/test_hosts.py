"""The same doors under another server, and a lifespan that opens the system."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import uvicorn
from onecopy.api.app import create_app
from onecopy.api.server import listen, url_of
from onecopy.runtime.errors import StartupError

from tests.support.http import events
from tests.support.scripted import ScriptedService

BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def post(url: str, body: Any) -> bytes:
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=30) as answer:
        found: bytes = answer.read()
        return found


async def test_the_doors_run_under_uvicorn_on_asyncio() -> None:
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    server = uvicorn.Server(uvicorn.Config(create_app(ScriptedService("Hello.")), log_config=None, lifespan="off"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, lambda: server.run(sockets=[listener]))
        body = await trio.to_thread.run_sync(post, url + "/v1/chat/completions", BODY)
        server.should_exit = True
    assert events(body)[-1] == "[DONE]"


async def test_a_factory_is_opened_and_closed_with_the_app() -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def factory() -> AsyncIterator[ScriptedService]:
        steps.append("open")
        yield ScriptedService("Hello.")
        steps.append("close")

    app = create_app(factory)
    async with app.router.lifespan_context(app):
        assert app.state.doors.service.card.id == "acme/tiny-chat"
        assert steps == ["open"]
    assert steps == ["open", "close"]


def test_a_taken_port_is_one_clear_error() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port)
