"""Cases C: clients that leave, and many that stay at once."""

from __future__ import annotations

import gc
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trio
from onecopy.actors.outbox import Outbox
from onecopy.actors.running import Running
from onecopy.actors.session import Session

from tests.support.system import Whole, body, eventually, gather, serving, system_text, user

LETTERS = "abcdefghijklmnopqrstuvwxyz ,."
LONG = "".join(random.Random(3).choices(LETTERS, k=5_000))
S = system_text(LONG[:1100])
WATCHDOG = 30.0
"""Seconds no request may exceed, whatever else runs."""
TURNS = 200 if os.environ.get("ONECOPY_FULL") else 12
"""Turns of each of six clients that share room for two conversations; 200 with `ONECOPY_FULL`, about a minute."""


@pytest.fixture
async def whole(tiny: Path) -> AsyncIterator[Whole]:
    async with serving(tiny) as made:
        yield made


async def close(client: trio.SocketStream) -> None:
    await client.aclose()


async def reset(client: trio.SocketStream) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await client.aclose()


async def half_close(client: trio.SocketStream) -> None:
    await client.send_eof()


WAYS: dict[str, Callable[[trio.SocketStream], Awaitable[None]]] = {
    "close": close,
    "reset": reset,
    "half-close": half_close,
}


async def prefilled(whole: Whole) -> int:
    return int((await whole.numbers())["lane"]["prefilled"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_c4_a_client_that_leaves_in_a_prefill_stops_it_and_each_retry_starts_further_on(
    whole: Whole, way: str, stream: bool
) -> None:
    wanted = body(user(LONG), stream=stream)
    reached = 0
    for _ in range(2):
        client = await whole.connect(wanted)

        async def under_way(past: int = reached) -> bool:
            return await prefilled(whole) > past

        await eventually(under_way)
        await WAYS[way](client)
        probe = await whole.ask(body(user("hello"), max_tokens=5))
        assert len(probe.tokens) == 5
        await whole.at_rest()
        await client.aclose()
        now = await prefilled(whole)
        assert reached < now < len(LONG)
        reached = now
    last = await whole.ask(body(user(LONG)))
    assert last.cached >= reached - 2 * 50
    assert last.said == (await whole.cold(body(user(LONG)))).said


async def test_c4_a_client_that_reads_nothing_holds_up_nobody_and_ends_when_it_leaves(whole: Whole) -> None:
    client = await whole.connect(body(user("speak"), max_tokens=60_000, stream=True))
    for i in range(3):
        reply = await whole.ask(body(user(f"question {i}")))
        assert reply.said == (await whole.cold(body(user(f"question {i}")))).said
    await client.aclose()
    numbers = await whole.at_rest()
    assert numbers["lane"]["tokens"] < 60_000


async def test_c5_two_warm_streams_on_one_prefix_both_end(whole: Whole) -> None:
    await whole.ask(body(S, user("prime")))
    with trio.fail_after(WATCHDOG):
        replies = await gather(
            [
                lambda: whole.streamed(body(S, user("prime"), max_tokens=80)),
                lambda: whole.streamed(body(S, user("prime"), max_tokens=3, temperature=0.9, seed=5)),
                lambda: whole.streamed(body(S, user("prime and more"), max_tokens=30)),
            ]
        )
    assert [len(r.tokens) for r in replies] == [80, 3, 30]
    assert replies[0].said == (await whole.cold(body(S, user("prime"), max_tokens=80))).said


@pytest.mark.slow
async def test_c5_room_for_two_conversations_and_six_clients_of_three_never_stand_still(tiny: Path) -> None:
    async with serving(tiny, rows=14 * 256 * 512) as whole:

        async def client(talk: int, who: int) -> int:
            served = 0
            for turn in range(TURNS):
                wanted = body(system_text(f"{talk} {LONG[:1100]}"), user(f"turn {turn // 2}"), max_tokens=4 + who)
                with trio.fail_after(WATCHDOG):
                    reply = await (whole.streamed if turn % 2 else whole.ask)(wanted)
                assert len(reply.tokens) == 4 + who
                served += 1
            return served

        served = await gather([lambda t=t, w=w: client(t, w) for t in range(3) for w in range(2)])  # type: ignore[misc]
        numbers = await whole.at_rest()
    assert served == [TURNS] * 6
    assert numbers["bank"]["bytes_used"] <= numbers["bank"]["bytes_budget"]
    assert numbers["bank"]["dropped"] > 0


async def test_two_hundred_streams_dropped_at_random_moments_leave_nothing_behind(whole: Whole) -> None:
    draw, elsewhere = random.Random(200), objects()
    await drop_streams(whole, draw, 40)
    await whole.drop_all()
    before = (await whole.at_rest())["bank"]["bytes_used"], objects()
    await drop_streams(whole, draw, 160)
    numbers = await whole.at_rest()
    assert numbers["bank"]["turns"] == numbers["lane"]["running"] == 0
    reply = await whole.ask(body(S, user("still there?")))
    assert reply.said == (await whole.cold(body(S, user("still there?")))).said
    await whole.drop_all()
    after = (await whole.at_rest())["bank"]["bytes_used"], objects()
    assert after == before
    assert before[0] == 0
    assert before[1] <= elsewhere


async def drop_streams(whole: Whole, draw: random.Random, n: int) -> None:
    """`n` streams, ten at a time, each left after a random number of pieces."""
    for start in range(0, n, 10):
        asked = [body(S, user(LONG[: draw.randrange(1, 2500)]), max_tokens=60) for _ in range(10)]
        after = [draw.randrange(12) for _ in asked]
        await gather([lambda w=w, a=a: whole.leave(w, a) for w, a in zip(asked, after, strict=True)])  # type: ignore[misc]
        assert start < n


def objects() -> int:
    """Live objects of which every request makes one."""
    gc.collect()
    return sum(isinstance(found, (Session, Outbox, Running)) for found in gc.get_objects())
