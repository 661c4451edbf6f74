"""Experts' products do not depend on how many rows run, nor on whether they were sorted."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from onecopy.runtime.numerics.experts import RowExperts, is_experts

RNG = np.random.default_rng(5)
K, OUT, EXPERTS, PICKS = 64, 96, 4, 2


@pytest.mark.parametrize("bias", [True, False])
def test_the_rows_are_those_of_mlx_lm(bias: bool) -> None:
    own = SwitchLinear(K, OUT, EXPERTS, bias=bias)
    if bias:
        own.bias = mx.array(RNG.standard_normal((EXPERTS, OUT), dtype=np.float32))
    assert is_experts(own)
    x = mx.array(RNG.standard_normal((9, 1, 1, K), dtype=np.float32))
    picks = mx.array(RNG.integers(0, EXPERTS, (9, PICKS)))
    found = np.array(RowExperts(own)(x, picks))
    assert found.shape == (9, PICKS, 1, OUT)
    np.testing.assert_allclose(found, np.array(own(x, picks)), rtol=1e-4, atol=1e-4)


def test_sorted_or_not_a_row_has_the_same_bits() -> None:
    glu = SwitchGLU(K, OUT, EXPERTS)
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(glu, name, RowExperts(glu[name]))
    x = mx.array(RNG.standard_normal((200, K), dtype=np.float32))
    picks = mx.array(RNG.integers(0, EXPERTS, (200, PICKS)))
    whole = np.array(glu(x, picks))
    for n in (1, 2, 5, 31, 32, 33, 64, 100):  # sorted from 64 picks on
        assert np.array_equal(np.array(glu(x[7 : 7 + n], picks[7 : 7 + n])), whole[7 : 7 + n])


def test_other_types_are_left_to_mlx_lm() -> None:
    half = SwitchLinear(K, OUT, EXPERTS)
    half.set_dtype(mx.bfloat16)
    assert not is_experts(half)
    assert not is_experts(RowExperts(SwitchLinear(K, OUT, EXPERTS)))
