"""The importable app under each kind of server: asyncio and trio, alone and mounted in another application."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import hypercorn.asyncio
import pytest
import trio
import uvicorn
from onecopy.api import asgi
from onecopy.api.portal import NAME
from onecopy.api.server import ListenerConfig, listen, serve, url_of
from onecopy.runtime.errors import Overloaded
from starlette.applications import Starlette

from examples.asgi.app import create
from tests.support.asgi_app import scripted
from tests.support.scripted import Say, ScriptedService

BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
ENDLESS = Say("na ", ends=False, between=lambda: trio.sleep(0.001))
Client = httpx.AsyncClient


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    made = ScriptedService("Hello.")
    with scripted(made):
        yield made
    assert not [thread for thread in threading.enumerate() if thread.name == NAME]


@asynccontextmanager
async def under_uvicorn(app: Any) -> AsyncIterator[Client]:
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, lambda: server.run(sockets=[listener]))
        try:
            async with Client(base_url=url_of(listener), timeout=30) as client:
                yield client
        finally:
            server.should_exit = True


@asynccontextmanager
async def under_trio(app: Any) -> AsyncIterator[Client]:
    listener, stop = listen("127.0.0.1", 0), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: serve(app, listener, stop=stop.wait, grace=0.2))
        async with Client(base_url=url_of(listener), timeout=30) as client:
            yield client
        stop.set()


@asynccontextmanager
async def under_hypercorn_on_asyncio(app: Any) -> AsyncIterator[Client]:
    listener, stop = listen("127.0.0.1", 0), threading.Event()

    async def stopped() -> None:
        await asyncio.to_thread(stop.wait)

    def run() -> None:
        asyncio.run(hypercorn.asyncio.serve(app, ListenerConfig(listener, 0.2), shutdown_trigger=stopped))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, run)
        try:
            async with Client(base_url=url_of(listener), timeout=30) as client:
                yield client
        finally:
            stop.set()


SERVERS = [under_uvicorn, under_trio, under_hypercorn_on_asyncio]
Under = Callable[[Any], Any]


async def settled(true: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not true():
            await trio.sleep(0.005)


@pytest.mark.parametrize("under", SERVERS)
async def test_the_app_opens_answers_and_closes(under: Under, service: ScriptedService) -> None:
    async with under(asgi.create([])) as client:
        whole = await client.post(CHAT, json=BODY)
        assert whole.json()["choices"][0]["message"]["content"] == "Hello."
        streamed = await client.post(CHAT, json={**BODY, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await client.get("/health")).json()["status"] == "ok"
    assert service.active == 0


@pytest.mark.parametrize("under", SERVERS)
async def test_a_client_that_leaves_ends_its_turn(under: Under, service: ScriptedService) -> None:
    service.script = lambda spec: ENDLESS
    async with under(asgi.create([])) as client:
        async with client.stream("POST", CHAT, json={**BODY, "stream": True}):
            await settled(lambda: service.active == 1)
        await settled(lambda: service.active == 0)
    assert service.cancelled == 1


@pytest.mark.parametrize("under", SERVERS)
async def test_refusals_keep_their_status(under: Under, service: ScriptedService) -> None:
    service.script = lambda spec: Say(refuse=Overloaded("Full."))
    async with under(asgi.create([])) as client:
        assert (await client.post(CHAT, json={**BODY, "stream": True})).status_code == 429
        assert (await client.post(CHAT, json={"messages": []})).status_code == 400


@pytest.mark.parametrize("under", [under_uvicorn, under_trio])
async def test_the_example_mounts_the_doors(under: Under, service: ScriptedService) -> None:
    async with under(create()) as client:
        assert (await client.post("/llm" + CHAT, json=BODY)).json()["choices"][0]["message"]["content"] == "Hello."
        assert (await client.get("/")).json() == {"model": "acme/tiny-chat", "conversations": 1}


async def test_a_mounted_door_keeps_its_shapes_and_open_paths(service: ScriptedService) -> None:
    async with under_trio(create(asgi.create(["--api-key", "secret"]))) as client:
        refused = await client.post("/llm/v1/messages", json={})
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        assert (await client.get("/llm/health")).status_code == 200
        key = {"authorization": "Bearer secret"}
        missing = await client.get("/llm/nothing", headers=key)
        assert missing.json()["error"]["message"] == "There is no route /nothing."


def test_the_variable_holds_the_arguments_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Any]] = []
    monkeypatch.setenv(asgi.VARIABLE, "some/model --memory 8GiB --alias 'a b' --host 0.0.0.0")

    def record(system: Any, doors: Any) -> Starlette:
        seen.append((system, doors))
        return Starlette()

    monkeypatch.setattr(asgi, "app_of", record)
    asgi.create()
    [(system, doors)] = seen
    assert (system.model, system.memory) == ("some/model", 8 << 30)
    assert (doors.aliases, doors.loopback) == (("a b",), False)


def test_a_wrong_argument_stops_the_server_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asgi.create(["--memory", "lots"])
    assert "ONECOPY_SERVE" in capsys.readouterr().err


def test_the_app_is_made_when_it_is_asked_for() -> None:
    assert isinstance(asgi.app, Starlette)
    assert asgi.app is asgi.app
    with pytest.raises(AttributeError):
        _ = asgi.nothing


async def test_gunicorn_s_uvicorn_worker_runs_the_app(tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-m", "gunicorn", "-k", "uvicorn_worker.UvicornWorker", "-w", "1", "-b", f"unix:{path}"]
    process = subprocess.Popen([*command, "tests.support.asgi_app:app"], stderr=subprocess.PIPE, text=True)
    try:
        await settled(path.exists)
        transport = httpx.AsyncHTTPTransport(uds=str(path), retries=20)
        async with Client(transport=transport, base_url="http://127.0.0.1", timeout=30) as client:
            answer = await client.post(CHAT, json=BODY)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello."
    finally:
        process.terminate()
        _, log = await trio.to_thread.run_sync(process.communicate)
    assert process.returncode == 0, log
    assert "Traceback" not in log
