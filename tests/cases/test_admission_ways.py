"""Every way a turn gets its rows, over HTTP: the way and its price are in the response, and both are in the metrics."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from onecopy.actors import bank as bank_module
from onecopy.actors.messages.bank import Fork
from onecopy.runtime.engine import Engine

from tests.support.batches import beside_admission
from tests.support.qwen4_tiny import write_served
from tests.support.system import CHAT, Reply, Whole, body, eventually, serving, system_text, user

BLOCK = 256
BLOCK_BYTES = BLOCK * 512
BUCKET = 4 * BLOCK
TEXT = "".join(random.Random(3).choices("abcdefghijklmnopqrstuvwxyz ,.", k=4 * BLOCK))


@asynccontextmanager
async def fixed(tiny: Path, slack: float = 60.0, **options: Any) -> AsyncIterator[Whole]:
    """A server whose compiled verify wants buckets of four blocks. slack: seconds before unused blocks go back."""
    patched = mock.patch.object(Engine, "fixed_rows", BUCKET), mock.patch.object(bank_module, "IDLE_SLACK", slack)
    with patched[0], patched[1]:
        async with serving(tiny, **options) as whole:
            yield whole


async def metric(whole: Whole, name: str) -> float:
    lines = (await whole.http.get("/metrics")).text.splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


async def met(whole: Whole, wanted: dict[str, Any], how: str, price: int | None = None) -> Reply:
    """The reply to a request that is met in that way, at that price; it is the cold one's."""
    before = [await metric(whole, f"onecopy_bank_{what}_{how}") for what in ("admitted", "priced")]
    reply = await whole.ask(wanted)
    seen = reply.onecopy
    assert (seen["how"], seen["price_bytes"]) == (how, seen["price_bytes"] if price is None else price)
    assert seen["peak_bytes"] >= seen["price_bytes"]
    after = [await metric(whole, f"onecopy_bank_{what}_{how}") for what in ("admitted", "priced")]
    assert [a - b for a, b in zip(after, before, strict=True)] == [1, seen["price_bytes"]]
    assert reply.said == (await whole.cold(wanted)).said
    return reply


def talk(first: Reply, *start: dict[str, Any], said: str | None = None) -> list[dict[str, Any]]:
    """A conversation that goes on behind a reply, or behind what a client says the reply was."""
    return [*start, {"role": "assistant", "content": first.text if said is None else said}, user("go on")]


async def test_fresh_adopted_extended_and_forked(tiny: Path) -> None:
    async with serving(tiny) as whole:
        start = [system_text(TEXT[:600]), user("one")]
        first = await met(whole, body(*start), "fresh", 3 * BLOCK_BYTES)
        second = talk(first, *start)
        answered = await met(whole, body(*second), "adopted", 0)
        await met(whole, body(*start[:1], user("two")), "forked", BLOCK_BYTES)
        longer = [*second, {"role": "assistant", "content": answered.text}, user(TEXT[:500])]
        reply = await met(whole, body(*longer), "extended")
        assert reply.onecopy["bytes_copied"] == 0
        assert reply.onecopy["price_bytes"] >= 2 * BLOCK_BYTES


async def test_an_answer_header_names_the_way_too(tiny: Path) -> None:
    async with serving(tiny) as whole:
        answer = await whole.post(body(user("one")))
        assert answer.headers["x-onecopy-how"] == answer.json()["onecopy"]["how"] == "fresh"
        assert answer.headers["x-onecopy-price-bytes"] == str(answer.json()["onecopy"]["price_bytes"])


async def test_with_buffers_of_a_fixed_size_every_reply_is_the_same_and_whole_buckets_are_paid_for(tiny: Path) -> None:
    async with fixed(tiny) as whole:
        start = [system_text(TEXT[:300]), user("one")]
        first = await met(whole, body(*start), "fresh", 4 * BLOCK_BYTES)
        await met(whole, body(*talk(first, *start)), "adopted", 0)
        await met(whole, body(*start[:1], user("two")), "forked", 4 * BLOCK_BYTES)


async def test_resized_after_unused_blocks_were_given_back(tiny: Path) -> None:
    async with fixed(tiny, slack=0.05) as whole:
        start = [system_text(TEXT[:300]), user("one")]
        first = await whole.ask(body(*start))

        async def trimmed() -> bool:
            return bool((await whole.numbers())["bank"]["bytes_used"] == 2 * BLOCK_BYTES)

        await eventually(trimmed)
        reply = await met(whole, body(*talk(first, *start)), "resized", 2 * BLOCK_BYTES)
        assert reply.cached == first.prompt + len(first.tokens) - 1
        assert set(reply.onecopy["copied"]) == {"resize"}
        assert reply.onecopy["peak_bytes"] <= 2 * BLOCK_BYTES + 4 * BLOCK_BYTES // 2 + 64


async def test_copied_when_rows_that_a_child_holds_would_be_cut(tiny: Path) -> None:
    async with fixed(tiny) as whole:
        start = [system_text(TEXT[:100]), user("one")]
        first = await whole.ask(body(*start, max_tokens=300))
        (kept,) = await whole.system.sessions()
        child = (await whole.http.post(f"/v1/sessions/{kept.id}/fork")).json()
        edited = talk(first, *start, said=first.text[:40] + "#")
        reply = await met(whole, body(*edited), "copied", 4 * BLOCK_BYTES)
        assert reply.cached == reply.onecopy["diverged_at"]
        assert reply.onecopy["copied"] == {"copy": 512 * reply.cached}
        assert reply.onecopy["session"] == kept.id
        again = await whole.ask(body(*talk(first, *start)))
        assert again.cached == first.prompt + len(first.tokens) - 1
        assert again.onecopy["session"] == child["id"]
        assert again.said == (await whole.cold(body(*talk(first, *start)))).said


@pytest.mark.parametrize(("first", "how"), [(True, "copied"), (False, "eager")])
async def test_a_hold_around_the_admission_is_served_in_either_order_and_is_never_an_error(
    tiny: Path, first: bool, how: str
) -> None:
    """A child takes the rows that the turn's resize would cut: before it is admitted, or before the resize is made."""
    async with fixed(tiny, slack=0.05) as whole:
        start = [system_text(TEXT[:100]), user("one")]
        answered = await whole.ask(body(*start, max_tokens=300))

        async def trimmed() -> bool:
            return bool((await whole.numbers())["bank"]["bytes_used"] == 2 * BLOCK_BYTES)

        await eventually(trimmed)
        (kept,) = await whole.system.sessions()
        child = beside_admission(whole.system, Fork(kept.id, None, "child"), first=first)
        edited = body(*talk(answered, *start, said=answered.text[:40] + "#"))
        reply = await whole.ask(edited)
        assert reply.onecopy["how"] == how
        assert reply.said == (await whole.cold(edited)).said
        assert (await child.wait()).tokens == answered.prompt + 299
        on = body(*talk(answered, *start))
        again = await whole.ask(on)
        assert again.cached == answered.prompt + 299
        assert again.said == (await whole.cold(on)).said


async def test_eager_when_whole_buckets_cannot_be_afforded(tiny: Path) -> None:
    async with fixed(tiny, rows=3 * BLOCK_BYTES) as whole:
        wanted = body(user(TEXT[:300]))
        reply = await whole.ask(wanted)
        assert (reply.onecopy["how"], reply.onecopy["price_bytes"]) == ("eager", 2 * BLOCK_BYTES)
        assert await metric(whole, "onecopy_bank_admitted_eager") == 1
    async with serving(tiny) as plain:
        assert reply.said == (await plain.ask(wanted)).said


async def test_restored_from_disk_and_counted_as_that(tiny: Path, tmp_path: Path) -> None:
    store, start = str(tmp_path / "store"), [system_text(TEXT), user("one")]
    async with serving(tiny, store=store) as before:
        await before.ask(body(*start))
    async with serving(tiny, store=store) as whole:
        reply = await met(whole, body(*start), "restored", 5 * BLOCK_BYTES)
        assert reply.onecopy["rows_restored"] >= 4 * BLOCK


@pytest.mark.parametrize("stream", [False, True])
async def test_queued_turns_are_counted_and_are_no_refusals(tiny: Path, stream: bool) -> None:
    async with serving(tiny, rows=8 * BLOCK_BYTES) as whole:
        asked = [body(user(f"{i} {TEXT}"), max_tokens=40) for i in range(3)]
        replies = await whole.together(asked, stream=[stream] * 3)
        assert [len(r.tokens) for r in replies] == [40] * 3
        assert await metric(whole, "onecopy_bank_waited") == 2
        assert await metric(whole, "onecopy_bank_refused") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_with_the_numbers_before_any_byte_of_a_reply(tiny: Path, stream: bool) -> None:
    async with serving(tiny, rows=2 * BLOCK_BYTES) as whole:
        answer = await whole.http.post(CHAT, json=body(user(TEXT), stream=stream))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "insufficient_memory")
        assert f"{5 * BLOCK_BYTES} bytes" in error["message"]
        assert f"{2 * BLOCK_BYTES} are available" in error["message"]
        assert f"{2 * BLOCK - 1} tokens" in error["message"]
        assert int(answer.headers["retry-after"]) > 0
        assert await metric(whole, "onecopy_bank_refused") == 1
        assert await metric(whole, "onecopy_bank_bytes_used") == 0


async def test_a_model_with_pooled_keys_is_resized_in_place_saved_and_restored(tmp_path: Path) -> None:
    """QSA layers and recurrent ones: rows, pooled entries and states go along, and nobody reads more than there is."""
    model, store = write_served(tmp_path / "model"), str(tmp_path / "store")
    start = [system_text(TEXT[:300]), user("one")]
    async with fixed(model, slack=0.05, store=store) as whole:
        first = await whole.ask(body(*start))

        async def trimmed() -> bool:
            return bool((await whole.numbers())["bank"]["trimmed"])

        await eventually(trimmed)
        second = body(*talk(first, *start))
        reply = await whole.ask(second)
        assert reply.onecopy["how"] == "resized"
        assert reply.cached == first.prompt + len(first.tokens) - 1
        assert reply.said == (await whole.cold(second)).said
        third = body(*talk(reply, *second["messages"]))
        after = await whole.ask(third)
        assert after.said == (await whole.cold(third)).said
    async with fixed(model, store=store) as whole:
        again = await whole.ask(third)
        assert again.onecopy["rows_restored"] > 0
        assert again.said == after.said


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_nobody_has_memory_for_ends_with_length_and_says_why(tiny: Path, stream: bool) -> None:
    async with serving(tiny, rows=3 * BLOCK_BYTES) as whole, serving(tiny) as roomy:
        wanted = body(user(TEXT[:300]), max_tokens=900)
        reply = await (whole.streamed if stream else whole.ask)(wanted)
        assert (reply.finish, reply.onecopy["detail"]) == ("length", "no memory for more rows")
        right = await roomy.ask(wanted)
        assert 400 < len(reply.tokens) < 900
        assert reply.tokens == right.tokens[: len(reply.tokens)]
        again = await whole.ask(body(user(TEXT[:300])))
        assert again.tokens == right.tokens[:16]
