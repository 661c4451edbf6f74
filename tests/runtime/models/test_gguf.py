from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models import load, resolve
from onecopy.runtime.models.families import build
from onecopy.runtime.models.gguf_config import llama3_scaling
from onecopy.runtime.models.gguf_header import read_header
from onecopy.runtime.models.gguf_tensors import read_only

from tests.support.gguf import entry, gguf_weights, metadata, packed_gguf, random_model, raw_gguf, tensor, write_gguf

PROMPT = mx.array([[1, 50, 3, 200, 9]])


def expected(config: dict[str, Any], weights: dict[str, mx.array]) -> np.ndarray:
    model = build(config, Path("tiny"))
    model.load_weights(list(weights.items()))
    return np.array(model(PROMPT))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_comes_back_with_the_same_logits(tmp_path: Path, kind: str, tied: bool) -> None:
    path, config, weights = write_gguf(tmp_path / "tiny.gguf", kind, tied=tied)
    loaded = load(str(path), dtype="float32")
    np.testing.assert_allclose(np.array(loaded.model(PROMPT)), expected(config, weights), atol=1e-6)
    assert (loaded.id, loaded.kind, loaded.context, loaded.quantization) == ("tiny", "gguf", 512, None)
    assert loaded.config["tie_word_embeddings"] is tied
    assert loaded.eos == {7}


def test_llama_query_and_key_rows_come_back_in_their_published_order(tmp_path: Path) -> None:
    path, _, weights = write_gguf(tmp_path / "tiny.gguf", "llama", rope_theta=5e5)
    stored = mx.load(str(path))
    parameters = dict(tree_flatten(load(str(path)).model.parameters()))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert not mx.array_equal(stored["blk.1.attn_q.weight"], weights[name]).item()
    assert mx.array_equal(parameters[name], weights[name]).item()


def test_f16_weights_become_f32_exactly(tmp_path: Path) -> None:
    config, weights = random_model("qwen3")
    halves = {n: w.astype(mx.float16) for n, w in weights.items()}
    mx.save_gguf(str(tmp_path / "h.gguf"), gguf_weights(config, halves), metadata(config))
    found = dict(tree_flatten(load(str(tmp_path / "h.gguf"), dtype="float32").model.parameters()))
    assert all(mx.array_equal(found[n], w.astype(mx.float32)).item() for n, w in halves.items())


def test_another_file_has_another_digest(tmp_path: Path) -> None:
    one, _, _ = write_gguf(tmp_path / "one.gguf", seed=1)
    two, _, _ = write_gguf(tmp_path / "two.gguf", seed=2)
    assert load(str(one)).digest != load(str(two)).digest


@pytest.mark.model
def test_native_keeps_the_bundled_weights_packed_and_means_the_same() -> None:
    packed, plain = load("smollm2", dtype="native"), load("smollm2", dtype="float32")
    weights = dict(tree_flatten(packed.model.parameters()))
    assert weights["model.layers.3.self_attn.q_proj.weight"].dtype == mx.uint32
    assert weights["model.embed_tokens.weight"].dtype == mx.uint32
    ours = np.array(packed.model(PROMPT).astype(mx.float32))
    assert np.abs(ours - np.array(plain.model(PROMPT))).max() < 0.1


@pytest.mark.model
def test_reading_without_write_access_gives_the_same_arrays() -> None:
    path = resolve("smollm2").path
    wanted, found = mx.load(str(path)), read_only(read_header(path))
    assert wanted.keys() == found.keys()
    assert all(mx.array_equal(wanted[n], found[n]).item() and wanted[n].dtype == found[n].dtype for n in wanted)


@pytest.mark.parametrize(("kind", "size"), [(2, 18), (3, 20), (8, 34)])
def test_every_packed_type_reads_like_mlx_reads_it(tmp_path: Path, kind: int, size: int) -> None:
    data = np.random.default_rng(0).integers(0, 60, (4, 2, size), dtype=np.uint8).tobytes()
    path = raw_gguf(tmp_path / "p.gguf", [], [tensor("a.weight", (4, 64), kind, 0)], data)
    wanted, found = mx.load(str(path)), read_only(read_header(path))
    assert wanted.keys() == found.keys() == {"a.weight", "a.scales", "a.biases"}
    assert all(np.array_equal(np.array(wanted[n]), np.array(found[n])) for n in wanted)


def test_a_k_quant_without_write_access_is_named(tmp_path: Path) -> None:
    path = raw_gguf(tmp_path / "k.gguf", [], [tensor("a.weight", (1, 256), 14, 0)], bytes(210))
    with pytest.raises(ModelLoadError, match=r"Q6_K.*needs write access"):
        read_only(read_header(path))


def llama3_factors(factor: float, dims: int = 64, base: float = 5e5) -> mx.array:
    from mlx_lm.models.rope_utils import Llama3RoPE

    settings = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = Llama3RoPE(dims, base=base, scaling_config=settings | {"original_max_position_embeddings": 8192})._freqs
    return scaled / base ** (mx.arange(0, dims, 2) / dims)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_are_recognised(tmp_path: Path, factor: float) -> None:
    entries = [entry("general.architecture", 8, text_of("llama")), entry("llama.rope.freq_base", 6, f32(5e5))]
    header = read_header(raw_gguf(tmp_path / "r.gguf", entries, []))
    scaling = llama3_scaling(header, llama3_factors(factor))
    assert scaling["factor"] == pytest.approx(factor)
    assert scaling["original_max_position_embeddings"] == 8192
    with pytest.raises(ModelLoadError, match="no rule that is supported"):
        llama3_scaling(header, mx.linspace(1, 8, 32))


def text_of(value: str) -> bytes:
    return len(value).to_bytes(8, "little") + value.encode()


def f32(value: float) -> bytes:
    return np.float32(value).tobytes()


def test_a_file_with_rope_factors_loads_a_scaled_rope(tmp_path: Path) -> None:
    config, weights = random_model("llama", rope_theta=5e5)
    tensors = gguf_weights(config, weights) | {"rope_freqs.weight": llama3_factors(8.0, config["head_dim"])}
    mx.save_gguf(str(tmp_path / "r.gguf"), tensors, metadata(config))
    loaded = load(str(tmp_path / "r.gguf"))
    rope = loaded.model.layers[0].self_attn.rope
    assert loaded.config["rope_scaling"]["rope_type"] == "llama3"
    assert type(rope).__name__ == "Llama3RoPE"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["native", "float32"])
def test_packed_weights_beside_plain_biases_load(tmp_path: Path, kind: str, dtype: str) -> None:
    config, weights = random_model(kind, tied=False)
    stored = packed_gguf(tmp_path / "p.gguf", config, weights)
    loaded = load(str(tmp_path / "p.gguf"), dtype=dtype)
    meant = gguf_order_undone(config, stored, weights)
    np.testing.assert_allclose(np.array(loaded.model(PROMPT)), expected(config, meant), atol=2e-2)
    if dtype == "float32":
        found = dict(tree_flatten(loaded.model.parameters()))
        assert all(mx.allclose(found[n], w, atol=1e-6).item() for n, w in meant.items())
    assert loaded.quantization == {"source": "gguf", "types": ["Q8_0"]}


def gguf_order_undone(
    config: dict[str, Any], stored: dict[str, mx.array], weights: dict[str, mx.array]
) -> dict[str, mx.array]:
    """The file's values under mlx-lm's names and order: packing is per row, so rows are matched by what they were."""
    named = dict(zip(weights, gguf_weights(config, weights).items(), strict=True))
    meant = {}
    for name, (file_name, written) in named.items():
        rows = [int(mx.argmin(mx.abs(written - row).reshape(len(written), -1).sum(1))) for row in weights[name]]
        meant[name] = stored[file_name][mx.array(rows)]
    return meant


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("linear", {"rope_type": "linear", "factor": 2.0}),
        ("yarn", {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}),
        ("none", None),
    ],
)
def test_declared_rope_scaling_reaches_the_config(tmp_path: Path, kind: str, scaling: Any) -> None:
    config, weights = random_model("qwen3")
    keys = {
        "qwen3.rope.scaling.type": kind,
        "qwen3.rope.scaling.factor": mx.array(2.0),
        "qwen3.rope.scaling.original_context_length": mx.array(256, mx.uint32),
    }
    mx.save_gguf(str(tmp_path / "s.gguf"), gguf_weights(config, weights), metadata(config) | keys)
    loaded = load(str(tmp_path / "s.gguf"))
    assert loaded.config["rope_scaling"] == scaling
    assert loaded.model(PROMPT).shape == (1, 5, 320)
