"""Drafts that the device proposes, in a whole server: no token differs, and their rows follow the conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from onecopy.actors.service import Options
from onecopy.actors.system import System
from onecopy.runtime.decode import Prices
from onecopy.runtime.errors import StartupError

from tests.support.heads import write_block_drafter, write_with_mtp
from tests.support.knowing import cheap_rounds
from tests.support.qwen4_tiny import write_served
from tests.support.system import Reply, Whole, body, serving, system_text, user, write_tiny

TEXT = "".join(chr(97 + i * i % 26) for i in range(300))
FREE = Prices((1.0,) * 8, 0.0, (0.0,) * 5, "any")
"""Under these a conversation asks the device for five tokens after every round."""


@dataclass(frozen=True, slots=True)
class Made:
    model: Path
    options: dict[str, Any]


def mtp(path: Path) -> Made:
    return Made(write_with_mtp(path / "model"), {})


def mtp_of_two_layers(path: Path) -> Made:
    return Made(write_with_mtp(path / "model", layers=2), {})


def mtp_of_three_layers(path: Path) -> Made:
    return Made(write_with_mtp(path / "model", layers=3), {})


def block(path: Path) -> Made:
    return Made(write_tiny(path / "model"), {"drafter": str(write_block_drafter(path / "beside", window=40))})


def block_beside_quantized_rows(path: Path) -> Made:
    """The model's rows are quantized, those of the drafter are not."""
    drafter = {"drafter": str(write_block_drafter(path / "beside"))}
    return Made(write_tiny(path / "model", head_dim=64), drafter | {"kv_bits": 8})


def second_block_on_a_recurrent_target(path: Path) -> Made:
    made = write_block_drafter(path / "beside", second=True, targets=(1, 3), candidates=300)
    return Made(write_with_mtp(path / "model"), {"drafter": str(made)})


def indexed_mtp(path: Path) -> Made:
    return Made(write_served(path / "model", mtp=1), {})


def indexed_mtp_of_two_layers(path: Path) -> Made:
    return Made(write_served(path / "model", mtp=2), {})


HEADS = (mtp, mtp_of_two_layers, mtp_of_three_layers, indexed_mtp, indexed_mtp_of_two_layers)
MADE = (*HEADS, block, block_beside_quantized_rows, second_block_on_a_recurrent_target)
KINDS = {made.__name__: made for made in MADE}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return KINDS[request.param](tmp_path_factory.mktemp("device"))


@pytest.fixture
async def whole(made: Made) -> AsyncIterator[Whole]:
    with cheap_rounds(FREE):
        async with serving(made.model, **made.options) as opened:
            yield opened


def ask(text: str, **more: Any) -> dict[str, Any]:
    return body(system_text(TEXT), user(text), **more)


def on(wanted: dict[str, Any], reply: Reply, text: str) -> dict[str, Any]:
    return {**wanted, "messages": [*wanted["messages"], {"role": "assistant", "content": reply.text}, user(text)]}


async def plainly(whole: Whole, wanted: dict[str, Any]) -> Reply:
    return await whole.cold({**wanted, "draft": False})


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_replies_of_every_length_and_the_turns_after_them_are_those_without_drafts(
    whole: Whole, temperature: float
) -> None:
    drafted = accepted = 0
    for n in (1, 2, 3, 4, 5, 8, 17, 40):
        wanted = ask(f"question {n}", max_tokens=n, temperature=temperature, seed=n)
        reply = await whole.ask(wanted)
        assert reply.said == (await plainly(whole, wanted)).said
        after = on({**wanted, "max_tokens": 6}, reply, "and then?")
        again = await whole.ask(after)
        assert again.said == (await plainly(whole, after)).said
        assert again.cached == reply.prompt + n - 1
        drafted, accepted = drafted + reply.onecopy["drafted"], accepted + reply.onecopy["accepted"]
    assert drafted > 100
    assert accepted > 0


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_eight_side_by_side_say_what_each_says_alone_without(whole: Whole, temperature: float) -> None:
    asked = [ask(f"client {i}", max_tokens=20 + i, temperature=temperature, seed=i) for i in range(8)]
    plain = [await plainly(whole, wanted) for wanted in asked]
    replies = await whole.together(asked)
    assert [r.said for r in replies] == [r.said for r in plain]
    assert all(r.onecopy["drafted"] > 0 for r in replies)


async def test_a_reply_is_drafted_alike_however_its_rows_were_come_by(made: Made, tmp_path: Path) -> None:
    """The drafter's rows are there after a fork, a rewind and a restart: it proposes what it would have proposed."""
    with cheap_rounds(FREE):
        async with serving(made.model, store=str(tmp_path), **made.options) as whole:
            first = await whole.ask(ask("the beginning", max_tokens=12))
            wanted = on(ask("the beginning", max_tokens=24), first, "and then?")
            cold = await whole.cold(wanted)
            assert cold.onecopy["drafted"] > 0
        async with serving(made.model, store=str(tmp_path), **made.options) as whole:
            restored = await whole.ask(wanted)
            assert restored.onecopy["how"] == "restored"
            assert facts(restored) == facts(cold)
        async with serving(made.model, **made.options) as whole:
            await whole.ask(ask("the beginning", max_tokens=12))
            adopted = await whole.ask(wanted)
            assert adopted.cached > 0
            assert facts(adopted) == facts(cold)


def facts(reply: Reply) -> tuple[Any, ...]:
    return (*reply.said, reply.onecopy["drafted"], reply.onecopy["accepted"], reply.onecopy["rounds"])


async def test_stop_strings_grammars_and_leaving_change_nothing(whole: Whole) -> None:
    wanted = ask("many ends", max_tokens=30)
    plain = await plainly(whole, wanted)
    for offset in (5, 8, 11):
        stopped = {**wanted, "stop": [plain.text[offset : offset + 3]]}
        assert (await whole.ask(stopped)).said == (await plainly(whole, stopped)).said
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    made = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    shaped = {**wanted, "response_format": made, "logit_bias": {}, "top_logprobs": 2}
    assert (await whole.ask(shaped)).said == (await plainly(whole, shaped)).said
    for reads in (1, 4):
        await whole.leave({**wanted, "max_tokens": 100}, reads)
        await whole.at_rest()
        assert (await whole.ask(wanted)).said == plain.said


async def test_a_turn_without_drafts_keeps_the_drafters_rows_all_the_same(whole: Whole) -> None:
    wanted = ask("no drafts", max_tokens=12)
    reply = await whole.ask({**wanted, "draft": False})
    assert reply.onecopy["drafted"] == 0
    after = on({**wanted, "max_tokens": 24}, reply, "and now?")
    again = await whole.ask(after)
    assert facts(again) == facts(await whole.cold(after))


async def test_the_model_card_names_who_drafts(made: Made) -> None:
    async with serving(made.model, **made.options) as whole:
        features = (await whole.http.get("/v1/models")).json()["data"][0]["features"]
        assert features["drafters"] == ["copies", "block" if "drafter" in made.options else "mtp"]
        assert features["round_costs"][0] == 1.0
    async with serving(made.model, draft=False) as whole:
        features = (await whole.http.get("/v1/models")).json()["data"][0]["features"]
        assert features["drafters"] == features["round_costs"] == []


async def test_a_drafter_for_another_model_ends_the_start_with_one_line(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model")
    other = str(write_block_drafter(tmp_path / "beside", vocab_size=100))
    for options, sentence in (
        ({"drafter": other}, "this drafter is not for model: it knows 100 tokens, model knows 320"),
        ({"drafter": str(tmp_path)}, "no drafter is here"),
        ({"drafter": other, "draft": False}, "give one of them"),
    ):
        with pytest.raises(StartupError, match=sentence):
            async with System.open(Options(str(model), **options)):
                pass
