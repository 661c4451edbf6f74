"""What quantized rows do to output is measured rightly, and refused where it is too much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime import fidelity
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.fidelity import ROWS, check, compared, sample
from onecopy.runtime.models.layouts import ModelRows
from onecopy.runtime.models.load import load
from onecopy.runtime.models.quantizable import quantized_rows
from onecopy.runtime.rows.attention import RowTile
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.layout import LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.quantized import quantized_layer

from tests.support.engines import opened
from tests.support.qwen4_tiny import write_served
from tests.support.tiny import tiny
from tests.support.zoo import SERVED

PLAIN = LayerLayout("attention", (RowTensor("kv", 2, 64),))
TOKENS = tuple(range(100))


def logs(*shares: float) -> list[float]:
    return np.log(shares).tolist()


def test_divergence_is_that_of_kullback_and_leibler_and_the_likeliest_token_is_compared() -> None:
    plain = np.array([logs(0.5, 0.25, 0.25), logs(0.8, 0.1, 0.1)], np.float32) + 3
    rounded = np.array([logs(0.25, 0.5, 0.25), logs(0.8, 0.1, 0.1)], np.float32)
    same, divergence, apart = compared(plain, rounded)
    assert same.tolist() == [False, True]
    np.testing.assert_allclose(divergence, [0.25 * np.log(2), 0], atol=1e-6)
    np.testing.assert_allclose(apart, [3 + np.log(2), 3], atol=1e-6)


def test_tokens_that_the_model_rules_out_are_left_out() -> None:
    ruled_out = np.array([[1.0, 2.0, -np.inf]], np.float32)
    _, divergence, apart = compared(ruled_out, ruled_out)
    assert (float(divergence[0]), float(apart[0])) == (0.0, 0.0)


class Says:
    """Stands for a forward: the model's own logits on one pool, those of `rounded` on the other."""

    def __init__(self, own: Pool, rounded: Any) -> None:
        self.plain = np.random.default_rng(3).standard_normal((len(TOKENS), 7), dtype=np.float32)
        self._own, self._rounded = own, rounded

    def __call__(self, strips: Sequence[Any], pool: Pool, _: RowTile) -> mx.array:
        (strip,) = strips
        rows = self.plain if pool is self._own else self._rounded(self.plain.copy())
        return mx.array(rows[strip.position : strip.end])


def checked(rounded: Any) -> fidelity.Fidelity:
    own = Pool(Layout((PLAIN, PLAIN)))
    small = Pool(Layout((quantized_layer(PLAIN, 8), PLAIN)), lambda t: mx.uint8 if t.itemsize == 1 else mx.float32)
    forward: Any = Says(own, rounded)
    found = check("m", forward, own, small, RowTile(), TOKENS)
    assert not own.segments
    assert not small.segments
    return found


def changed(rows: int) -> Any:
    """Another likeliest token in so many rows."""

    def change(logits: Any) -> Any:
        logits[np.arange(rows), logits[:rows].argmin(axis=1)] = 9
        return logits

    return change


def test_the_figures_are_those_of_all_rows() -> None:
    found = checked(changed(25))
    assert (found.bits, found.layers, found.of, found.rows, found.same_token) == (8, 1, 2, 100, 0.75)
    assert 9 < found.largest_difference < 13
    assert 0 < found.mean_kl < 10
    assert checked(lambda logits: logits).figures == found.figures | {
        "same_token": 1.0,
        "mean_kl": 0.0,
        "largest_difference": 0.0,
    }


def test_fewer_than_half_of_the_likeliest_tokens_are_refused_and_half_of_them_are_not() -> None:
    assert checked(changed(50)).same_token == 0.5
    with pytest.raises(ModelLoadError, match=r"no longer resembles .* the same at 49\.0%"):
        checked(changed(51))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_single_number_that_is_not_finite_is_refused(value: float) -> None:
    def spoilt(logits: Any) -> Any:
        logits[70, 3] = value
        return logits

    with pytest.raises(ModelLoadError, match="every number finite"):
        checked(spoilt)


def test_the_tokens_are_the_same_each_time_and_a_text_where_the_model_reads_text() -> None:
    bare = tiny("llama")
    assert sample(bare, 128, 4096) == sample(bare, 128, 4096)
    assert len(sample(bare, 128, 4096)) == ROWS
    assert max(sample(bare, 128, 4096)) < 128
    assert len(sample(bare, 128, 50)) == 50


@pytest.mark.model
def test_eight_bits_say_nearly_what_the_bundled_model_says_and_four_say_less() -> None:
    loaded = load("smollm2")
    tokens = sample(loaded, 49152, 8192)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(tokens).startswith("The lighthouse at the end of the bay")
    eight, four = (opened(load("smollm2"), kv_bits=bits).fidelity for bits in (8, 4))
    assert eight is not None
    assert four is not None
    assert eight.rows == four.rows == ROWS
    assert eight.same_token > 0.97 > four.same_token > 0.6
    assert eight.mean_kl < 0.002 < four.mean_kl < 0.5
    assert eight.largest_difference < four.largest_difference


# --- what cannot be quantized


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("llama", {}, "attention layers of a head width of 16, which is no multiple of 32"),
        ("mamba", SERVED["mamba"], "recurrent layers keep a state and no rows"),
        ("deepseek_v2", SERVED["deepseek_v2"], "attention layers of a head width of 16, which is no multiple of 32"),
    ],
)
def test_a_model_without_a_layer_that_can_is_refused_in_one_line(kind: str, config: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadError) as refusal:
        opened(tiny(kind, **config), kv_bits=8)
    assert str(refusal.value) == f"{kind}: --kv-bits 8: no layer can keep quantized rows: {why}."


def test_indexed_layers_are_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError, match="qsa layers pick rows out one by one"):
        opened(load(str(write_served(tmp_path / "indexed"))), kv_bits=8, context=64)


@pytest.mark.parametrize("bits", [0, 3, 16])
def test_bits_that_are_not_offered_are_refused(bits: int) -> None:
    with pytest.raises(ModelLoadError, match=f"rows cannot be kept in {bits} bits; --kv-bits takes 8 or 4"):
        opened(tiny("llama", head_dim=64), kv_bits=bits)


def test_layers_that_cannot_stay_as_they_are_beside_those_that_can() -> None:
    narrow, wide = (LayerLayout("attention", (RowTensor("kv", 4, width),)) for width in (80, 64))
    state = LayerLayout("recurrent", anchor_bytes=64)
    types = {t: mx.float32 for layer in (narrow, wide) for t in layer.rows}
    rows = ModelRows(Layout((narrow, state, wide)), (), types, (), (), None)
    made = quantized_rows(rows, 8, "mixed")
    assert made.layout.layers == (narrow, state, quantized_layer(wide, 8))
    assert [made.dtype(t) for t in made.layout.layers[2].rows] == [mx.uint8, mx.float32, mx.float32]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_rows_are_quantized_too_with_scales_of_their_type(dtype: Any) -> None:
    loaded = tiny("llama", head_dim=64, scale=1.0)
    loaded.model.set_dtype(dtype)
    plain = opened(loaded)
    loaded = tiny("llama", head_dim=64, scale=1.0)
    loaded.model.set_dtype(dtype)
    engine = opened(loaded, kv_bits=8)
    assert plain.layout.row_bytes == 2 * 2 * 2 * 128
    assert engine.layout.row_bytes == 2 * 2 * 2 * 68
    assert engine.fidelity is not None
    assert engine.fidelity.same_token > 0.8
