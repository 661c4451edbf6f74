"""Quantized rows in a running server: off by default, measured, kept apart from other rows, and as exact as those."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from onecopy.actors.service import Options
from onecopy.api import Runtime
from onecopy.runtime import fidelity
from onecopy.runtime.errors import ModelLoadError

from tests.support.knowing import cheap_rounds, knowing
from tests.support.system import Whole, body, grown, serving, system_text, user, write_tiny

BLOCK = 256
TEXT = "".join(random.Random(12).choices("abcdefghijklmnopqrstuvwxyz ,.", k=4 * BLOCK))
FLOAT_ROW = 2 * 2 * 2 * 256
"""Two layers, keys and values of two heads, 64 values in float32."""

FIGURES = {"bits", "layers", "of", "rows", "same_token", "mean_kl", "largest_difference"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose heads are wide enough for groups of 64."""
    return write_tiny(tmp_path_factory.mktemp("wide"), head_dim=64)


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest tokens of a random model are close to each other, so 4 bits change more of them than is served."""
    monkeypatch.setattr(fidelity, "LEAST", 0.25)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def about(blocks: float, seed: int = 0) -> list[dict[str, Any]]:
    return [system_text(f"{seed} {TEXT[: int(blocks * BLOCK)]}"), user("go on")]


async def details(whole: Whole) -> dict[str, Any]:
    found: dict[str, Any] = (await whole.http.get("/health")).json()
    return dict(found["details"])


def test_rows_are_kept_as_the_model_computes_them_unless_asked_otherwise() -> None:
    assert Options().kv_bits is None


async def test_a_server_without_the_option_says_nothing_of_quantized_rows(wide: Path) -> None:
    async with serving(wide) as whole:
        assert "quantized_rows" not in await details(whole)
        assert whole.system.card.features["row_bytes"] == FLOAT_ROW


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(("bits", "row"), [(8, FLOAT_ROW * 72 // 256), (4, FLOAT_ROW * 40 // 256)])
async def test_the_figures_of_the_check_stand_in_the_log_in_health_and_beside_the_model(
    wide: Path, bits: int, row: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "onecopy"):
        async with serving(wide, kv_bits=bits) as whole:
            shown = (await details(whole))["quantized_rows"]
            (model,) = (await whole.http.get("/v1/models")).json()["data"]
            assert model["features"]["quantized_rows"] == shown
            assert model["features"]["row_bytes"] == row
            assert (await whole.ask(body(user("hi")))).onecopy["exact"] == whole.system.card.exactness == "exact"
    assert set(shown) == FIGURES
    assert (shown["bits"], shown["layers"], shown["of"], shown["rows"]) == (bits, 2, 2, 320)
    assert 0.25 <= shown["same_token"] <= 1
    assert 0 < shown["mean_kl"] < 2
    assert f"{bits} bits in 2 of 2 layers" in caplog.text
    assert f"{shown['same_token']:.1%}" in caplog.text


async def test_programs_open_it_with_the_same_option_and_see_the_same_figures(wide: Path) -> None:
    async with Runtime.open(str(wide), kv_bits=8, context=4096, memory=8 << 30) as runtime:
        status = await runtime.status()
        assert status.health.details["quantized_rows"] == runtime.card.features["quantized_rows"]
        assert runtime.card.features["quantized_rows"]["bits"] == 8


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("bits", [8, 4])
async def test_replies_are_the_same_alone_in_company_forked_and_resumed(wide: Path, store: str, bits: int) -> None:
    asked = [body(*about(1.5, seed)) for seed in range(3)]
    async with serving(wide, store=store, kv_bits=bits) as whole:
        alone = [await whole.cold(wanted) for wanted in asked]
        assert [r.said for r in await whole.together(asked)] == [r.said for r in alone]
        forks = [body(*about(1.5, 0)[:1], user(f"{i} and else?")) for i in range(3)]
        for wanted, reply in zip(forks, await whole.together(forks), strict=True):
            assert reply.cached >= BLOCK
            assert reply.said == (await whole.cold(wanted)).said
        again = body(*grown(about(1.5, 1), alone[1], "and then?"))
        resumed = await whole.ask(again)
        assert resumed.cached >= alone[1].prompt
        assert resumed.said == (await whole.cold(again)).said
    async with serving(wide, store=store, kv_bits=bits) as whole:
        restored = await whole.ask(again)
        assert restored.onecopy["rows_restored"] >= BLOCK
        assert restored.said == resumed.said


@pytest.mark.usefixtures("lenient")
async def test_rows_on_disk_of_another_precision_are_never_used(wide: Path, store: str) -> None:
    wanted = body(*about(2.5))
    for bits in (None, 8, 4):
        async with serving(wide, store=store, kv_bits=bits) as whole:
            first = await whole.ask(wanted)
            assert first.cached == first.onecopy["rows_restored"] == 0
            assert first.said == (await whole.cold(wanted)).said
    for bits in (4, None, 8):
        async with serving(wide, store=store, kv_bits=bits) as whole:
            assert (await whole.ask(wanted)).onecopy["rows_restored"] >= 2 * BLOCK


async def test_a_session_moves_to_another_server_of_the_same_precision_only(wide: Path, tmp_path: Path) -> None:
    async with serving(wide, store=str(tmp_path / "a"), kv_bits=8) as whole:
        first = await whole.ask(body(*about(1.5)))
        image = await whole.system.export(first.onecopy["session"])
    async with serving(wide, store=str(tmp_path / "b"), kv_bits=8) as whole:
        await whole.system.import_(image)
        again = await whole.ask(body(*about(1.5)))
        assert again.onecopy["rows_restored"] >= BLOCK
        assert again.said == first.said
    async with serving(wide, store=str(tmp_path / "c")) as whole:
        answer = await whole.http.post("/v1/sessions/import", content=image)
        assert answer.status_code == 400
        assert (await whole.ask(body(*about(1.5)))).cached == 0


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_drafts_change_no_token(wide: Path, temperature: float) -> None:
    with cheap_rounds():
        async with serving(wide, kv_bits=8) as whole:
            wanted = body(*about(1.2), max_tokens=40, temperature=temperature, seed=5)
            prompt = (await whole.http.post("/tokenize", json={"messages": wanted["messages"]})).json()["tokens"]
            plain = await whole.cold({**wanted, "draft": False})
            with knowing({tuple(prompt): plain.tokens}):
                reply = await whole.ask(wanted)
    assert reply.onecopy["drafted"] > reply.onecopy["accepted"] > 0
    assert reply.said == plain.said


@pytest.mark.usefixtures("lenient")
async def test_more_conversations_fit_into_the_same_memory(wide: Path) -> None:
    held = {}
    for bits in (None, 8, 4):
        async with serving(wide, kv_bits=bits) as whole:
            await whole.ask(body(*about(2.5)))
            held[bits] = (await whole.at_rest())["bank"]["bytes_used"]
    assert held[8] == held[None] * 72 // 256
    assert held[4] == held[None] * 40 // 256


async def test_a_model_whose_output_no_longer_resembles_its_own_is_refused_with_the_figures(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "LEAST", 0.75)
    told = r"--kv-bits 4: .* the same at \d\d\.\d%, mean KL divergence .* At least 75% of the tokens must be the same"
    with pytest.raises(ModelLoadError, match=told) as refusal:
        async with serving(wide, kv_bits=4):
            raise AssertionError("served")
    assert "\n" not in str(refusal.value)


async def test_a_model_that_cannot_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow")
    with pytest.raises(ModelLoadError, match="head width of 16, which is no multiple of 32") as refusal:
        async with serving(narrow, kv_bits=8):
            raise AssertionError("served")
    assert "\n" not in str(refusal.value)
