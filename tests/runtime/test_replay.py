"""Delta nets taken back without a forward: the states are those of rows computed afresh, bit for bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from onecopy.runtime.engine import Engine
from onecopy.runtime.models.replay import tape_of
from onecopy.runtime.rows.layout import BLOCK

from tests.support.engines import Talk, opened
from tests.support.tiny import tiny
from tests.support.zoo import SERVED

TOKENS = np.random.default_rng(4).integers(0, 128, 60).tolist()


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return opened(tiny(request.param, **SERVED[request.param]))


def states(talk: Talk) -> list[Any]:
    layers = talk.engine.pool.segments[talk.leaf].layers
    return [np.array(a) for layer in layers for a in layer.state or () if a is not None]


@pytest.mark.parametrize("kept", range(1, 7))
def test_a_state_taken_back_is_the_state_of_fewer_rows_and_costs_no_forward(engine: Engine, kept: int) -> None:
    talks = [Talk(engine, BLOCK) for _ in range(3)]
    for i, talk in enumerate(talks):
        talk.feed(TOKENS[: 20 + i])
    strips = [t.strip([*TOKENS[20 + i : 20 + i + kept], *[1] * (7 - kept)]) for i, t in enumerate(talks)]
    engine.settle(strips, engine.forward(strips))
    with mock.patch.object(type(engine._forward), "__call__", side_effect=AssertionError("a forward")):
        engine.accept([(strips[0], kept), (strips[2], kept)])
    for i in (0, 2):
        fresh = Talk(engine, BLOCK)
        fresh.feed(TOKENS[: 20 + i + kept])
        assert all(np.array_equal(a, b) for a, b in zip(states(talks[i]), states(fresh), strict=True))
    assert not np.array_equal(states(talks[1])[0], states(fresh)[0])


def test_only_models_all_of_whose_recurrent_layers_are_known_are_listened_to() -> None:
    assert tape_of(tiny("mamba", **SERVED["mamba"]).model, 2) is None
    assert tape_of(tiny("llama").model, 0) is None
    assert tape_of(tiny("qwen3_5", **SERVED["qwen3_5"]).model, 2) is None
    assert tape_of(tiny("qwen3_5", **SERVED["qwen3_5"]).model, 3) is not None


def test_nothing_of_a_long_prompt_is_remembered(engine: Engine) -> None:
    talk = Talk(engine, BLOCK)
    strip = talk.strip(TOKENS, 1)
    engine.settle([strip], engine.forward([strip]))
    assert engine._forward._histories == {}
