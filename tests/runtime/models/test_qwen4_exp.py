"""qwen4_exp against the public reference's logits and against a NumPy one, over several shapes of the family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.models.qwen4_exp import load_qwen4_exp, mtp_logits
from onecopy.runtime.models.qwen4_exp.memory import Buffers, MemoryIndexed
from onecopy.runtime.models.qwen4_exp.topk import introselect

from tests.support.qwen4_reference import Reference
from tests.support.qwen4_run import Selections, feed, feed_together, fresh, in_steps
from tests.support.qwen4_tiny import draw, tiny, write

DATA = Path(__file__).parents[2] / "data" / "qwen4_exp" / "ref.npz"
BAR = 1e-5

SHAPES: dict[str, dict[str, Any]] = {
    "several PLE layers": {"ple_layer_ids": [1, 2, 6], "num_hidden_layers": 8},
    "PLE with longer n-grams": {"ngram_size": 4, "ple_embed_dim": 48, "ple_conv_kernel_size": 3},
    "ratio that divides no block": {"indexer_compress_ratio": 3, "indexer_budget": 12, "indexer_n_heads": 2},
    "wider blocks and budget": {"indexer_compress_ratio": 8, "indexer_budget": 32},
    "other head counts": {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "indexer_n_heads": 8,
        "indexer_head_dim": 24,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 3,
    },
    "other experts and gates": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "output_gate_type": None,
        "hc_count": 2,
    },
    "biases and an EOS list": {
        "attention_bias": True,
        "eos_token_id": [5, 1],
        "full_attention_interval": 2,
        "ple_layer_ids": [3],
    },
}


def prompt(length: int, eos: int = 1) -> list[int]:
    """Random ids with two EOS close together and a repeated stretch."""
    ids = np.random.default_rng(length).integers(6, 512, length)
    ids[[length // 3, length // 3 + 2]] = eos
    ids[length // 2 : length // 2 + 4] = ids[3:7]
    return ids.tolist()


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The committed run replayed: its prompt in one prefill, its forty greedy tokens one by one."""
    ref = dict(np.load(DATA))
    model, _ = load_qwen4_exp(write(tmp_path_factory.mktemp("tiny"), tiny()))
    with pytest.MonkeyPatch.context() as patch:
        selections = Selections(model, patch)
        conversation = fresh(model)
        prefill = feed(model, conversation, ref["prompt"].tolist())
        decode = in_steps(model, conversation, ref["greedy"].tolist(), [1] * len(ref["greedy"]))
    return {"ref": ref, "prefill": prefill, "decode": decode, "selections": selections}


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_logits_equal_the_public_reference(reference_run: dict[str, Any], part: str) -> None:
    expected = reference_run["ref"][f"{part}_logits"]
    assert np.abs(reference_run[part] - expected).max() <= BAR
    assert (reference_run[part].argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("layer", [3, 7])
def test_selection_masks_equal_the_public_reference(reference_run: dict[str, Any], layer: int) -> None:
    ref = reference_run["ref"]
    size, prefilled = len(ref["prompt"]) + len(ref["greedy"]), len(ref["prompt"])
    expected = np.zeros((size, size), bool)
    expected[:prefilled, :prefilled] = ref[f"sel_L{layer}_prefill"]
    expected[prefilled:] = ref[f"sel_L{layer}_decode"]
    assert (reference_run["selections"].mask(layer, size) == expected).all()
    assert expected.sum() < np.tril(np.ones_like(expected)).sum(), "the budget must really drop rows"


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_equals_the_numpy_reference(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(**{"num_hidden_layers": 4, **SHAPES[name]})
    model, _ = load_qwen4_exp(write(tmp_path, config))
    reference = Reference(config, draw(config), introselect)
    selections = Selections(model, monkeypatch)
    ids = prompt(90, model.config.eos)
    expected, logits = reference.logits(ids), feed(model, fresh(model), ids)
    assert np.abs(logits - expected).max() <= BAR
    for layer, mask in reference.selected.items():
        assert (selections.mask(layer, len(ids)) == mask).all()


@pytest.mark.parametrize("widths", [[7, 40, 1, 100, 52], [128, 64, 8]], ids=str)
def test_long_prompts_in_chunks_equal_the_numpy_reference(widths: list[int], tmp_path: Path) -> None:
    config = tiny(num_hidden_layers=4, indexer_budget=64)
    model, _ = load_qwen4_exp(write(tmp_path, config))
    ids = prompt(200)
    logits = in_steps(model, fresh(model), ids, widths)
    assert np.abs(logits - Reference(config, draw(config), introselect).logits(ids)).max() <= BAR


def test_a_batch_of_unequal_lengths_equals_the_numpy_reference(tmp_path: Path) -> None:
    config = tiny(num_hidden_layers=4)
    model, _ = load_qwen4_exp(write(tmp_path, config))
    reference = Reference(config, draw(config), introselect)
    prompts = [prompt(n) for n in (70, 9, 33)]
    conversations = [fresh(model) for _ in prompts]
    for conversation, ids in zip(conversations, prompts, strict=True):
        feed(model, conversation, ids[:-3])
    together = feed_together(model, conversations, [ids[-3:] for ids in prompts])
    for logits, ids in zip(together, prompts, strict=True):
        assert np.abs(logits - reference.logits(ids)[-3:]).max() <= BAR


def test_tied_embeddings_serve_as_the_head(tmp_path: Path) -> None:
    config = tiny(num_hidden_layers=4, tie_word_embeddings=True)
    model, _ = load_qwen4_exp(write(tmp_path, config))
    ids = prompt(30)
    expected = Reference(config, draw(config), introselect).logits(ids)
    # Embeddings of unit size make logits eight times as large as those of a scaled head.
    assert np.abs(feed(model, fresh(model), ids) - expected).max() <= 8 * BAR


def test_the_mtp_head_equals_the_numpy_reference(tmp_path: Path) -> None:
    config = tiny(num_hidden_layers=4)
    model, _ = load_qwen4_exp(write(tmp_path, config, mtp=1))
    reference = Reference(config, draw(config, mtp=1), introselect)
    ids = prompt(60)
    streams = reference.streams(ids)[:-1]
    rows = MemoryIndexed([Buffers.empty(model.config)], [0], model.config)
    logits, _ = mtp_logits(model, mx.array(streams.astype(np.float32))[None], [ids[1:]], rows)
    assert np.abs(np.array(logits[0]) - reference.mtp_logits(streams, ids[1:])).max() <= BAR
