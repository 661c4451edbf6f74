"""A device that fails: in a prompt, in a reply, in the sampling of one of several, in a save. Who asks again is served.

What failed is over with an error that says so; rows that were right stay; nothing of the failed round is ever read.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from onecopy.actors import keeping, rows_door, stager
from onecopy.runtime import engine
from tokenizers import pre_tokenizers

from tests.support.children import CLI, child, stopped
from tests.support.http import events
from tests.support.system import CHAT, Reply, Whole, body, eventually, gather, serving, system_text, user

BLOCK = 256
TEXT = "".join(random.Random(12).choices("abcdefghijklmnopqrstuvwxyz ,.", k=8 * BLOCK))

TILDE = sorted(pre_tokenizers.ByteLevel.alphabet()).index("~")


class DeviceFault(RuntimeError):
    """What a device raises that fails."""


def about(blocks: float, topic: int = 0, **more: Any) -> dict[str, Any]:
    return body(system_text(f"{topic} {TEXT[: int(blocks * BLOCK)]}"), user("go on"), **more)


def fails_once(whole: Whole, when: Callable[[Any, Any], bool], *, after: bool) -> list[int]:
    """Makes the first round that `when(strips, wants)` is true of fail, before or after it did its work."""
    run, left = whole.system._engine.run, [1]

    def failing(strips: Any, wants: Any = ()) -> Any:
        hit = left[0] and when(strips, wants)
        if hit:
            left[0] = 0
        if hit and not after:
            raise DeviceFault("the device is gone")
        out = run(strips, wants)
        if hit:
            raise DeviceFault("the device went late")
        return out

    whole.system._engine.run = failing  # type: ignore[method-assign]
    return left


async def failed(whole: Whole, wanted: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The error that a request ends with."""
    answer = await whole.http.post(CHAT, json={**wanted, "stream": stream})
    if not stream:
        assert answer.status_code == 503
        return dict(answer.json()["error"])
    *chunks, last = events(answer.content)
    assert not any(c["choices"][0]["finish_reason"] for c in chunks if c.get("choices"))
    return dict(last["error"])


async def sound(whole: Whole) -> None:
    """The books add up, buffers are what they say, and nothing is left running."""
    numbers = await whole.at_rest()
    bank: Any = whole.system._supervisor.actor("bank")
    assert bank._ledger.audit() == []
    pool = whole.system._engine.pool
    assert sum(a.nbytes for s in pool.segments.values() for a in s.flat()) == numbers["bank"]["bytes_used"]
    assert (await whole.system.health()).status == "ok"


async def asked_again(whole: Whole, wanted: dict[str, Any]) -> Reply:
    reply = await whole.ask(wanted)
    assert reply.said == (await whole.cold(wanted)).said
    return reply


def fills(strips: Any, wants: Any) -> bool:
    """A chunk of a long prompt that has come past its first block."""
    return any(len(s.tokens) > 16 and s.position >= BLOCK for s in strips)


def replies(strips: Any, wants: Any) -> bool:
    """A round of a reply that has a few tokens already."""
    return bool(wants) and all(len(s.tokens) <= 8 for s in strips) and any(w.position > 300 for w in wants)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [False, True])
async def test_a_prompt_whose_chunk_fails_is_an_error_that_says_retry_and_the_rows_before_it_stay(
    tiny: Path, after: bool, stream: bool
) -> None:
    async with serving(tiny) as whole:
        left = fails_once(whole, fills, after=after)
        error = await failed(whole, about(5.5), stream)
        assert (left, error["code"]) == ([0], "lane_crashed")
        reply = await asked_again(whole, about(5.5))
        assert reply.cached >= BLOCK
        await sound(whole)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [False, True])
async def test_a_reply_whose_round_fails_ends_with_an_error_and_its_conversation_goes_on(
    tiny: Path, after: bool, stream: bool
) -> None:
    async with serving(tiny) as whole:
        first = await whole.ask(about(0.5))
        left = fails_once(whole, replies, after=after)
        error = await failed(whole, about(1.1, max_tokens=60), stream)
        assert (left, error["code"]) == ([0], "lane_crashed")
        await asked_again(whole, about(1.1, max_tokens=60))
        assert (await whole.ask(about(0.5))).said == first.said
        await sound(whole)


async def test_the_sampling_of_one_of_several_fails_and_all_of_them_may_try_again(tiny: Path) -> None:
    """One round computes all of them, so one that fails is everybody's; nobody's rows are lost or mixed."""
    wanted = [about(1.2, i, seed=40 + i, temperature=0.9, max_tokens=80) for i in range(4)]
    right, left = engine.pick, [1]

    def picking(logits: Any, wants: Any) -> Any:
        if left[0] and len({w.sampling.seed for w in wants}) > 1 and any(w.sampling.seed == 42 for w in wants):
            left[0] = 0
            raise DeviceFault("no number for seed 42")
        return right(logits, wants)

    async with serving(tiny) as whole:
        cold = [await whole.cold(w) for w in wanted]
        with mock.patch.object(engine, "pick", picking):
            answers = await gather([lambda w=w: whole.post(w) for w in wanted])  # type: ignore[misc]
        assert left == [0]
        for answer, w, c in zip(answers, wanted, cold, strict=True):
            assert answer.status_code in (200, 503)
            again = answer if answer.status_code == 200 else await whole.post(w)
            assert Reply.of(again.json()).said == c.said
        assert [a.status_code for a in answers].count(503) >= 1
        await sound(whole)


def raises_once(right: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    left = [1]

    def failing(*args: Any) -> Any:
        if left[0]:
            left[0] = 0
            raise DeviceFault("the device is gone")
        return right(*args)

    return failing, left


async def test_a_save_whose_read_fails_costs_no_answer_and_is_made_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stager, "BACKOFF", (0.01, 0.02))
    monkeypatch.setattr(keeping, "RETRY", 0.05)
    failing, left = raises_once(rows_door.read_rows)
    store = str(tmp_path / "store")
    with mock.patch.object(rows_door, "read_rows", failing):
        async with serving(tiny, store=store) as whole:
            first = await whole.ask(about(3.5))

            async def tried() -> bool:
                return left == [0]

            await eventually(tried)
            again = await asked_again(whole, about(3.5))
            assert again.said == first.said
    assert "crashed" not in caplog.text
    async with serving(tiny, store=store) as whole:
        restored = await whole.ask(about(3.5))
        assert restored.said == first.said
        assert restored.cached >= 3 * BLOCK


async def test_a_restore_that_the_device_refuses_is_computed_instead_and_the_next_one_is_read(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = str(tmp_path / "store")
    async with serving(tiny, store=store) as whole:
        first = await whole.ask(about(3.5))
    with mock.patch.object(rows_door, "row_slots", side_effect=DeviceFault("the device is gone")) as refusing:
        async with serving(tiny, store=store) as whole:
            computed = await whole.ask(about(3.5))
            assert (refusing.called, computed.said, computed.cached) == (True, first.said, 0)
            await sound(whole)
    assert "crashed" not in caplog.text
    async with serving(tiny, store=store) as whole:
        restored = await whole.ask(about(3.5))
        assert restored.said == first.said
        assert restored.cached >= 3 * BLOCK


FAILS_AT_TILDES = f"""
from onecopy.runtime.engine import Engine
run = Engine.run
def failing(self, strips, wants=()):
    if any(s.tokens.count({TILDE}) > 3 for s in strips):
        raise RuntimeError("the device is gone")
    return run(self, strips, wants)
Engine.run = failing
{CLI}
"""


@pytest.mark.slow
async def test_a_second_fault_within_a_minute_ends_the_process_with_what_it_kept(tiny: Path, tmp_path: Path) -> None:
    store, bad = str(tmp_path / "store"), body(user("~~~~~ and this is no prompt for this device"))
    async with child(tiny, store, cli=FAILS_AT_TILDES) as server:
        first = await server.ask(about(3.5))
        answer = await server.http.post(CHAT, json=bad)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "lane_crashed")
        assert (await server.ask(about(3.5))).said == first.said
        with contextlib.suppress(httpx.HTTPError):  # it may hear of the end of the process in either way
            assert (await server.http.post(CHAT, json=bad)).status_code == 503
        assert await server.ended() == 1
    async with child(tiny, store) as server:
        again = await server.ask(about(3.5))
        assert (again.said, again.cached >= 3 * BLOCK) == (first.said, True)
        await stopped(server)
