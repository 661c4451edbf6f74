"""Sessions that only the disk has: listed, continued under their name, moved, dropped; and what they cost."""

from __future__ import annotations

import gc
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from onecopy.actors.away import Away, OnDisk
from onecopy.runtime.rows.books import Books
from onecopy.runtime.rows.grants import Conversation
from onecopy.runtime.rows.layout import LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.segments import Segment
from safetensors.numpy import load as load_image

from tests.support.system import Reply, Whole, body, grown, serving, system_text, user, write_tiny

BLOCK = 256
TEXT = "".join(random.Random(8).choices("abcdefghijklmnopqrstuvwxyz ,.", k=8 * BLOCK))


def about(blocks: float, seed: int = 0) -> list[dict[str, Any]]:
    return [system_text(f"{seed} {TEXT[: int(blocks * BLOCK)]}"), user("go on")]


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


async def listed(whole: Whole) -> dict[str, dict[str, Any]]:
    return {s["id"]: s for s in (await whole.http.get("/v1/sessions")).json()["data"]}


async def parked(whole: Whole, blocks: float, seed: int = 0) -> Reply:
    reply = await whole.ask(body(*about(blocks, seed)))
    answer = await whole.http.post(f"/v1/sessions/{reply.onecopy['session']}/park")
    assert answer.status_code == 200, answer.text
    assert answer.json()["state"] == "parked"
    return reply


async def test_a_parked_session_takes_no_memory_for_rows_and_comes_back_under_its_name_at_its_last_row(
    tiny: Path, store: str
) -> None:
    async with serving(tiny, store=store) as whole:
        first = await parked(whole, 3.5)
        assert (await whole.at_rest())["bank"]["bytes_used"] == 0
        shown = await listed(whole)
        name = first.onecopy["session"]
        assert {k: s["state"] for k, s in shown.items()} == {name: "parked"}
        assert (await whole.http.get(f"/v1/sessions/{name}")).json()["tokens"] == shown[name]["tokens"]
        wanted = body(*grown(about(3.5), first, "and then?"))
        reply = await whole.ask(wanted)
        assert reply.onecopy["session"] == name
        assert reply.cached == shown[name]["tokens"]
        assert reply.said == (await whole.cold(wanted)).said
        assert (await listed(whole))[name]["state"] == "idle"


async def test_a_session_shorter_than_a_block_can_be_parked_too(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store) as whole:
        first = await parked(whole, 0.5)
        wanted = body(*grown(about(0.5), first, "and then?"))
        reply = await whole.ask(wanted)
        assert reply.cached == first.prompt + len(first.tokens) - 1
        assert reply.said == (await whole.cold(wanted)).said


async def test_after_a_restart_each_conversation_on_disk_is_listed_once_until_it_is_back_in_memory(
    tiny: Path, store: str
) -> None:
    async with serving(tiny, store=store) as whole:
        replies = [await whole.ask(body(*about(2.5, seed))) for seed in range(3)]
    async with serving(tiny, store=store) as whole:
        shown = await listed(whole)
        assert [s["state"] for s in shown.values()] == ["parked"] * 3
        assert all(id.startswith("d_") for id in shown)
        one = await whole.ask(body(*grown(about(2.5, 1), replies[1], "and then?")))
        shown = await listed(whole)
        assert len(shown) == 3
        assert shown[one.onecopy["session"]]["state"] == "idle"


async def test_what_is_given_up_for_others_is_listed_as_parked_under_its_name(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store, rows=12 * BLOCK * 512) as whole:
        replies = [await whole.ask(body(*about(3.5, seed))) for seed in range(4)]
        await whole.at_rest()
        shown = await listed(whole)
        assert {r.onecopy["session"] for r in replies} == shown.keys()
        assert {"parked", "idle"} == {s["state"] for s in shown.values()}


async def test_a_key_sees_its_own_conversations_on_disk_only(tiny: Path, store: str) -> None:
    mine, theirs = b"mine", b"theirs"
    async with serving(tiny, store=store) as whole:
        for salt in (mine, theirs):
            await whole.ask(body(*about(2.5), cache_salt=salt.decode()))
        salts = [s.salt for s in await whole.system.sessions()]
        assert len(set(salts)) == 2
    async with serving(tiny, store=store) as whole:
        assert await whole.system.sessions() == []
        for n, salt in enumerate(salts, 1):
            whole.system._sessions.met(salt)
            assert [s.salt for s in await whole.system.sessions()].count(salt) == 1
            assert len(await whole.system.sessions()) == n


async def test_a_session_moves_to_another_server_as_a_file_any_tool_can_open(
    tiny: Path, store: str, tmp_path: Path
) -> None:
    async with serving(tiny, store=store) as whole:
        first = await whole.ask(body(*about(2.5)))
        name = first.onecopy["session"]
        image = await whole.http.get(f"/v1/sessions/{name}/export")
        assert image.status_code == 200
        assert (await listed(whole))[name]["state"] == "idle"
    rows = first.prompt + len(first.tokens) - 1
    assert load_image(image.content)["tokens"].size == rows
    async with serving(tiny, store=str(tmp_path / "other")) as whole:
        answer = await whole.http.post("/v1/sessions/import", content=image.content)
        assert answer.status_code == 201, answer.text
        assert (answer.json()["state"], answer.json()["tokens"]) == ("parked", rows)
        assert list(await listed(whole)) == [answer.json()["id"]]
        again = await whole.http.get(f"/v1/sessions/{answer.json()['id']}/export")
        assert load_image(again.content).keys() == load_image(image.content).keys()
        wanted = body(*grown(about(2.5), first, "and then?"))
        reply = await whole.ask(wanted)
        assert reply.cached == rows
        assert reply.said == (await whole.cold(wanted)).said


async def test_what_is_no_export_of_this_model_is_refused(tiny: Path, store: str, tmp_path: Path) -> None:
    async with serving(tiny, store=store) as whole:
        first = await whole.ask(body(*about(2.5)))
        image = (await whole.http.get(f"/v1/sessions/{first.onecopy['session']}/export")).content
        for bad in (b"no image", image[: len(image) // 2]):
            assert (await whole.http.post("/v1/sessions/import", content=bad)).status_code == 400
    other = write_tiny(tmp_path / "other", seed=9)
    async with serving(other, store=store) as whole:
        assert (await whole.http.post("/v1/sessions/import", content=image)).status_code == 400
        assert (await whole.ask(body(*about(2.5)))).cached == 0


async def test_dropped_means_dropped_in_memory_and_on_disk(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store) as whole:
        await parked(whole, 2.5, 1)
        await whole.ask(body(*about(2.5, 2)))
        await whole.ask(body(*about(2.5, 3)))
    async with serving(tiny, store=store) as whole:
        await whole.ask(body(*about(2.5, 3)))
        for name in await listed(whole):
            assert (await whole.http.delete(f"/v1/sessions/{name}")).status_code == 200
        assert await listed(whole) == {}
        numbers = (await whole.numbers())["rows store"]
        assert (numbers["blocks"], numbers["anchors"]) == (0, 0)
    async with serving(tiny, store=store) as whole:
        for seed in (1, 2, 3):
            assert (await whole.ask(body(*about(2.5, seed)))).cached < BLOCK


async def test_what_needs_rows_in_memory_is_a_conflict_for_a_parked_session(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store) as whole:
        name = (await parked(whole, 2.5)).onecopy["session"]
        for what in ("pin", "fork"):
            assert (await whole.http.post(f"/v1/sessions/{name}/{what}")).status_code == 409
        assert (await whole.http.post(f"/v1/sessions/{name}/park")).json()["state"] == "parked"
        assert (await whole.http.get("/v1/sessions/d_nothing")).status_code == 404


async def test_without_a_store_nothing_can_be_parked_or_moved(tiny: Path) -> None:
    async with serving(tiny) as whole:
        name = (await whole.ask(body(*about(0.5)))).onecopy["session"]
        answers = [
            await whole.http.post(f"/v1/sessions/{name}/park"),
            await whole.http.get(f"/v1/sessions/{name}/export"),
            await whole.http.post("/v1/sessions/import", content=b"x"),
        ]
    assert [a.json()["error"]["code"] for a in answers] == ["unsupported"] * 3


def test_a_thousand_parked_conversations_cost_less_than_4_kib_each() -> None:
    books = Books(Layout((LayerLayout("attention", (RowTensor("k", 1, 4),)),)), 1 << 30, int, BLOCK, None)
    away = Away()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(1000):
            keys = tuple(random.Random(i).randbytes(32) for _ in range(16))
            tip = Segment(i, None, 0, BLOCK, books)
            away.add(Conversation(f"s_{i:024}", tip, b"", 0.0, 0.0, books.lock), OnDisk(keys, None, 16 * BLOCK))
        del keys, tip
        gc.collect()
        each = (tracemalloc.get_traced_memory()[0] - before) / 1000
    finally:
        tracemalloc.stop()
    assert len(away) == 1000
    assert each <= 1024
