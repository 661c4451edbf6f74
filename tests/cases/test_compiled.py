"""Compiled verify in a whole server: as eager, reported, and given up where the bank cannot give its buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from onecopy.runtime.compiled import BUCKET
from onecopy.runtime.engine import Engine

from tests.support.elsewhere import compiler, elsewhere
from tests.support.knowing import cheap_rounds, knowing
from tests.support.system import Reply, Whole, body, serving, user

ROW_BYTES = 512
COUNTER = "onecopy_compiled_rounds_total"

pytestmark = compiler


@pytest.fixture(scope="module", autouse=True)
def _elsewhere() -> Iterator[None]:
    with elsewhere():
        yield


async def drafted(whole: Whole, wanted: dict[str, Any]) -> tuple[Reply, Reply]:
    """A drafted reply and its cold one without drafts; neither is known to the bank before."""
    plain = await whole.cold({**wanted, "draft": False})
    prompt = (await whole.http.post("/tokenize", json={"messages": wanted["messages"]})).json()["tokens"]
    with knowing({tuple(prompt): plain.tokens}):
        return await whole.ask(wanted), plain


async def compiled(whole: Whole) -> float:
    lines = (await whole.http.get("/metrics")).text.splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(COUNTER)), 0.0)


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_a_drafted_reply_is_compiled_and_says_what_an_undrafted_one_says(tiny: Path, temperature: float) -> None:
    with cheap_rounds():
        async with serving(tiny) as whole:
            assert whole.system.card.exactness == "exact"
            wanted = body(user("tell me"), max_tokens=40, temperature=temperature, seed=5)
            before = await compiled(whole)
            reply, plain = await drafted(whole, wanted)
            assert reply.said == plain.said
            seen = reply.onecopy
            assert seen["accepted"] > 0
            assert seen["compiled"] == seen["rounds"] > 0
            assert await compiled(whole) - before >= seen["rounds"]


async def test_eight_side_by_side_run_eagerly_and_say_what_each_says_alone(tiny: Path) -> None:
    with cheap_rounds():
        async with serving(tiny) as whole:
            asked = [body(user(f"client {i}"), max_tokens=24) for i in range(8)]
            alone = [await whole.cold({**wanted, "draft": False}) for wanted in asked]
            replies = await whole.together(asked)
    assert [r.said for r in replies] == [r.said for r in alone]
    assert sum(r.onecopy["compiled"] for r in replies) < sum(r.onecopy["rounds"] for r in replies)


async def test_a_bank_without_room_for_whole_buckets_verifies_eagerly_with_the_same_reply(tiny: Path) -> None:
    with cheap_rounds():
        async with serving(tiny, rows=(BUCKET - 256) * ROW_BYTES) as whole:
            wanted = body(user("tell me"), max_tokens=40)
            reply, plain = await drafted(whole, wanted)
    assert reply.said == plain.said
    assert reply.onecopy["accepted"] > 0
    assert (reply.onecopy["how"], reply.onecopy["compiled"]) == ("eager", 0)


async def test_a_server_whose_rounds_are_not_compiled_says_why(tiny: Path) -> None:
    async with serving(tiny) as whole:
        assert await features(whole) is True
    with mock.patch.object(Engine, "_compile", _not):
        async with serving(tiny) as whole:
            assert await features(whole) == "no graphs today"
            wanted = body(user("tell me"), max_tokens=8)
            assert (await whole.ask(wanted)).onecopy["compiled"] == 0


def _not(engine: Engine, _: Any) -> None:
    engine.eager = "no graphs today"


async def features(whole: Whole) -> object:
    (model,) = (await whole.http.get("/v1/models")).json()["data"]
    return model["features"]["compiled_rounds"]
