"""An exchange from the inside: signs of life, clients that leave, clients that do not read."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import trio
from onecopy.api.exchange import KEEPALIVE, STALL
from onecopy.api.turns import PIECES
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.http import Direct, collected
from tests.support.scripted import Say, ScriptedService

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


def content(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, **fields}).encode()


class Seen:
    """The messages a client was sent. `hold`: an event that must be set before another body is taken."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.hold: trio.Event | None = None

    async def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        if self.hold is not None and message["type"] == "http.response.body":
            await self.hold.wait()

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)


async def test_f14_headers_leave_before_the_first_piece(autojump_clock: MockClock) -> None:
    go, leave, seen = trio.Event(), trio.Event(), Seen()
    service = ScriptedService(Say("Hello.", before=go.wait))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Direct(service).exchange, "POST", CHAT, content(stream=True), None, leave, seen.send)
        await trio.sleep(1)
        assert seen.messages[0]["status"] == 200
        headers = dict(seen.messages[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert b"no-cache" in headers[b"cache-control"]
        go.set()
    assert collected(seen.messages).events()[-1] == "[DONE]"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_f14_a_long_prefill_shows_signs_of_life_that_parsers_skip(path: str, autojump_clock: MockClock) -> None:
    async def slow() -> None:
        await trio.sleep(3.5 * KEEPALIVE)

    service = ScriptedService(Say("Hello.", prefill=[64], before=slow))
    answer = await Direct(service).post(path, json.loads(content(stream=True)))
    lines = answer.body.decode().split("\n")
    comments = [line for line in lines if line.startswith(":")]
    pings = [event for event in answer.events() if event != "[DONE]" and event.get("type") == "ping"]
    assert len(comments if path == CHAT else pings) == 3
    assert all(len(comment) > 2 for comment in comments)
    assert not any(line.startswith("id:") for line in lines)
    assert not any(line.startswith(":") and not after for line, after in pairwise(lines))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_f12_a_client_that_leaves_ends_its_turns(stream: bool, n: int, autojump_clock: MockClock) -> None:
    async def pause() -> None:
        await trio.sleep(0.1)

    leave, seen = trio.Event(), Seen()
    service = ScriptedService(Say("word ", ends=False, between=pause))
    async with trio.open_nursery() as nursery:
        body = content(stream=stream, n=n)
        nursery.start_soon(Direct(service).exchange, "POST", CHAT, body, None, leave, seen.send)
        await trio.sleep(5)
        assert service.active == n
        leave.set()
    assert (service.active, service.cancelled) == (0, n)
    assert not any(m.get("more_body") is False for m in seen.messages)


async def test_a_client_that_leaves_while_its_turn_waits_ends_it(autojump_clock: MockClock) -> None:
    leave, seen = trio.Event(), Seen()
    service = ScriptedService(Say("x", queued=1, before=trio.sleep_forever))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Direct(service).exchange, "POST", CHAT, content(), None, leave, seen.send)
        await trio.sleep(5)
        leave.set()
    assert service.active == 0
    assert seen.messages == []


async def test_a_slow_reader_holds_a_bounded_number_of_pieces_and_its_turn_pauses() -> None:
    delivered = 0

    async def count() -> None:
        nonlocal delivered
        delivered += 1

    leave, seen = trio.Event(), Seen()
    seen.hold = trio.Event()
    service = ScriptedService(Say("x", ends=False, between=count))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Direct(service).exchange, "POST", CHAT, content(stream=True), None, leave, seen.send)
        await wait_all_tasks_blocked()
        assert delivered <= 2 * PIECES + 4
        seen.hold.set()
    assert delivered == 2000
    assert collected(seen.messages).events()[-1] == "[DONE]"


async def test_a_reader_that_never_reads_loses_its_turn(autojump_clock: MockClock) -> None:
    leave, seen = trio.Event(), Seen()
    seen.hold = trio.Event()

    async def shielded(message: dict[str, Any]) -> None:
        with trio.CancelScope(shield=True):
            await seen.send(message)

    service = ScriptedService(Say("x", ends=False))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Direct(service).exchange, "POST", CHAT, content(stream=True), None, leave, shielded)
        await trio.sleep(2 * STALL)
        assert service.active == 0
        seen.hold.set()


async def test_the_last_message_is_sent_after_the_watch_for_the_client_has_ended() -> None:
    leave, watching = trio.Event(), []

    async def send(message: dict[str, Any]) -> None:
        if message.get("more_body") is False:
            watching.append(leave.statistics().tasks_waiting)

    await Direct(ScriptedService()).exchange("POST", CHAT, content(stream=True), None, leave, send)
    assert watching == [0]


async def test_a_send_that_fails_ends_the_turn_quietly() -> None:
    async def send(message: dict[str, Any]) -> None:
        raise OSError("gone")

    service = ScriptedService(Say("Hello."))
    await Direct(service).exchange("POST", CHAT, content(stream=True), None, trio.Event(), send)
    assert service.active == 0
