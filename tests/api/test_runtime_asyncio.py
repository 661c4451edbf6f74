"""The programmatic API under asyncio: the same conversations through the portal, cancelled from both sides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import httpx
import pytest
import trio
from onecopy.api.aio import Conversation, Runtime
from onecopy.api.app import create_app
from onecopy.api.portal import NAME
from onecopy.runtime.errors import ActorStopped, BadRequest, DeadlineExceeded, Overloaded, StartupError
from onecopy.runtime.turn import Finished, Started, Text

from tests.support.scripted import Say, ScriptedService

ENDLESS = Say("na ", ends=False, between=lambda: trio.sleep(0.001))


def on_asyncio(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs an async test under asyncio, and looks for threads it left behind."""

    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60), debug=False)
        assert not [thread for thread in threading.enumerate() if thread.name == NAME]

    del run.__wrapped__  # type: ignore[attr-defined]
    return run


async def settled(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0)


@on_asyncio
async def test_pieces_and_answers() -> None:
    async with Runtime.over(ScriptedService("Hello.")) as runtime:
        chat = runtime.conversation("Be brief.")
        pieces = [piece async for piece in chat.send("hi")]
        answer = await chat.send("again")
    assert isinstance(pieces[0], Started)
    assert isinstance(pieces[-1], Finished)
    assert "".join(p.text for p in pieces if isinstance(p, Text)) == answer.text == "Hello."
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.receipt == answer.receipt
    assert len(chat.tokens) == answer.usage.total


@on_asyncio
async def test_pieces_read_first_count_in_the_answer() -> None:
    async with Runtime.over(ScriptedService("Hello.")) as runtime:
        sent = runtime.conversation().send("hi")
        await anext(sent)
        assert (await sent).text == sent.whole.text == "Hello."


@on_asyncio
async def test_forks_sessions_steps_and_status() -> None:
    service = ScriptedService("abc")
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        await chat.send("hi")
        child = await chat.fork(at=4)
        assert (await child.info()).parent == child.parent == chat.session
        assert (await chat.pin()).pinned
        assert (await chat.park()).state == "parked"
        await chat.drop()
        assert chat.session is None
        assert (await runtime.step("x", max_tokens=2)).text == "ab"
        assert (await runtime.status()).model == runtime.card.id


@on_asyncio
async def test_errors_are_raised_as_they_are() -> None:
    async with Runtime.over(ScriptedService(Say(refuse=Overloaded("Full.")))) as runtime:
        with pytest.raises(Overloaded):
            await runtime.conversation().send("hi")
        with pytest.raises(BadRequest):
            runtime.conversation(temperature=9)
    with pytest.raises(KeyError):
        async with Runtime.over(ScriptedService()):
            raise KeyError("mine")


@on_asyncio
async def test_a_cancelled_task_ends_its_turn_before_it_ends() -> None:
    service = ScriptedService(ENDLESS)
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        task = asyncio.ensure_future(chat.send("hi").answer())
        await settled(lambda: service.active == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (service.active, service.cancelled) == (0, 1)
        assert not chat.running
        assert chat.messages == []


@on_asyncio
async def test_timeouts_of_either_side_end_the_turn() -> None:
    service = ScriptedService(ENDLESS)
    async with Runtime.over(service) as runtime:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await runtime.conversation().send("hi")
        with pytest.raises(DeadlineExceeded):
            await runtime.conversation().send("hi", timeout=0.05)
        assert service.active == 0


@on_asyncio
async def test_leaving_a_loop_ends_the_turn() -> None:
    service = ScriptedService(ENDLESS)
    async with Runtime.over(service) as runtime:
        async for piece in runtime.conversation().send("hi"):
            if isinstance(piece, Text):
                break
        await settled(lambda: service.active == 0)


@on_asyncio
async def test_a_block_ends_its_turn_at_its_end() -> None:
    service = ScriptedService(ENDLESS)
    async with Runtime.over(service) as runtime:
        async with runtime.conversation().send("hi") as sent:
            await anext(sent)
        assert service.active == 0


@on_asyncio
async def test_closing_the_runtime_ends_what_others_wait_for() -> None:
    service = ScriptedService(ENDLESS)
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        waiting = asyncio.ensure_future(chat.send("hi").answer())
        await settled(lambda: service.active == 1)
    with pytest.raises(ActorStopped):
        await waiting
    assert service.active == 0
    with pytest.raises(ActorStopped):
        await chat.send("hi")
    with pytest.raises(ActorStopped):
        await runtime.status()


@on_asyncio
async def test_many_turns_run_side_by_side() -> None:
    service = ScriptedService(Say("Hello.", between=lambda: trio.sleep(0.001)))
    async with Runtime.over(service) as runtime:
        answers = await asyncio.gather(*(runtime.conversation().send(f"{i}").answer() for i in range(20)))
    assert {answer.text for answer in answers} == {"Hello."}
    assert service.peak > 1


@on_asyncio
async def test_children_run_their_own_code_on_this_loop() -> None:
    loop = asyncio.get_running_loop()

    async def twice(chat: Conversation, prompt: int) -> int:
        assert asyncio.get_running_loop() is loop
        await asyncio.sleep(0)
        first, second = await chat.send(f"{prompt}"), await chat.send("again")
        return prompt + len(first.text) + len(second.text)

    async with Runtime.over(ScriptedService("abc")) as runtime:
        children = await runtime.spawn(runtime.conversation(), [1, 2, 3], run=twice, limit=2)
        assert [child.result for child in children] == [7, 8, 9]
        assert [len(child.chat.messages) for child in children] == [4, 4, 4]
        [plain] = await runtime.spawn(runtime.conversation(), ["hi"])
        assert plain.result.text == "abc"


@on_asyncio
async def test_a_cancelled_spawn_cancels_the_children_s_own_code() -> None:
    begun, ended = [], []

    async def forever(chat: Conversation, prompt: int) -> None:
        begun.append(prompt)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(prompt)

    async with Runtime.over(ScriptedService()) as runtime:
        task = asyncio.ensure_future(runtime.spawn(runtime.conversation(), [1, 2], run=forever).results())
        await settled(lambda: len(begun) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(ended) == [1, 2]


@on_asyncio
async def test_the_first_error_of_the_children_s_own_code_ends_the_others() -> None:
    ended = []

    async def work(chat: Conversation, prompt: int) -> int:
        if prompt == 1:
            raise LookupError("one")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(prompt)
        return prompt

    async with Runtime.over(ScriptedService()) as runtime:
        with pytest.raises(LookupError):
            await runtime.spawn(runtime.conversation(), [0, 1], run=work)
        assert ended == [0]
        [failed] = await runtime.spawn(runtime.conversation(), [1], run=work, on_error="collect")
        assert isinstance(failed.error, LookupError)


@on_asyncio
async def test_what_cannot_open_says_so_and_leaves_no_thread() -> None:
    with pytest.raises(StartupError, match="memroy"):
        async with Runtime.open("smollm2", memroy=1):  # type: ignore[call-arg]
            pass


@on_asyncio
async def test_cancelling_an_opening_runtime_closes_it() -> None:
    opening: list[bool] = []
    closed: list[bool] = []

    @asynccontextmanager
    async def slow() -> AsyncIterator[Any]:
        opening.append(True)
        try:
            await trio.sleep_forever()
            yield
        finally:
            closed.append(True)

    async def enter() -> None:
        async with Runtime._on(slow):
            pass

    task = asyncio.ensure_future(enter())
    await settled(lambda: bool(opening))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == [True]


@on_asyncio
async def test_the_doors_run_on_the_service() -> None:
    service = ScriptedService("Hello.")
    async with Runtime.over(service) as runtime:
        transport = httpx.ASGITransport(create_app(runtime.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "Hello."
            streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
            [session] = (await client.get("/v1/sessions")).json()["data"][:1]
            for path in ("pin", "park", "fork", "cancel"):
                assert (await client.post(f"/v1/sessions/{session['id']}/{path}")).status_code < 300
            image = await client.get(f"/v1/sessions/{session['id']}/export")
            assert (await client.post("/v1/sessions/import", content=image.content)).status_code == 201
            assert (await client.get("/health")).json()["status"] == "ok"
            assert (await client.get("/metrics")).status_code == 200
            assert (await client.delete(f"/v1/sessions/{session['id']}")).json()["deleted"]
            assert (await client.get(f"/v1/sessions/{session['id']}")).status_code == 404


@on_asyncio
async def test_a_refusal_keeps_its_status_at_the_doors() -> None:
    async with Runtime.over(ScriptedService(Say(refuse=Overloaded("Full.")))) as runtime:
        transport = httpx.ASGITransport(create_app(runtime.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 429
