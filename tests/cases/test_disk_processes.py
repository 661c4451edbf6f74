"""Cases D6, D7, D12 and kills, with real server processes on one directory."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from onecopy.runtime.seams import RealClock, RealDisk
from onecopy.runtime.store import KEY_BYTES, RowsOnDisk

from tests.support.children import Child, child, stopped
from tests.support.system import CHAT, Reply, body, gather, grown, system_text, user, write_tiny

BLOCK = 256
TEXT = "".join(random.Random(6).choices("abcdefghijklmnopqrstuvwxyz ,.", k=20 * BLOCK))
KILLS = int(os.environ.get("ONECOPY_KILLS", "15"))
"""How often the server is killed; a long run sets it to 50."""

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def about(blocks: float, seed: int = 0) -> list[dict[str, Any]]:
    return [system_text(f"{seed} {TEXT[: int(blocks * BLOCK)]}"), user("go on")]


async def same_as_cold(server: Child, wanted: dict[str, Any]) -> Reply:
    reply = await server.ask(wanted)
    assert reply.said == (await server.cold(wanted)).said
    return reply


def verified(store: str) -> int:
    """Records of a store that nobody has open; all of them are good."""
    opened = RowsOnDisk.open(RealDisk(), store, fingerprint=bytes(KEY_BYTES), wall=RealClock().wall, read_only=True)
    found = opened.verify()
    assert (found.bad, found.skipped, found.unread) == (0, 0, 0)
    return found.good


async def test_d12_after_a_stop_and_a_start_both_conversations_go_on_from_disk(tiny: Path, store: str) -> None:
    a, b = about(1.5, 1), about(1.2, 2)
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    async with child(tiny, store) as server:
        for turn in range(4):
            last_a = await server.ask(body(*a))
            a = grown(a, last_a, f"more {turn} {TEXT[:100]}")
        for turn in range(8):
            last_b = await server.ask(body(*b, tools=[tool], tool_choice="auto"))
            b = grown(b, last_b, f"and {turn} {TEXT[:60]}")
        await stopped(server)
    async with child(tiny, store) as server:
        back_b = await same_as_cold(server, body(*b, tools=[tool], tool_choice="auto"))
        back_a = await same_as_cold(server, body(*a))
    assert back_b.cached >= last_b.prompt
    assert back_a.cached >= last_a.prompt


async def test_d12_the_oldest_conversation_on_a_full_disk_is_not_evicted_by_the_request_for_it(
    tiny: Path, store: str
) -> None:
    quota = ("--store-quota", "3MiB")
    async with child(tiny, store, *quota) as server:
        oldest = await server.ask(body(*about(4, 0)))
        await stopped(server)
    async with child(tiny, store, *quota) as server:
        live = await server.ask(body(*about(6, 1)))
        again, more = await gather([lambda: server.ask(body(*about(4, 0))), lambda: server.ask(body(*about(7, 2)))])
        assert again.said == oldest.said
        assert again.onecopy["rows_restored"] >= 3 * BLOCK
        assert (await server.ask(body(*about(6, 1)))).said == live.said
        assert more.tokens


async def test_a_stop_ends_running_replies_with_an_error_event_and_keeps_their_rows(tiny: Path, store: str) -> None:
    wanted = body(*about(3.5), max_tokens=4000, stream=True)
    async with child(tiny, store) as server:
        async with server.http.stream("POST", CHAT, json=wanted) as answer:
            pieces = [piece async for piece in _signalled(server, answer)]
        assert b'"error"' in pieces[-1]
        assert await server.ended() == 0
    async with child(tiny, store) as server:
        assert (await same_as_cold(server, body(*about(3.5)))).cached >= 3 * BLOCK


async def _signalled(server: Child, answer: Any) -> Any:
    """The stream's pieces; the server is told to stop once ten have come."""
    came = 0
    async for piece in answer.aiter_raw():
        came += 1
        if came == 10:
            server.signal(signal.SIGTERM)
        yield piece


async def test_a_second_signal_ends_at_once_and_leaves_a_loadable_store(tiny: Path, store: str) -> None:
    async with child(tiny, store) as server:
        await gather([lambda i=i: server.ask(body(*about(3.5, i), max_tokens=2)) for i in range(6)])  # type: ignore[misc]
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        await server.ended()
    verified(store)
    async with child(tiny, store) as server:
        await same_as_cold(server, body(*about(3.5, 0)))


async def test_d7_another_model_and_foreign_files_leave_a_conversation_as_it_was(
    tiny: Path, store: str, tmp_path: Path
) -> None:
    other = write_tiny(tmp_path / "other", seed=9)
    async with child(tiny, store) as server:
        first = await server.ask(body(*about(3.5)))
        await stopped(server)
    (Path(store) / "rows.tmp").write_bytes(b"growing")
    (Path(store) / "photo.jpg").write_bytes(b"mine")
    async with child(other, store) as server:
        theirs = await same_as_cold(server, body(*about(3.5)))
        assert theirs.said != first.said
        (Path(store) / "rows.tmp").write_bytes(b"growing more")
        await stopped(server)
    async with child(tiny, store) as server:
        again = await same_as_cold(server, body(*about(3.5)))
        assert again.said == first.said
        assert again.cached >= 3 * BLOCK
    assert (Path(store) / "photo.jpg").read_bytes() == b"mine"
    assert (Path(store) / "rows.tmp").read_bytes() == b"growing more"


async def test_d6_two_processes_on_one_directory_never_harm_each_other(tiny: Path, store: str) -> None:
    quota = ("--store-quota", "4MiB")
    talks = [about(1.5 + i % 3, i) for i in range(10)]
    async with child(tiny, store, *quota) as one, child(tiny, store, *quota) as two:
        assert any("in use by process" in line for line in two.log)
        replies = await _both(one, two, talks)
        one.kill()
        talks = [grown(t, r, "and then?") for t, r in zip(talks, replies, strict=True)]
        async with child(tiny, store, *quota) as again:
            await _both(again, two, talks)
            await stopped(again)
    verified(store)


async def _both(one: Child, two: Child, talks: Sequence[list[dict[str, Any]]]) -> list[Reply]:
    """Each talk on both servers, side by side; their replies are the same as cold ones."""

    async def ask(talk: list[dict[str, Any]]) -> Reply:
        first, second = await gather([lambda: one.ask(body(*talk)), lambda: two.ask(body(*talk))])
        assert first.said == second.said == (await two.cold(body(*talk))).said
        return first

    return await gather([lambda t=t: ask(t) for t in talks])  # type: ignore[misc]


@pytest.mark.timeout(1800)
async def test_a_killed_server_loses_nothing_it_acknowledged_and_goes_on_as_a_cold_run(tiny: Path, store: str) -> None:
    draw = random.Random(50)
    talks = [about(0.5 + i, i) for i in range(4)]
    kept = [0] * len(talks)
    for _ in range(KILLS):
        async with child(tiny, store, "--store-quota", "1GiB") as server:
            await _talk_until_killed(server, talks, kept, draw.uniform(0.05, 2.0))
        verified(store)
    async with child(tiny, store, "--store-quota", "1GiB") as server:
        for talk, rows in zip(talks, kept, strict=True):
            reply = await same_as_cold(server, body(*talk))
            assert reply.cached >= readable(rows, reply)
    assert sum(kept) > 0


def readable(rows: int, reply: Reply) -> int:
    """Rows that `reply` must have read, of `rows` on disk: whole blocks of its prompt, whose last row is computed.

    The rows may go past the prompt: they then hold a reply that was saved and never reached the client.
    """
    return min(rows, reply.prompt - 1) // BLOCK * BLOCK


async def _talk_until_killed(server: Child, talks: list[list[dict[str, Any]]], kept: list[int], life: float) -> None:
    """All talks go on side by side, each turn checked, until the process is killed; `kept` learns what it wrote."""
    sessions: dict[str, int] = {}

    async def go_on(i: int) -> None:
        while True:
            reply = await same_as_cold(server, body(*talks[i]))
            assert reply.cached >= readable(kept[i], reply)
            sessions[reply.onecopy["session"]] = i
            talks[i] = grown(talks[i], reply, f"more {TEXT[:200]}")

    async with trio.open_nursery() as nursery:
        for i in range(len(talks)):
            nursery.start_soon(_until_gone, server, go_on, i)
        await trio.sleep(life)
        server.kill()
    for session, rows in server.acknowledged.items():
        if session in sessions:
            kept[sessions[session]] = max(kept[sessions[session]], rows)


async def _until_gone(server: Child, go_on: Any, i: int) -> None:
    """Runs until the connection breaks because the server was killed."""
    import httpx

    try:
        await go_on(i)
    except httpx.HTTPError:
        with trio.fail_after(10):
            while server.process.poll() is None:
                await trio.sleep(0.01)
