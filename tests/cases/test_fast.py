"""Fast arithmetic in a running server: off by default, said wherever exactness is told, and its rows kept apart."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from onecopy.actors.service import Options
from onecopy.api import Runtime, aio, sync
from onecopy.api.runtime import OpenOptions

from tests.support.system import Whole, body, serving, system_text, user, write_tiny

BLOCK = 256
CHOSEN = "chosen by --fast"
TEXT = "A conversation that fills some blocks of rows. " * 16
OPEN: OpenOptions = {"fast": True, "context": 4096, "memory": 8 << 30, "store": ""}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def about() -> dict[str, Any]:
    """A request whose prompt has two whole blocks and more."""
    return body(system_text(TEXT[: 2 * BLOCK + 100]), user("go on"))


async def health(whole: Whole) -> dict[str, Any]:
    found: dict[str, Any] = (await whole.http.get("/health")).json()
    return found


def test_arithmetic_is_exact_unless_asked_otherwise() -> None:
    assert Options().fast is False


async def test_health_says_not_exact_and_why_and_that_all_is_well(tiny: Path) -> None:
    async with serving(tiny, fast=True) as whole:
        found = await health(whole)
    assert (found["status"], found["reasons"], found["exact"]) == ("ok", [], "not exact")
    assert found["details"]["exactness"] == "not exact"
    assert CHOSEN in found["details"]["reasons"]


async def test_the_model_and_every_reply_say_not_exact(tiny: Path) -> None:
    async with serving(tiny, fast=True) as whole:
        (model,) = (await whole.http.get("/v1/models")).json()["data"]
        whole_reply, streamed = await whole.ask(about()), await whole.streamed(about())
    assert model["exact"] == whole_reply.onecopy["exact"] == streamed.onecopy["exact"] == "not exact"
    assert CHOSEN in model["features"]["exactness_reasons"]


@pytest.mark.parametrize(("fast", "said"), [(True, f"not exact: {CHOSEN}"), (False, "is exact")])
async def test_the_start_log_says_which_arithmetic_it_is(
    tiny: Path, fast: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "onecopy.system"):
        async with serving(tiny, fast=fast):
            pass
    (line,) = [m for m in caplog.messages if "exact" in m]
    assert said in line


async def test_a_fast_server_answers_as_an_exact_one_but_for_rounding(tiny: Path) -> None:
    first = {}
    for fast in (False, True):
        async with serving(tiny, fast=fast) as whole:
            reply = await whole.ask(about())
            assert len(reply.tokens) == 16
            first[fast] = reply.logprobs[0]
    assert first[True] == pytest.approx(first[False], abs=1e-2)


@pytest.mark.parametrize("order", [(False, True), (True, False)])
async def test_rows_on_disk_of_the_other_arithmetic_are_never_used(
    tiny: Path, tmp_path: Path, order: tuple[bool, bool]
) -> None:
    store = str(tmp_path / "store")
    for fast in order:
        async with serving(tiny, store=store, fast=fast) as whole:
            first = await whole.ask(about())
            assert first.cached == first.onecopy["rows_restored"] == 0
    for fast in order:
        async with serving(tiny, store=store, fast=fast) as whole:
            assert (await whole.ask(about())).onecopy["rows_restored"] >= 2 * BLOCK


@pytest.mark.parametrize("fast", [False, True])
async def test_a_session_moves_to_a_server_of_the_same_arithmetic_only(tiny: Path, tmp_path: Path, fast: bool) -> None:
    async with serving(tiny, store=str(tmp_path / "a"), fast=fast) as whole:
        first = await whole.ask(about())
        image = await whole.system.export(first.onecopy["session"])
    async with serving(tiny, store=str(tmp_path / "b"), fast=fast) as whole:
        await whole.system.import_(image)
        assert (await whole.ask(about())).onecopy["rows_restored"] >= BLOCK
    async with serving(tiny, store=str(tmp_path / "c"), fast=not fast) as whole:
        assert (await whole.http.post("/v1/sessions/import", content=image)).status_code == 400
        assert (await whole.ask(about())).cached == 0


async def test_quantized_rows_of_the_two_arithmetics_are_kept_apart_too(tmp_path: Path) -> None:
    wide, store = write_tiny(tmp_path / "wide", head_dim=64), str(tmp_path / "store")
    for fast in (False, True):
        async with serving(wide, store=store, kv_bits=8, fast=fast) as whole:
            reply = await whole.ask(about())
            assert reply.cached == reply.onecopy["rows_restored"] == 0
            assert (CHOSEN in (await health(whole))["details"]["reasons"]) is fast


async def test_programs_under_trio_choose_it_and_see_it(tiny: Path) -> None:
    async with Runtime.open(str(tiny), **OPEN) as runtime:
        answer = await runtime.conversation().send("hi", max_tokens=4)
        status = await runtime.status()
    assert (status.exactness, answer.receipt.exact) == ("not exact", "not exact")
    assert CHOSEN in status.health.details["reasons"]


def test_programs_under_asyncio_choose_it_and_see_it(tiny: Path) -> None:
    async def seen() -> tuple[Any, Any]:
        async with aio.Runtime.open(str(tiny), **OPEN) as runtime:
            return await runtime.conversation().send("hi", max_tokens=4), await runtime.status()

    answer, status = asyncio.run(seen())
    assert (status.exactness, answer.receipt.exact) == ("not exact", "not exact")
    assert CHOSEN in status.health.details["reasons"]


def test_programs_without_a_loop_choose_it_and_see_it(tiny: Path) -> None:
    with sync.Runtime.open(str(tiny), **OPEN) as runtime:
        answer, status = runtime.conversation().send("hi", max_tokens=4).answer(), runtime.status()
    assert (status.exactness, answer.receipt.exact) == ("not exact", "not exact")
    assert CHOSEN in status.health.details["reasons"]
