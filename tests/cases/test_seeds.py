"""Case F23: the same request gives the same reply, whatever else was or is asked, and seeds mean what they say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.system import Whole, body, serving, system_text, user

LONG = 520
"""Tokens of a reply that is compared: the contract is stated for more than 500."""
S = system_text("a system text of some length " * 20)
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 42},
    "seeded and cut": {"temperature": 1.3, "seed": 2**63, "top_p": 0.9, "top_k": 12, "min_p": 0.01},
    "seeded and penalised": {"temperature": 0.9, "seed": 0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
}


@pytest.fixture
async def whole(tiny: Path) -> AsyncIterator[Whole]:
    async with serving(tiny) as made:
        yield made


@pytest.mark.parametrize("how", SAMPLED)
async def test_f23_a_reply_is_the_same_cold_repeated_beside_others_streamed_and_after_a_restart(
    whole: Whole, tiny: Path, how: str
) -> None:
    wanted = body(S, user("tell me"), max_tokens=LONG, **SAMPLED[how])
    first = await whole.ask(wanted)
    assert (await whole.ask(wanted)).said == first.said
    for i in range(10):
        await whole.ask(body(S, user(f"other {i}"), temperature=1, seed=i))
    beside = [body(S, user(f"beside {i}"), temperature=0.7, max_tokens=50) for i in range(3)]
    together = await whole.together([wanted, *beside, wanted], stream=[False, False, True, False, True])
    assert together[0].said == together[4].said == first.said
    assert (await whole.streamed(wanted)).said == first.said
    assert (await whole.ask({**wanted, "draft": False})).said == first.said
    async with serving(tiny) as restarted:
        assert (await restarted.ask(wanted)).said == first.said


@pytest.mark.parametrize("how", ["greedy", "seeded"])
async def test_f23_the_turn_after_a_long_reply_is_a_cold_runs_resumed_in_memory_and_from_disk(
    tiny: Path, tmp_path: Path, how: str
) -> None:
    store = str(tmp_path / "rows")
    async with serving(tiny, store=store) as whole:
        first = await whole.ask(body(S, user("tell me"), max_tokens=LONG, **SAMPLED[how]))
        said = {"role": "assistant", "content": first.text}
        after = body(S, user("tell me"), said, user("and then?"), max_tokens=LONG, **SAMPLED[how])
        cold = await whole.cold(after)
        resumed = await whole.ask(after)
    assert resumed.said == cold.said
    assert len(resumed.tokens) == LONG
    async with serving(tiny, store=store) as whole:
        restored = await whole.ask(after)
    assert restored.said == cold.said
    assert (resumed.onecopy["how"], restored.onecopy["how"]) == ("adopted", "restored")
    assert min(resumed.cached, restored.cached) > LONG


async def test_f23_unseeded_replies_differ_and_report_the_seed_that_repeats_them(whole: Whole) -> None:
    wanted = body(S, user("tell me"), temperature=0.8, max_tokens=40)
    one, other = await whole.ask(wanted), await whole.ask(wanted)
    assert one.tokens != other.tokens
    assert one.onecopy["seed"] != other.onecopy["seed"]
    for reply in (one, other):
        assert (await whole.ask({**wanted, "seed": reply.onecopy["seed"]})).said == reply.said


async def test_f23_minus_one_is_a_random_seed_and_what_does_not_fit_64_bits_is_refused(whole: Whole) -> None:
    wanted = body(S, user("tell me"), temperature=0.8, max_tokens=40)
    one, other = await whole.ask({**wanted, "seed": -1}), await whole.ask({**wanted, "seed": -1})
    assert one.tokens != other.tokens
    zero = await whole.ask({**wanted, "seed": 0})
    assert zero.onecopy["seed"] == 0
    assert zero.tokens not in (one.tokens, other.tokens)
    for seed in (-2, 2**64):
        answer = await whole.post({**wanted, "seed": seed})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")
    largest = await whole.ask({**wanted, "seed": 2**64 - 1})
    assert largest.said == (await whole.ask({**wanted, "seed": 2**64 - 1})).said
