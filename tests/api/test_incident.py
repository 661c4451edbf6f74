"""The day it was built for: a long session, three spawns at once, traffic of every shape, and not one failure.

Over HTTP with the bundled model. In the field, new sessions of another shape than a held long one failed with no
token until a restart; memory is given tightly here, so that admission has to resize, fork, give up and queue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import trio
from onecopy.actors.service import Options
from onecopy.actors.system import WORKSPACE, System

from tests.support.http import running

pytestmark = [pytest.mark.model, pytest.mark.slow]

CHAT = "/v1/chat/completions"
WORDS = "the bank holds every row once and each fork reads what its parent wrote before it "
ROOM = 96 << 20
"""Bytes of rows: about eight blocks of the bundled model, a few more than the long session and its spawns take."""


class Small:
    """A machine where everything but the rows costs nothing, so that ROOM is exact."""

    def total(self) -> int:
        return ROOM

    def footprint(self) -> int:
        return 0


@dataclass(slots=True)
class Day:
    """What the clients saw."""

    client: httpx.AsyncClient
    failures: list[str] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)

    async def ask(self, messages: list[dict[str, str]], **settings: Any) -> dict[str, Any]:
        """One request, sent again while the server says so; anything but a whole reply with tokens is a failure."""
        body = {"messages": messages, "temperature": 0, "max_tokens": 4, "ignore_eos": True, **settings}
        response = await self.client.post(CHAT, json=body)
        found: dict[str, Any] = response.json()
        if response.status_code != 200 or found["usage"]["completion_tokens"] == 0:
            self.failures.append(f"{response.status_code} {response.text[:300]}")
            return {}
        self.replies.append(found)
        return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@asynccontextmanager
async def server() -> AsyncIterator[tuple[Day, System]]:
    options = Options(model="smollm2", memory=WORKSPACE + ROOM, context=2048, store="")
    async with (
        System.open(options, machine=Small()) as system,
        running(system) as server,
        httpx.AsyncClient(base_url=server.url, timeout=240) as client,
    ):
        yield Day(client), system


async def test_a_long_session_its_spawns_and_mixed_traffic_all_finish() -> None:
    async with server() as (day, system):
        long = [{"role": "system", "content": "Be brief."}, user(WORDS * 24)]
        first = await day.ask(long)
        long += [first["choices"][0]["message"], user("Go on.")]
        await day.ask(long)

        async with trio.open_nursery() as nursery:
            for errand in ("Sum it up.", "Name one word.", "Disagree."):
                nursery.start_soon(day.ask, [*long[:-1], user(errand)])
            for size in (1, 18, 5, 9, 2, 14):
                nursery.start_soon(day.ask, [user(f"{size} " + WORDS * size)])
            nursery.start_soon(lambda: day.ask([user("Stream, please.")], n=2, max_tokens=4))
        # The long session goes on while new shapes keep coming.
        for size in (6, 3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(day.ask, [*long, user(f"And {size}?")])
                nursery.start_soon(day.ask, [user(f"new {size} " + WORDS * size)])
        assert day.failures == []
        assert len(day.replies) == 2 + 3 + 6 + 1 + 4
        assert sum(r["usage"]["prompt_tokens_details"]["cached_tokens"] > 380 for r in day.replies) >= 2
        health = (await day.client.get("/health")).json()
        assert health["status"] == "ok"
        bank = (await system.metrics())["bank"]
        assert bank["turns"] == 0
        assert bank["bytes_used"] <= bank["bytes_budget"]
