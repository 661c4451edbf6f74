"""The hold-cut, end to end: a long conversation, then many of other shapes, then the long one again. All are served.

The long one has 50,000 rows. Where it is evicted and computed again it has 20,000, unless `ONECOPY_FULL` is set: that
test would take minutes.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from onecopy.actors import bank as bank_module
from onecopy.runtime.engine import Engine

from tests.support.system import Reply, Whole, body, serving, system_text, user, write_tiny

BLOCK = 256
BLOCK_BYTES = BLOCK * 256
ROWS = 50_000
EVICTED = ROWS if os.environ.get("ONECOPY_FULL") else 20_000
LONG = "".join(random.Random(50).choices("abcdefghijklmnopqrstuvwxyz ,.", k=ROWS))


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with one head a layer, which computes 50,000 rows in seconds: 256 bytes a row."""
    return write_tiny(tmp_path_factory.mktemp("slim"), num_attention_heads=1, num_key_value_heads=1)


@pytest.fixture
async def whole(slim: Path) -> AsyncIterator[Whole]:
    async with serving(slim) as made:
        yield made


def shapes(draw: random.Random) -> list[dict[str, Any]]:
    """Ten new sessions, each of another shape; four of them begin as the long conversation does."""
    cuts = [draw.randrange(1, 3000) for _ in range(4)]
    shared = [body(system_text(LONG[:cut]), user(f"another {cut}"), max_tokens=draw.randrange(1, 40)) for cut in cuts]
    sizes = [1, 200, 255, 256, 700, 2500]
    return shared + [body(user(f"{draw.random()}" + LONG[-size:]), max_tokens=draw.randrange(1, 300)) for size in sizes]


@pytest.mark.slow
async def test_ten_sessions_of_other_shapes_are_served_beside_a_long_one_that_stays_whole(whole: Whole) -> None:
    whole.http.timeout = None
    talk = [system_text(LONG), user("begin")]
    first = last = await whole.ask(body(*talk))
    for side_by_side in (False, True):
        others = shapes(random.Random(1 + side_by_side))
        talk = [*talk, {"role": "assistant", "content": last.text}, user("go on")]
        if side_by_side:
            *replies, then = await whole.together([*others, body(*talk)])
        else:
            replies = [await whole.ask(wanted) for wanted in others]
            then = await whole.ask(body(*talk))
        assert then.cached >= last.prompt + len(last.tokens) - 1
        assert then.onecopy["bytes_copied"] == 0
        assert [r.said for r in replies] == [(await whole.cold(wanted)).said for wanted in others]
        last = then
    again = await whole.ask(body(*talk[:2]))
    assert again.said == first.said
    assert again.cached == again.prompt - 1


def whole_or_out_of_memory(reply: Reply, wanted: dict[str, Any]) -> bool:
    """All its tokens, or fewer and the reason: everybody's answers grew into what was left at once."""
    return len(reply.tokens) == wanted["max_tokens"] or reply.onecopy["detail"] == "no memory for more rows"


@pytest.mark.slow
async def test_under_a_budget_that_forces_eviction_all_are_served_and_the_long_one_is_right(slim: Path) -> None:
    blocks = EVICTED // BLOCK + 24
    async with serving(slim, rows=blocks * BLOCK_BYTES) as whole:
        whole.http.timeout = None
        long = [system_text(LONG[:EVICTED]), user("begin")]
        first = await whole.ask(body(*long))
        for seed in range(2):
            others = shapes(random.Random(seed))
            replies = await whole.together(others)
            assert all(whole_or_out_of_memory(r, wanted) for r, wanted in zip(replies, others, strict=True))
            again = await whole.ask(body(*long))
            assert again.said == first.said
        numbers = (await whole.at_rest())["bank"]
    assert numbers["dropped"] > 0
    assert numbers["bytes_used"] <= numbers["bytes_budget"]


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "bucket"), [(1000, 0), (300, 2 * BLOCK)])
async def test_sustained_traffic_of_mixed_shapes_meets_no_error(
    slim: Path, monkeypatch: pytest.MonkeyPatch, requests: int, bucket: int
) -> None:
    """bucket: what a compiled verify wants its buffers in, so that turns are resized, copied and eager too."""
    monkeypatch.setattr(Engine, "fixed_rows", bucket)
    monkeypatch.setattr(bank_module, "IDLE_SLACK", 0.05)
    draw = random.Random(300)
    async with serving(slim, rows=40 * BLOCK_BYTES) as whole:
        for start in range(0, requests, 10):
            asked = [mixed(draw) for _ in range(10)]
            replies = await whole.together(asked, stream=[draw.random() < 0.5 for _ in asked])
            assert [len(r.tokens) for r in replies] == [w["max_tokens"] for w in asked], start
            checked = draw.randrange(10)
            assert replies[checked].said == (await whole.cold(asked[checked])).said
        numbers = (await whole.at_rest())["bank"]
    assert (numbers["turns"], numbers["queued"], numbers["refused"], numbers["broken_laws"]) == (0, 0, 0, 0)
    assert numbers["bytes_used"] <= numbers["bytes_budget"]
    assert {"fresh", "forked", "adopted"} <= set(numbers["admitted"])
    assert bucket or "eager" not in numbers["admitted"]


def mixed(draw: random.Random) -> dict[str, Any]:
    """A request that shares a random part of one long text, edits it somewhere, or is new."""
    size = draw.choice([3, 60, 255, 256, 257, 600, 1100])
    text = LONG[:size] if draw.random() < 0.7 else f"{draw.random()} {LONG[:size]}"
    more = {"temperature": 0.8, "seed": draw.randrange(99)} if draw.random() < 0.3 else {}
    return body(system_text(text), user(f"q{draw.randrange(6)}"), max_tokens=draw.choice([1, 2, 5, 20]), **more)
