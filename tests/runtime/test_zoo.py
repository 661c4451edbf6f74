"""Architectures of mlx-lm, tiny and random: served with the tokens mlx-lm gives, or refused when loaded."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ops import DropAnchor, LoadAnchor, SaveAnchor
from onecopy.runtime.rows.transfer import read_rows, read_state, write_rows, write_state

from tests.support.engines import Logits, Talk, opened, together
from tests.support.tiny import tiny
from tests.support.zoo import REFUSED, SERVED

PROMPT = np.random.default_rng(0).integers(0, 128, 40).tolist()
NEW, CUT = 24, 27


def own_logits(model: Any) -> list[Logits]:
    """Logits of mlx-lm's own greedy reply to the prompt, a row for each token."""
    cache, rows, feed = make_prompt_cache(model), [], PROMPT
    for _ in range(NEW):
        rows.append(np.array(model(mx.array([feed]), cache=cache)[0, -1].astype(mx.float32)))
        feed = [int(rows[-1].argmax())]
    return rows


def reply(talk: Talk, prompt: list[int]) -> list[Logits]:
    rows, feed = [], prompt
    for _ in range(NEW):
        rows.append(talk.feed(feed)[-1])
        feed = [int(rows[-1].argmax())]
    return rows


def tokens(rows: list[Logits]) -> list[int]:
    return [int(row.argmax()) for row in rows]


@pytest.mark.parametrize("kind", SERVED)
def test_a_served_architecture_answers_as_mlx_lm_does(kind: str) -> None:
    loaded = tiny(kind, **SERVED[kind])
    own = own_logits(loaded.model)
    engine = opened(loaded)
    alone = reply(Talk(engine, BLOCK), PROMPT)
    assert tokens(alone) == tokens(own)
    scale = max(float(np.abs(row).max()) for row in own)
    assert max(float(np.abs(a - b).max()) for a, b in zip(alone, own, strict=True)) < 1e-3 * scale
    if engine.exactness[0] == "exact":
        assert_company_changes_nothing(engine, alone)
        assert_kept_rows_are_as_good_as_new_ones(engine, alone)


def assert_company_changes_nothing(engine: Any, alone: list[Logits]) -> None:
    """Two conversations at different places, one of them prefilled in chunks, token by token in common rounds."""
    ahead, behind = Talk(engine, BLOCK), Talk(engine, BLOCK)
    behind.feed(PROMPT[:-1], 7)
    ahead.feed(PROMPT)
    sequence = [PROMPT[-1], *tokens(alone)]
    for step in range(4):
        two = together([(ahead, [sequence[step + 1]]), (behind, [sequence[step]])])
        assert np.array_equal(two[0][0], alone[step + 1])
        assert np.array_equal(two[1][0], alone[step])


def assert_kept_rows_are_as_good_as_new_ones(engine: Any, alone: list[Logits]) -> None:
    """A fork, a rewind, and rows and states that were read out and written elsewhere, at a place inside the prompt."""
    talk, anchor = Talk(engine, BLOCK), 9
    talk.feed(PROMPT[:CUT])
    engine.pool.apply((SaveAnchor(talk.leaf, anchor),))
    fork, back = talk.fork(), Talk(engine, BLOCK)
    rows = read_rows(engine.pool, talk.leaf, 0, CUT)
    write_rows(engine.pool, back.leaf, 0, {key: array.copy() for key, array in rows.items()})
    write_state(engine.pool, back.leaf, read_state(engine.pool, anchor))
    back.position = CUT
    talk.feed(PROMPT[:7])
    engine.pool.apply((LoadAnchor(anchor, talk.leaf), LoadAnchor(anchor, fork.leaf), DropAnchor(anchor)))
    talk.position = CUT
    for other in (fork, talk, back):
        assert np.array_equal(other.feed(PROMPT[CUT:])[-1], alone[0])
        assert np.array_equal(other.feed(tokens(alone)[:1])[-1], alone[1])


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_whose_rows_cannot_be_read_in_place_is_refused_in_one_line(kind: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^{kind}: this architecture does not run on kept rows: .*") as refusal:
        opened(tiny(kind, **REFUSED[kind]))
    assert "\n" not in str(refusal.value)


def test_model_code_that_fails_on_its_own_config_is_refused_in_one_line() -> None:
    windows = {"sliding_window": 32, "sliding_window_layers": [1], "num_swa_attention_heads": 4, "conv_window": 2}
    loaded = tiny("baichuan_m1", **windows, num_swa_key_value_heads=2, tie_word_embeddings=True)
    with pytest.raises(
        ModelLoadError, match=r"^baichuan_m1: its model code does not run with this config: "
    ) as refusal:
        opened(loaded)
    assert "\n" not in str(refusal.value)
