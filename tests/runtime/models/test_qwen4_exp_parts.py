"""qwen4_exp's parts: config rules, n-gram hash and table, tie order, checkpoint layouts, one-line refusals."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models.qwen4_exp import is_qwen4_exp, load_qwen4_exp, parse_config
from onecopy.runtime.models.qwen4_exp.ngram import ngram_hash
from onecopy.runtime.models.qwen4_exp.table import NgramTable, tensor_places
from onecopy.runtime.models.qwen4_exp.topk import best_on_device, best_on_host, introselect

from tests.support.qwen4_reference import Reference
from tests.support.qwen4_run import feed, fresh
from tests.support.qwen4_tiny import tiny, write

SMALL = {"num_hidden_layers": 4, "num_experts": 4}
IDS = np.random.default_rng(8).integers(2, 512, 40).tolist()


def test_the_family_is_known_by_its_model_type() -> None:
    assert is_qwen4_exp({"model_type": "qwen4_exp"})
    assert is_qwen4_exp({"model_type": "qwen4_exp_text"})
    assert not is_qwen4_exp({"model_type": "qwen3_5"})


def test_a_multimodal_config_is_read_through_its_text_part() -> None:
    assert parse_config({"model_type": "qwen4_exp", "text_config": tiny()}) == parse_config(tiny())


def test_full_attention_means_indexed() -> None:
    kinds = [k.replace("indexed", "full") for k in tiny()["layer_types"]]
    assert parse_config(tiny(layer_types=kinds)) == parse_config(tiny())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ({"indexer_budget": 18}, "indexer_budget"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids"),
        ({"ple_embed_dim": 66}, "ple_embed_dim"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"hc_count": 1}, "hc_count"),
        ({"output_gate_type": "relu"}, "output_gate_type"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"indexer_n_heads": None}, "wrong type"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"indexer_head_dim": 8}, "rotated"),
    ],
)
def test_a_shape_that_cannot_run_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        parse_config({**tiny(), **change})


def test_a_missing_field_is_named() -> None:
    config = tiny()
    del config["indexer_budget"]
    with pytest.raises(ModelLoadError, match="indexer_budget"):
        parse_config(config)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_row_ids_equal_plain_integer_arithmetic(index: int) -> None:
    raw = tiny(ngram_size=4, ple_embed_dim=48, vocab_size=1 << 20)
    hashed = ngram_hash(parse_config(raw), index)
    ids = np.random.default_rng(index).integers(0, 1 << 20, 60).tolist()
    ids[10] = ids[12] = ids[30] = 1
    history = np.array([[1] * hashed.context + ids])
    reference = Reference(raw, {}, introselect)
    assert hashed(history)[0].tolist() == [reference.ngram_rows(ids, t, index) for t in range(len(ids))]


def test_hash_constants_are_the_published_ones() -> None:
    hashed = ngram_hash(parse_config(tiny()), 0)
    assert hashed.multipliers.tolist() == [4295158889763781, 17440218147737327, 1270917961434445]
    assert hashed.primes.tolist() == [1009, 1013, 1019, 1021]
    assert (hashed.offsets.tolist(), hashed.rows) == ([0, 1009, 2022, 3041], 4096)


@pytest.mark.parametrize("kind", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_table_rows_come_from_the_right_shard_in_any_stored_type(kind: mx.Dtype, tmp_path: Path) -> None:
    rows = mx.array(np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)).astype(kind)
    mx.save_safetensors(str(tmp_path / "t.safetensors"), {"a": rows[:20], "b": rows[20:21], "c": rows[21:]})
    places = tensor_places(tmp_path / "t.safetensors")
    table = NgramTable([places[name] for name in "abc"])
    ids = np.array([[0, 19, 20], [21, 49, 20]])
    assert (table.rows, table.width) == (50, 6)
    assert np.array_equal(table.take(ids), np.array(rows.astype(mx.float32))[ids])


def test_a_table_is_never_loaded_whole(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "t.safetensors"), {"a": mx.zeros((1 << 18, 16))})
    tracemalloc.start()
    try:
        table = NgramTable([tensor_places(tmp_path / "t.safetensors")["a"]])
        table.take(np.arange(0, 1 << 18, 4096))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20 < (1 << 18) * 16 * 4


def test_loading_leaves_the_table_in_its_file(tmp_path: Path) -> None:
    model, _ = load_qwen4_exp(write(tmp_path, tiny(**SMALL, ngram_vocab_size_base=200_000)))
    held = sum(value.nbytes for _, value in _flat(model))
    assert held < 200_000 * 16 * 4 < (tmp_path / "model.safetensors").stat().st_size
    assert isinstance(model.layers[1].ple._table._maps[0], np.memmap)


def _flat(model: Any) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())  # type: ignore[no-any-return]


def test_ties_fall_as_in_the_published_routine() -> None:
    scores = [0, 0.5, 0, 1, 0, 0, 2, 0, 0.5, 0]
    picked = {k: sorted(introselect(scores, k)) for k in (1, 3, 5, 6, 7, 8, 9)}
    assert picked == {
        1: [6],
        3: [3, 6, 8],
        5: [0, 1, 3, 6, 8],
        6: [0, 1, 3, 6, 7, 8],
        7: [0, 1, 3, 6, 7, 8, 9],
        8: [0, 1, 3, 5, 6, 7, 8, 9],
        9: [0, 1, 3, 4, 5, 6, 7, 8, 9],
    }


def test_two_hundred_tied_rows_fall_as_in_the_published_routine() -> None:
    """The digest is that of `sorted(torch.topk(scores, k).indices)` on a CPU over the same rows."""
    picks = []
    for seed in range(200):
        g = np.random.default_rng(seed)
        n = int(g.integers(2, 120))
        k = int(g.integers(max(1, n // 60), n))
        scores = np.maximum(g.integers(-6, 6, n), 0).astype(np.float32) / 4
        picks.append(sorted(introselect(scores.tolist(), k)))
    digest = hashlib.sha256(json.dumps(picks).encode()).hexdigest()
    assert digest == "f14ed47f3b2403a1cf088c487dcc3b7818c22306071c687a254a56fb804c23ce"


def test_host_and_device_pick_the_same_blocks_when_nothing_ties() -> None:
    scores = np.random.default_rng(1).random((5, 64), np.float32)
    complete = np.array([9, 20, 33, 50, 64])
    on_host = best_on_host(scores, complete, 8)
    assert np.array_equal(on_host, np.array(best_on_device(mx.array(scores), complete, 8)))
    assert np.array_equal(on_host[4], np.sort(np.argsort(-scores[4])[:8]))


def test_the_device_gives_ties_to_the_earlier_block_and_ignores_unfinished_ones() -> None:
    scores = mx.array([[0.0, 3.0, 0.0, 1.0, 0.0, 9.0]])
    assert np.array(best_on_device(scores, np.array([5]), 3)).tolist() == [[0, 1, 3]]


def test_names_under_a_multimodal_wrapper_load_alike(tmp_path: Path) -> None:
    config = tiny(**SMALL)
    plain, _ = load_qwen4_exp(write(tmp_path / "a", config))
    wrapped, _ = load_qwen4_exp(write(tmp_path / "b", config, prefix="model.language_model."))
    assert np.array_equal(feed(plain, fresh(plain), IDS), feed(wrapped, fresh(wrapped), IDS))


def test_fused_experts_load_alike(tmp_path: Path) -> None:
    config = tiny(**SMALL)
    split, _ = load_qwen4_exp(write(tmp_path / "a", config))
    write(tmp_path / "b", config)
    file = str(tmp_path / "b" / "model.safetensors")
    mx.save_safetensors(file, _fused(mx.load(file), config))
    fused, _ = load_qwen4_exp(tmp_path / "b")
    assert np.array_equal(feed(split, fresh(split), IDS), feed(fused, fresh(fused), IDS))


def _fused(weights: Any, config: dict[str, Any]) -> dict[str, mx.array]:
    out = {n: mx.array(np.array(w)) for n, w in weights.items() if ".experts." not in n}
    for i in range(config["num_hidden_layers"]):
        stem, each = f"model.layers.{i}.mlp.experts.", range(config["num_experts"])
        gate, up, down = (
            mx.array(np.stack([np.array(weights[f"{stem}{e}.{n}_proj.weight"]) for e in each]))
            for n in ("gate", "up", "down")
        )
        out |= {f"{stem}gate_up_proj": mx.concatenate([gate, up], axis=1), f"{stem}down_proj": down}
    return out


def test_an_unknown_mtp_head_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, tiny(**SMALL))
    file = str(path / "model.safetensors")
    weights = {n: mx.array(np.array(w)) for n, w in mx.load(file).items()}  # type: ignore[union-attr]
    mx.save_safetensors(file, {**weights, "mtp.strange.weight": mx.zeros((2, 2))})
    assert "mtp" not in load_qwen4_exp(path)[0]


@pytest.mark.parametrize(("said", "used"), [(None, 2), (2, 2), (1, 0), (3, 0)])
def test_a_head_has_the_layers_that_its_config_says_or_is_left_out(tmp_path: Path, said: int | None, used: int) -> None:
    config = tiny(**SMALL) | ({} if said is None else {"mtp_num_hidden_layers": said})
    model, _ = load_qwen4_exp(write(tmp_path, config, mtp=2))
    assert (len(model.mtp.layers) if "mtp" in model else 0) == used


@pytest.mark.parametrize(
    ("gone", "says"),
    [("model.layers.0.mlp.gate.weight", "do not fit"), ("model.layers.1.ple.ple_embedding.ngram_embedding", "n-gram")],
)
def test_a_missing_tensor_is_one_clear_refusal(gone: str, says: str, tmp_path: Path) -> None:
    path = write(tmp_path, tiny(**SMALL))
    file = str(path / "model.safetensors")
    weights = {n: mx.array(np.array(w)) for n, w in mx.load(file).items()}  # type: ignore[union-attr]
    mx.save_safetensors(file, {n: w for n, w in weights.items() if not n.startswith(gone)})
    with pytest.raises(ModelLoadError, match=says):
        load_qwen4_exp(path)


def test_stored_hash_constants_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, tiny(**SMALL))
    file = str(path / "model.safetensors")
    weights = {n: mx.array(np.array(w)) for n, w in mx.load(file).items()}  # type: ignore[union-attr]
    stem = "model.layers.1.ple.ple_embedding."
    mx.save_safetensors(file, {**weights, f"{stem}layer_multipliers": mx.array([1, 2, 3], mx.int64)})
    with pytest.raises(ModelLoadError, match="layer_multipliers"):
        load_qwen4_exp(path)


def test_half_precision_is_for_matrices_only(tmp_path: Path) -> None:
    model, _ = load_qwen4_exp(write(tmp_path, tiny(**SMALL)), dtype=mx.bfloat16)
    kinds = {name.rsplit(".", 1)[0].rsplit(".", 1)[-1]: value.dtype for name, value in _flat(model)}
    small = {name for name, kind in kinds.items() if kind == mx.float32}
    assert small >= {"hc_norm", "q_norm", "k_layernorm", "norm_conv", "conv1d", "linear_attn"}
    assert {kinds[name] for name in ("embed_tokens", "q_proj", "down_proj", "lm_head")} == {mx.bfloat16}


def test_quantised_matrices_stay_packed_or_are_unpacked_as_asked(tmp_path: Path) -> None:
    path = write(tmp_path, tiny(**SMALL))
    config = {**tiny(**SMALL), "quantization": {"group_size": 32, "bits": 8}}
    (path / "config.json").write_text(json.dumps(config))
    file, packed = str(path / "model.safetensors"), {}
    for name, weight in mx.load(file).items():  # type: ignore[union-attr]
        packed[name] = mx.array(np.array(weight))
        if name.endswith(("lm_head.weight", "q_proj.weight")):
            stem = name.removesuffix("weight")
            packed |= dict(zip((name, f"{stem}scales", f"{stem}biases"), mx.quantize(weight, 32, 8), strict=True))
    mx.save_safetensors(file, packed)
    kept, _ = load_qwen4_exp(path, dtype=None)
    plain, _ = load_qwen4_exp(path)
    assert type(kept.lm_head).__name__ == "QuantizedLinear"
    assert type(plain.lm_head).__name__ == "Linear"
    assert np.allclose(feed(kept, fresh(kept), IDS[:12]), feed(plain, fresh(plain), IDS[:12]), atol=1e-4)
