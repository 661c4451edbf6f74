"""qwen4_exp served whole: the bare model's tokens, and the same ones forked, edited, batched, resumed and restored."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onecopy.runtime.models.qwen4_exp import Model, load_qwen4_exp
from onecopy.runtime.rows.transfer import read_rows

from tests.support.qwen4_run import feed, fresh
from tests.support.qwen4_tiny import write_served
from tests.support.system import Whole, body, eventually, grown, serving, system_text, user

BLOCK = 256
TEXT = "".join(random.Random(12).choices("abcdefghijklmnopqrstuvwxyz ,.", k=8 * BLOCK))
SMALL = "a small budget"
SHAPES: dict[str, dict[str, Any]] = {
    SMALL: {},
    "several PLE layers and a budget of blocks": {
        "ple_layer_ids": [1, 3],
        "indexer_budget": 320,
        "indexer_compress_ratio": 8,
    },
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_served(tmp_path_factory.mktemp("indexed"), **shape) for name, shape in SHAPES.items()}


@pytest.fixture
def path(request: pytest.FixtureRequest, written: dict[str, Path]) -> Path:
    return written[getattr(request, "param", SMALL)]


@pytest.fixture
async def whole(path: Path) -> AsyncIterator[Whole]:
    async with serving(path) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def about(blocks: float, seed: int = 0) -> list[dict[str, Any]]:
    return [system_text(f"{seed} {TEXT[: int(blocks * BLOCK)]}"), user("go on")]


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """The bare model's own greedy tokens, with no row of ours."""
    conversation, feeding, out = fresh(model), prompt, list[int]()
    for _ in range(count):
        out.append(int(feed(model, conversation, feeding)[-1].argmax()))
        feeding = out[-1:]
    return out


async def completed(whole: Whole, prompt: list[int], count: int) -> list[int]:
    wanted = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = await whole.post(wanted, "/v1/completions")
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@pytest.mark.parametrize("path", SHAPES, indirect=True)
@pytest.mark.parametrize("length", [9, 600], ids=["within the budget", "past it, in several chunks"])
async def test_a_greedy_reply_is_the_bare_models_token_for_token(whole: Whole, path: Path, length: int) -> None:
    model, _ = load_qwen4_exp(path)
    prompt = np.random.default_rng(length).integers(2, 512, length).tolist()
    assert await completed(whole, prompt, 40) == greedy(model, prompt, 40)


async def test_what_is_served_is_said_to_be_exact(whole: Whole) -> None:
    health = (await whole.http.get("/health")).json()
    assert health["status"] == "ok"
    assert whole.system.card.exactness == "exact"


@pytest.mark.parametrize("path", SHAPES, indirect=True)
async def test_eight_conversations_of_other_lengths_hear_what_each_hears_alone(whole: Whole) -> None:
    asked = [body(*about(0.3 * i, seed=i), max_tokens=24) for i in range(8)]
    alone = [await whole.cold(wanted) for wanted in asked]
    assert [r.said for r in await whole.together(asked, stream=[True, False] * 4)] == [r.said for r in alone]


async def test_a_chat_goes_on_in_its_own_rows_and_copies_nothing(whole: Whole) -> None:
    first = await whole.ask(body(*about(1.6)))
    wanted = body(*grown(about(1.6), first, "and then?"))
    second = await whole.ask(wanted)
    assert second.onecopy["how"] in ("adopted", "extended")
    assert second.cached == first.prompt + len(first.tokens) - 1
    assert not second.onecopy["bytes_copied"]
    assert second.said == (await whole.cold(wanted)).said


async def test_forks_and_an_edit_answer_as_if_nothing_had_been_kept(whole: Whole) -> None:
    first = await whole.ask(body(*about(1.6)))
    talk = grown(about(1.6), first, "and then?")
    second = await whole.ask(body(*talk))
    branches = [
        body(*grown(about(1.6), first, "or else?")),
        body(*about(1.6)[:-1], user("stop")),
        body(*grown(talk, second, "and after that?")),
    ]
    together = await whole.together(branches)
    assert [r.said for r in together] == [(await whole.cold(wanted)).said for wanted in branches]
    assert [r.onecopy["how"] for r in together[:2]] == ["forked", "forked"]
    assert together[0].cached == first.prompt + len(first.tokens) - 1


async def test_the_second_conversation_with_one_system_text_computes_its_own_words_only(whole: Whole) -> None:
    system = about(2.3)[0]
    asked = [body(system, user(text)) for text in ("first of all", "what is", "what was", "why", "first of many")]
    replies = [await whole.ask(wanted) for wanted in asked]
    assert [r.onecopy["how"] for r in replies] == ["fresh", "forked", "forked", "forked", "forked"]
    assert all(r.prompt - r.cached < 64 for r in replies[1:])
    assert [r.said for r in replies] == [(await whole.cold(wanted)).said for wanted in asked]


async def test_a_draft_copied_from_the_conversation_changes_no_token(whole: Whole) -> None:
    wanted = body(system_text("again and again and again and again"), user("again and again and again"), max_tokens=48)
    drafted = await whole.ask(wanted)
    plain = await whole.cold({**wanted, "draft": False})
    assert drafted.said == plain.said


@pytest.mark.parametrize("path", SHAPES, indirect=True)
@pytest.mark.parametrize("blocks", [0.5, 2.5])
async def test_a_conversation_goes_on_from_disk_as_it_would_have_in_memory(
    path: Path, store: str, blocks: float
) -> None:
    async with serving(path, store=store) as whole:
        first = await whole.ask(body(*about(blocks)))
    wanted = body(*grown(about(blocks), first, "and then?"))
    async with serving(path, store=store) as whole:
        reply = await whole.ask(wanted)
        assert reply.onecopy["how"] == "restored"
        assert reply.cached == first.prompt + len(first.tokens) - 1
        assert reply.said == (await whole.cold(wanted)).said


async def test_pooled_keys_come_back_from_disk_bit_for_bit(path: Path, store: str) -> None:
    async with serving(path, store=store) as whole:
        first = await whole.ask(body(*about(1.5)))
        before = await rows_of(whole, first.cached + first.prompt)
        answer = await whole.http.post(f"/v1/sessions/{first.onecopy['session']}/park")
        assert answer.json()["state"] == "parked"
        await eventually(lambda: nothing_held(whole))
        again = await whole.ask(body(*grown(about(1.5), first, "and then?")))
        assert again.onecopy["how"] == "restored"
        after = await rows_of(whole, first.prompt)
    assert any(key.endswith(".p") and array.size for key, array in before.items())
    assert all(np.array_equal(before[key], after[key]) for key in before)


async def nothing_held(whole: Whole) -> bool:
    return bool((await whole.numbers())["bank"]["bytes_used"] == 0)


async def rows_of(whole: Whole, stop: int) -> dict[str, Any]:
    """Copies of the first rows of the only conversation, and of the entries they complete."""
    await whole.at_rest()
    ledger, pool = whole.system._ledger, whole.system._engine.pool
    assert ledger is not None
    (conversation,) = ledger.conversations.values()
    found: dict[str, list[Any]] = {}
    for segment in reversed(list(conversation.tip.ancestors())):
        last = min(stop, segment.frontier)
        views = await whole.system._device.run(read_rows, pool, segment.id, segment.start, last)
        for key, array in views.items():
            found.setdefault(key, []).append(array.copy())
    return {key: np.concatenate(parts, axis=1) for key, parts in found.items()}


async def test_memory_comes_back_when_conversations_are_dropped(whole: Whole) -> None:
    await whole.together([body(*about(0.4 * i, seed=i)) for i in range(4)])
    assert whole.system._ledger is not None
    assert whole.system._ledger.audit() == []
    await whole.drop_all()
    assert (await whole.at_rest())["bank"]["bytes_used"] == 0
    assert not whole.system._engine.pool.segments
    assert not whole.system._engine.pool.anchors
