"""One copy: a conversation's rows stay at their addresses, and memory stays flat however long it goes on."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.decode.want import Want
from onecopy.runtime.engine import Engine
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.turn import Sampling

from tests.support.engines import Talk, opened
from tests.support.tiny import tiny

GREEDY = Sampling(seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return opened(tiny("llama"))


def addresses(talk: Talk) -> list[int]:
    flat = talk.engine.pool.segments[talk.leaf].flat()
    return [np.array(a, copy=False).__array_interface__["data"][0] for a in flat]


def step(talk: Talk, tokens: list[int]) -> int:
    """One round through `run`: the token that follows."""
    strip = talk.strip(tokens, 1)
    result = talk.engine.run([strip], [Want(GREEDY, strip.end)])
    talk.position = strip.end
    return result.picks[0][0].token


def test_two_thousand_tokens_move_no_buffer_and_raise_no_peak(engine: Engine) -> None:
    talk = Talk(engine, 8 * BLOCK)
    token = step(talk, [1, 2, 3])
    before = addresses(talk)
    buffers = engine.layout.capacity_bytes(8 * BLOCK)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(2000):
        token = step(talk, [token])
    assert addresses(talk) == before
    assert mx.get_active_memory() - held < 64 * 1024
    assert mx.get_peak_memory() - held < buffers


def test_ten_turns_move_no_buffer(engine: Engine) -> None:
    talk = Talk(engine, 8 * BLOCK)
    before = addresses(talk)
    held = None
    for turn in range(10):
        token = step(talk, [turn] * 150)
        for _ in range(20):
            token = step(talk, [token])
        held = held or mx.get_active_memory()
        assert mx.get_active_memory() - held < 64 * 1024
    assert addresses(talk) == before


def test_a_round_asks_for_as_many_wants_as_rows(engine: Engine) -> None:
    talk = Talk(engine, BLOCK)
    with pytest.raises(AssertionError, match="one want"):
        engine.run([talk.strip([1, 2], 2)], [Want(GREEDY, 1)])


def test_rows_that_do_not_fit_their_leaf_are_not_computed(engine: Engine) -> None:
    talk = Talk(engine, BLOCK)
    talk.feed([1] * (BLOCK - 1))
    with pytest.raises(AssertionError, match="do not fit"):
        engine.run([talk.strip([1, 2], 1)], [Want(GREEDY, BLOCK + 1)])
    talk.feed([1])


def test_a_round_answers_for_each_strip_in_order(engine: Engine) -> None:
    talks = [Talk(engine, BLOCK) for _ in range(3)]
    work = [([5, 6, 7], 1), ([9] * 40, 0), ([5, 6], 2)]
    strips = [t.strip(tokens, wanted) for t, (tokens, wanted) in zip(talks, work, strict=True)]
    wants = [Want(GREEDY, 3), Want(GREEDY, 1), Want(GREEDY, 2)]
    picks = engine.run(strips, wants).picks
    assert [len(p) for p in picks] == [1, 0, 2]
    alone = Talk(engine, BLOCK).feed([5, 6, 7])
    assert [p.token for p in (*picks[2], *picks[0])] == alone.argmax(axis=-1).tolist()
