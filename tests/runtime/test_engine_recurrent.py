"""Recurrent layers: state beside rows, anchors, verify rounds taken back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from onecopy.runtime.engine import Engine
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ops import DropAnchor, LoadAnchor, SaveAnchor

from tests.support.engines import Logits, Talk, opened, together
from tests.support.tiny import tiny

QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
}
MODELS = {"dense": QWEN3_5, "experts": QWEN3_5 | EXPERTS}
MAMBA: dict[str, Any] = {
    "state_size": 8,
    "conv_kernel": 4,
    "time_step_rank": 4,
    "use_conv_bias": True,
    "use_bias": False,
}
LONG_KINDS = {
    "delta": ("qwen3_5", QWEN3_5),
    "delta and experts": ("qwen3_5", QWEN3_5 | EXPERTS),
    "mamba": ("mamba", MAMBA),
}
LONG: list[int] = np.random.default_rng(4).integers(0, 128, 2 * BLOCK + 30).tolist()
TOKENS = np.random.default_rng(3).integers(0, 128, 60).tolist()


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return opened(tiny("qwen3_5", **MODELS[request.param]))


def own_answer(kind: str, tokens: list[int], count: int) -> list[int]:
    """mlx-lm's own greedy tokens."""
    model = tiny("qwen3_5", **MODELS[kind]).model
    cache, out, feed = make_prompt_cache(model), [], tokens
    for _ in range(count):
        out.append(int(mx.argmax(model(mx.array([feed]), cache=cache)[0, -1]).item()))
        feed = out[-1:]
    return out


def answer(talk: Talk, tokens: list[int], count: int) -> list[int]:
    out: list[int] = []
    feed = tokens
    for _ in range(count):
        out.append(int(talk.feed(feed)[-1].argmax()))
        feed = out[-1:]
    return out


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_mlx_lm(kind: str) -> None:
    engine = opened(tiny("qwen3_5", **MODELS[kind]))
    assert answer(Talk(engine, BLOCK), TOKENS, 40) == own_answer(kind, TOKENS, 40)


def test_the_layout_prices_state_and_rows(engine: Engine) -> None:
    kinds = [layer.kind for layer in engine.layout.layers]
    assert kinds == ["recurrent"] * 3 + ["attention"]
    assert engine.layout.layers[0].anchor_bytes == 4 * (3 * (2 * 2 * 16 + 4 * 8) + 4 * 16 * 8)


def test_rows_have_the_same_bits_in_any_steps_and_beside_others(engine: Engine) -> None:
    whole = Talk(engine, BLOCK).feed(TOKENS)
    assert engine.exactness == ("exact", ())
    assert np.array_equal(Talk(engine, BLOCK).feed(TOKENS, 17, 1, 3, 8), whole)
    talks = [Talk(engine, BLOCK) for _ in range(5)]
    for i, talk in enumerate(talks):
        talk.feed(TOKENS[: 7 * i + 1])
    work = [(t, TOKENS[7 * i + 1 : 7 * i + 1 + n]) for (i, t), n in zip(enumerate(talks), (1, 4, 1, 9, 4), strict=True)]
    for (i, rows), (_, tokens) in zip(enumerate(together(work)), work, strict=True):
        assert np.array_equal(rows, whole[7 * i + 1 : 7 * i + 1 + len(tokens)])


@pytest.fixture(scope="module", params=LONG_KINDS)
def long(request: pytest.FixtureRequest) -> tuple[Engine, Logits]:
    """An engine, and the logits of `LONG` computed in one go."""
    kind, config = LONG_KINDS[request.param]
    engine = opened(tiny(kind, **config))
    assert engine.exactness == ("exact", ())
    return engine, Talk(engine).feed(LONG)


@pytest.mark.parametrize("width", range(1, 17))
def test_a_row_has_the_same_bits_at_every_verify_width(long: tuple[Engine, Logits], width: int) -> None:
    engine, whole = long
    assert np.array_equal(Talk(engine).feed(LONG, width), whole)


@pytest.mark.parametrize("count", range(2, 17))
def test_a_row_has_the_same_bits_in_every_batch(long: tuple[Engine, Logits], count: int) -> None:
    engine, whole = long
    steps = -(-512 // count)
    talks = [Talk(engine) for _ in range(count)]
    for i, talk in enumerate(talks):
        talk.feed(LONG[: (37 * i + 11) % (len(LONG) - steps)])
    for _ in range(steps):
        for row, talk in zip(together([(t, [LONG[t.position]]) for t in talks]), talks, strict=True):
            assert np.array_equal(row[0], whole[talk.position - 1])


@pytest.mark.parametrize("kept", range(1, 7))
def test_a_verify_round_keeps_the_state_at_the_accepted_row(engine: Engine, kept: int) -> None:
    talk = Talk(engine, BLOCK)
    talk.feed(TOKENS[:20])
    strip = talk.strip([*TOKENS[20 : 20 + kept], *[1] * (6 - kept)])
    engine.settle([strip], engine.forward([strip]))
    engine.accept([(strip, kept)])
    talk.position += kept
    assert np.array_equal(talk.feed(TOKENS[20 + kept :], 9), Talk(engine, BLOCK).feed(TOKENS)[20 + kept :])


def test_an_anchor_brings_a_state_back_and_gives_a_fork_its_own(engine: Engine) -> None:
    whole = Talk(engine, BLOCK).feed(TOKENS)
    talk = Talk(engine, BLOCK)
    talk.feed(TOKENS[:30])
    engine.pool.apply((SaveAnchor(talk.leaf, 7),))
    talk.feed([9] * 11)
    fork = Talk(engine, BLOCK)
    fork.feed(TOKENS[:30])
    engine.pool.apply((LoadAnchor(7, talk.leaf), LoadAnchor(7, fork.leaf), DropAnchor(7)))
    talk.position = 30
    assert np.array_equal(talk.feed(TOKENS[30:]), whole[30:])
    assert np.array_equal(fork.feed(TOKENS[30:], 5), whole[30:])
    assert 7 not in engine.pool.anchors


def test_a_state_keeps_no_other_conversation_alive(engine: Engine) -> None:
    talks = [Talk(engine, BLOCK) for _ in range(8)]
    together([(t, [5]) for t in talks])
    before = mx.get_active_memory()
    layers = engine.pool.segments[talks[0].leaf].layers
    states = sum(a.nbytes for layer in layers for a in layer.state or () if a is not None)
    for talk in talks[1:]:
        engine.pool.segments.pop(talk.leaf)
    rows = engine.layout.row_bytes * BLOCK
    assert before - mx.get_active_memory() >= 7 * (states + rows)


def test_a_fork_at_a_block_boundary_goes_on_from_its_anchor_not_from_where_its_parent_went(engine: Engine) -> None:
    tokens = [*TOKENS, *[3] * (BLOCK - len(TOKENS)), 8, 8, 8]
    talk = Talk(engine, 2 * BLOCK)
    talk.feed(tokens[:BLOCK])
    engine.pool.apply((SaveAnchor(talk.leaf, 3),))
    fork = talk.fork()
    went_on = talk.feed([5] * 20)
    engine.pool.apply((LoadAnchor(3, fork.leaf),))
    assert not np.array_equal(went_on[:3], fork.feed([8, 8, 8], 1))
    assert np.array_equal(fork.feed([1]), Talk(engine, 2 * BLOCK).feed([*tokens, 1])[-1:])
