"""Stand-ins for mlx-lm's modules compute what those compute."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu as compiled
from mlx_lm.models.cache import make_prompt_cache
from onecopy.runtime.blas.gemm import ready
from onecopy.runtime.engine import Engine
from onecopy.runtime.numerics import blocks
from onecopy.runtime.numerics.arrange import PLAIN, Cut, Turned, Way
from onecopy.runtime.numerics.blocks import RowAttention, RowFeedForward, RowNorm, swiglu
from onecopy.runtime.numerics.few import FEW
from onecopy.runtime.numerics.linear import RowLinear
from onecopy.runtime.numerics.prepare import linear_shapes, prepare
from onecopy.runtime.numerics.rope import HeadTable, RopeTable, TableRope, inverse_frequencies
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ops import Allocate, Chain, Link
from onecopy.runtime.rows.plan import Strip

from tests.support.tiny import tiny

RNG = np.random.default_rng(4)


def values(*shape: int) -> mx.array:
    return mx.array(RNG.standard_normal(shape, dtype=np.float32))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [16, 8])
def test_a_table_turns_as_mlx_does(traditional: bool, dims: int) -> None:
    rope = nn.RoPE(dims, traditional=traditional, base=1000.0, scale=0.5)
    found = inverse_frequencies(rope)
    assert found is not None
    table = TableRope(dims, traditional, RopeTable(found[0], found[1], 64), rope)
    x = values(3, 2, 5, 16)
    starts = mx.array([0, 7, 40])
    np.testing.assert_allclose(np.array(table(x, offset=starts)), np.array(rope(x, offset=starts)), atol=1e-5)
    np.testing.assert_allclose(np.array(table(x, offset=3)), np.array(rope(x, offset=3)), atol=1e-6)


@pytest.mark.parametrize("traditional", [False, True])
def test_all_heads_are_turned_at_once_queries_scaled_and_values_left(traditional: bool) -> None:
    rope = nn.RoPE(16, traditional=traditional)
    inverse, scale, _, _ = inverse_frequencies(rope)  # type: ignore[misc]
    table = HeadTable(RopeTable(inverse, scale, 64), traditional, (4, 2, 2), 0.25)
    x, positions = values(3, 8 * 16), mx.array([5, 0, 63])
    heads = x.reshape(3, 8, 1, 16)
    turned = np.array(rope(heads, offset=positions))[:, :, 0]
    found = np.array(table.turn(x, positions))
    np.testing.assert_allclose(found[:, :4], 0.25 * turned[:, :4], atol=1e-5)
    np.testing.assert_allclose(found[:, 4:6], turned[:, 4:6], atol=1e-5)
    assert np.array_equal(found[:, 6:], np.array(heads)[:, 6:, 0])
    assert np.array_equal(table.turned(np.array(x), positions), found)


def test_swiglu_is_mlx_lms() -> None:
    gate, x = values(5, 40) * 20, values(5, 40)
    np.testing.assert_allclose(np.array(swiglu(gate, x)), np.array(compiled(gate, x)), rtol=1e-5, atol=1e-6)
    assert np.array(swiglu(mx.array([-1e4, 1e4]), mx.array([2.0, 2.0]))).tolist() == [0.0, 2e4]


def test_a_norm_is_mlxs() -> None:
    x, weight = values(9, 576) * 3, values(576)
    norm, plain = RowNorm(weight, 1e-5), nn.RMSNorm(576, 1e-5)
    plain.weight = weight
    found = np.array(norm(x))
    np.testing.assert_allclose(found, np.array(plain(x)), rtol=1e-5, atol=1e-6)
    assert np.array_equal(norm.rows(np.array(x)), found)
    assert np.array_equal(np.array(norm(x[4:5])), found[4:5])


@pytest.mark.parametrize("how", [PLAIN, Cut(32, unit=4), Turned()], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_numpy_gets_the_rows_that_mlx_gets(how: Way, biased: bool) -> None:
    joined, down = (RowLinear(values(m, k), values(m) if biased else None, how) for m, k in ((192, 64), (64, 96)))
    x = values(3, 64)
    block = RowFeedForward(joined, down)
    assert np.array_equal(joined.rows(np.array(x)), np.array(joined(x)))
    assert np.array_equal(block.rows(np.array(x)), np.array(block(x)))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_rounds_of_few_rows_compute_blocks_by_numpy_and_answer_the_same(kind: str) -> None:
    found = []
    for few in (FEW, 0):
        pool_engine = Engine.open(tiny(kind), context=512, stopwatch=lambda: 0.0)
        with mock.patch.object(blocks, "FEW", few), mock.patch.object(blocks, "_rows", wraps=blocks._rows) as by_numpy:
            pool_engine.pool.apply((Allocate(1, 0, BLOCK), Allocate(2, 0, BLOCK)))
            strips = [Strip(Chain((Link(i, 0, 0),), BLOCK), 0, (7, i, 3), 3) for i in (1, 2)]
            logits = pool_engine.forward(strips)
            pool_engine.settle(strips, logits)
            assert by_numpy.call_count == (2 if few and ready() else 0)
        found.append(np.array(logits))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    if pool_engine.exactness[0] == "exact":
        assert np.array_equal(found[0], found[1])


def test_a_prepared_model_still_answers_through_mlx_lms_own_caches() -> None:
    tokens = mx.array([[3, 1, 4, 1, 5]])
    plain, prepared = tiny("llama").model, tiny("llama").model
    done = prepare(prepared, lambda *_: PLAIN, 64)
    assert (done.blocks, done.ropes) == (4, 2)
    assert sum(isinstance(m, RowAttention | RowFeedForward) for m in prepared.modules()) == 4
    want = plain(tokens, cache=make_prompt_cache(plain))
    found = prepared(tokens, cache=make_prompt_cache(prepared))
    np.testing.assert_allclose(np.array(found), np.array(want), atol=1e-4)


def shapes(kind: str, **config: Any) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    return linear_shapes(tiny(kind, **config).model)


def test_shapes_are_those_after_fusing_and_the_head_apart() -> None:
    assert shapes("llama") == ({(128, 64), (64, 64), (192, 64), (64, 96)}, {(128, 64)})
    assert (128, 64) in shapes("llama", tie_word_embeddings=False)[1]
