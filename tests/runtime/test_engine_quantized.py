"""The exactness contract with quantized rows: bits do not depend on batch, steps, forks, segments or copies."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.models.load import load
from onecopy.runtime.rows import quantized
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ops import ResizeLayer
from onecopy.runtime.rows.transfer import fill, read_rows, row_slots, write_rows

from tests.support.engines import Case, Talk, opened, together
from tests.support.tiny import tiny
from tests.support.zoo import SERVED

WIDE = {"head_dim": 64, "num_key_value_heads": 2}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}
LATENT = SERVED["deepseek_v2"] | {"qk_nope_head_dim": 56, "v_head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "groups of 64": ("llama", WIDE),
    "groups of 32": ("llama", {"head_dim": 96}),
    "two groups a head": ("qwen3", {"head_dim": 128}),
    "sliding window": ("llama", WIDE | WINDOWED),
    "keys wider than values": ("deepseek_v2", LATENT),
    "sinks": ("gpt_oss", SERVED["gpt_oss"] | {"head_dim": 32}),
}
LENGTH = BLOCK + 100


def case_of(kind: str, bits: int) -> Case:
    family, config = MODELS[kind]
    return Case(opened(tiny(family, **config), kv_bits=bits), 128, LENGTH)


@pytest.fixture(scope="module", params=[(kind, 8) for kind in MODELS] + [("groups of 64", 4), ("groups of 32", 4)])
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(*request.param)


@pytest.mark.parametrize("count", [2, 16])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(case: Case, count: int) -> None:
    places = [(37 * i + 11) % 340 for i in range(count)]
    talks = [case.at(p) for p in places]
    for step in range(2):
        rows = together([(t, [case.tokens[p + step]]) for t, p in zip(talks, places, strict=True)])
        for row, p in zip(rows, places, strict=True):
            assert np.array_equal(row[0], case.whole[p + step])


def test_a_row_has_the_same_bits_beside_strips_of_other_lengths_and_a_chunk(case: Case) -> None:
    places, widths = [3, 254, 300, 40], [1, 4, 9, 200]
    talks = [case.at(p) for p in places]
    rows = together([(t, case.tokens[p : p + n]) for t, p, n in zip(talks, places, widths, strict=True)])
    for found, p, n in zip(rows, places, widths, strict=True):
        assert np.array_equal(found, case.whole[p : p + n])


@pytest.mark.parametrize("chunks", [(1, 2, 3, 5, 8, 13, 21), (255, 2, 100)])
def test_a_prompt_has_the_same_bits_in_any_chunks(case: Case, chunks: tuple[int, ...]) -> None:
    assert np.array_equal(Talk(case.engine).feed(case.tokens, *chunks), case.whole)


def test_a_row_has_the_same_bits_over_one_segment_or_many(case: Case) -> None:
    talk = Talk(case.engine, BLOCK)
    rows = [talk.feed(case.tokens[:BLOCK], 77)]
    for first in range(BLOCK, LENGTH, BLOCK):
        talk.extend(BLOCK)
        rows.append(talk.feed(case.tokens[first : first + BLOCK], 31))
    assert np.array_equal(np.concatenate(rows), case.whole)


def test_forks_answer_as_if_each_were_alone(case: Case) -> None:
    cut = BLOCK + 17
    forks = [case.at(cut).fork() for _ in range(3)]
    for step in range(2):
        rows = together([(f, [case.tokens[cut + step]]) for f in forks])
        assert all(np.array_equal(row[0], case.whole[cut + step]) for row in rows)


def test_rows_read_out_and_written_elsewhere_are_as_good_as_new_ones(case: Case) -> None:
    cut, pool = BLOCK + 40, case.engine.pool
    rows = {key: array.copy() for key, array in read_rows(pool, case.talk.leaf, 0, cut).items()}
    written, filled = Talk(case.engine), Talk(case.engine)
    write_rows(pool, written.leaf, 0, rows)
    slots = row_slots(pool, filled.leaf)
    assert slots is not None
    fill(slots, 0, rows)
    for talk in (written, filled):
        talk.position = cut
        assert np.array_equal(talk.feed(case.tokens[cut : cut + 30], 7), case.whole[cut : cut + 30])


def test_resized_buffers_keep_their_rows(case: Case) -> None:
    talk, pool = case.at(BLOCK + 3), case.engine.pool
    layers = len(case.engine.layout.layers)
    pool.apply(tuple(ResizeLayer(talk.leaf, i, 2 * BLOCK, talk.position) for i in range(layers)))
    talk.end = talk.start + 2 * BLOCK
    assert {array.shape[1] for array in pool.segments[talk.leaf].flat()} == {2 * BLOCK}
    assert np.array_equal(talk.feed(case.tokens[talk.position :][:20]), case.whole[BLOCK + 3 : BLOCK + 23])


def test_rows_are_written_in_place(case: Case) -> None:
    talk = Talk(case.engine)

    def addresses() -> list[int]:
        flat = case.engine.pool.segments[talk.leaf].flat()
        return [np.array(a, copy=False).__array_interface__["data"][0] for a in flat]

    talk.feed(case.tokens[:9])
    before = addresses()
    talk.feed(case.tokens[9:60], 40, 1)
    assert addresses() == before


@pytest.mark.parametrize(("bits", "row"), [(8, 72), (4, 40)])
def test_a_row_of_a_head_takes_its_bits_and_a_scale_and_bias_instead_of_256_bytes(bits: int, row: int) -> None:
    plain, small = (opened(tiny("llama", **WIDE), kv_bits=b) for b in (None, bits))
    assert plain.layout.row_bytes == 2 * 2 * 2 * 256
    assert small.layout.row_bytes == 2 * 2 * 2 * row
    for engine in (plain, small):
        held = mx.get_active_memory()
        talk = Talk(engine, 8 * BLOCK)
        assert mx.get_active_memory() - held == engine.layout.row_bytes * 8 * BLOCK
        assert engine.pool.segments[talk.leaf].capacity == 8 * BLOCK


def test_a_long_conversation_is_never_float_as_a_whole() -> None:
    engine = opened(tiny("llama", **WIDE), kv_bits=8, context=1 << 15)
    talk = Talk(engine, 64 * BLOCK)
    talk.position = 64 * BLOCK - 10
    floats = 64 * BLOCK * 2 * 64 * 4
    with mock.patch.object(quantized, "PART_BYTES", floats // 64):
        talk.feed([1])
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        talk.feed([1, 2], 1)
        assert mx.get_peak_memory() - held < floats * 3 // 4


def test_drafts_past_a_rejected_one_are_written_over() -> None:
    case = case_of("groups of 64", 8)
    talk = case.at(100)
    talk.feed([7, 7, 7, 7, 7, 7])
    talk.position = 101
    assert not np.array_equal(talk.feed([7]), case.whole[101:102])
    talk.position = 100
    assert np.array_equal(talk.feed(case.tokens[100:140], 5), case.whole[100:140])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_hybrid_keeps_its_states_and_quantizes_its_attention(bits: int) -> None:
    config = SERVED["qwen3_5"] | {"head_dim": 64}
    engine = opened(tiny("qwen3_5", **config), kv_bits=bits)
    kept = [(layer.kind, layer.bits) for layer in engine.layout.layers]
    assert set(kept) == {("recurrent", None), ("attention", bits)}
    tokens = np.random.default_rng(2).integers(0, 128, 300).tolist()
    whole = Talk(engine).feed(tokens)
    assert np.array_equal(Talk(engine).feed(tokens, 100, 1, 1, 7), whole)


@pytest.mark.model
@pytest.mark.parametrize("bits", [8, 4])
def test_the_bundled_model_keeps_the_contract(bits: int) -> None:
    engine = opened(load("smollm2"), kv_bits=bits)
    case = Case(engine, 40_000, BLOCK + 12)
    assert np.array_equal(Talk(engine, 2 * BLOCK).feed(case.tokens, 200, 50, 3, 9, 5, 1), case.whole)
    places = [2, 64, 255, 256]
    talks = [*map(case.at, places), case.at(BLOCK + 4).fork()]
    rows = together([(t, case.tokens[t.position : t.position + 2]) for t in talks])
    for found, p in zip(rows, [*places, BLOCK + 4], strict=True):
        assert np.array_equal(found, case.whole[p : p + 2])
