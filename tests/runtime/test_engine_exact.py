"""The exactness contract on logits: the bits of a row do not depend on how it was reached or what ran beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onecopy.runtime.models.load import load
from onecopy.runtime.rows.layout import BLOCK

from tests.support.engines import Case, Talk, opened, together
from tests.support.tiny import tiny

WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {"rope_type": "default"},
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 100, "sliding_window_pattern": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped queries": ("llama", {}),
    "one query per key": ("llama", {"num_attention_heads": 2}),
    "interleaved rotary": ("llama", {"rope_traditional": True}),
    "sliding window": ("llama", WINDOWED),
    "biases": ("qwen2", {"tie_word_embeddings": False}),
    "norms on heads": ("qwen3", {}),
    "sinks and experts": ("gpt_oss", GPT_OSS),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "wide queries": ("gemma3_text", GEMMA),
}
LENGTH = 3 * BLOCK + 90
COMPARED = 512
"""Tokens that a way of reaching them is tried on."""

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    kind, config = MODELS[request.param]
    return Case(opened(tiny(kind, **config)), 128, LENGTH)


@pytest.mark.parametrize("width", range(1, 17))
def test_a_row_has_the_same_bits_at_every_verify_width(case: Case, width: int) -> None:
    first = LENGTH - COMPARED
    assert np.array_equal(case.at(first).feed(case.tokens[first:], width), case.whole[first:])


@pytest.mark.parametrize("count", range(2, 17))
def test_a_row_has_the_same_bits_in_every_batch(case: Case, count: int) -> None:
    steps = -(-COMPARED // count)
    places = [(37 * i + 11) % (LENGTH - steps) for i in range(count)]
    talks = [case.at(p) for p in places]
    for step in range(steps):
        rows = together([(t, [case.tokens[p + step]]) for t, p in zip(talks, places, strict=True)])
        for row, p in zip(rows, places, strict=True):
            assert np.array_equal(row[0], case.whole[p + step])


def test_a_row_has_the_same_bits_beside_strips_of_other_lengths_and_a_chunk(case: Case) -> None:
    places, widths = [3, 254, 300, 511, 90], [1, 4, 9, 3, 200]
    talks = [case.at(p) for p in places]
    order = [4, 0, 2, 1, 3]
    rows = together([(talks[i], case.tokens[places[i] : places[i] + widths[i]]) for i in order])
    for i, found in zip(order, rows, strict=True):
        assert np.array_equal(found, case.whole[places[i] : places[i] + widths[i]])


@pytest.mark.parametrize("chunks", [(256,), (1, 2, 3, 5, 8, 13, 21), (100,), (255, 2), (64,)])
def test_prefill_has_the_same_bits_in_any_chunks(case: Case, chunks: tuple[int, ...]) -> None:
    assert np.array_equal(Talk(case.engine).feed(case.tokens, *chunks), case.whole)


def test_a_row_has_the_same_bits_over_one_segment_or_many(case: Case) -> None:
    talk = Talk(case.engine, BLOCK)
    rows = [talk.feed(case.tokens[:BLOCK], 77)]
    for first in range(BLOCK, LENGTH, BLOCK):
        talk.extend(BLOCK)
        rows.append(talk.feed(case.tokens[first : first + BLOCK], 31))
    assert len(talk.chain.links) == 4
    assert np.array_equal(np.concatenate(rows), case.whole)


@pytest.mark.parametrize("children", [1, 3, 16])
def test_forks_of_one_parent_answer_as_if_each_were_alone(case: Case, children: int) -> None:
    cut = BLOCK + 17
    parent = case.at(cut)
    forks = [parent.fork(LENGTH) for _ in range(children)]
    for step in range(-(-COMPARED // children)):
        rows = together([(f, [case.tokens[cut + step]]) for f in forks])
        assert all(np.array_equal(row[0], case.whole[cut + step]) for row in rows)


def test_forks_read_their_own_rows_and_share_only_the_past(case: Case) -> None:
    cut = BLOCK + 5
    parent = case.at(cut)
    forks = [parent.fork() for _ in range(3)]
    own = [[7, 1, 2], [1, 2, 7], [2, 2, 2]]
    found = [[], [], []]
    for step in range(3):
        for into, row in zip(found, together([(f, [o[step]]) for f, o in zip(forks, own, strict=True)]), strict=True):
            into.append(row[0])
    for tokens, rows in zip(own, found, strict=True):
        assert np.array_equal(case.at(cut).feed(tokens), np.stack(rows))
    assert np.array_equal(parent.feed(case.tokens[cut : cut + 9]), case.whole[cut : cut + 9])


@pytest.mark.model
def test_the_bundled_model_keeps_the_contract() -> None:
    engine = opened(load("smollm2"))
    assert engine.exactness == ("exact", ())
    case = Case(engine, 40_000, LENGTH)
    first = LENGTH - COMPARED
    for width in (1, 4, 16):
        assert np.array_equal(case.at(first).feed(case.tokens[first:], width), case.whole[first:])
    assert np.array_equal(Talk(engine).feed(case.tokens, 130, 100, 3, 16, 7, 5, 200), case.whole)
    places = [2, 9, 64, 130, 255, 256, 290, 500]
    talks = [case.at(p) for p in places]
    for _ in range(COMPARED // len(places) // 2):
        rows = together([(t, case.tokens[t.position : t.position + 2]) for t in talks])
        for row, t in zip(rows, talks, strict=True):
            assert np.array_equal(row, case.whole[t.position - 2 : t.position])
