"""What cannot be loaded is refused with one sentence that names the file and the reason."""

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models import load
from onecopy.runtime.models.families import classes
from onecopy.runtime.models.gguf_header import read_header
from onecopy.runtime.models.safetensors import check_file

from tests.support.checkpoints import write_checkpoint
from tests.support.gguf import entry, gguf_weights, metadata, random_model, raw_gguf, tensor, text, write_gguf


def refusal(path: Path | str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_missing_path_is_named_with_the_bundled_names(tmp_path: Path) -> None:
    assert "not a bundled name (smollm2)" in refusal(tmp_path / "nothing")


def test_a_directory_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)


def test_a_file_that_is_not_gguf_by_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "a directory or a .gguf file is needed" in refusal(tmp_path / "model.bin")


def test_an_unknown_weight_type_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"'int3' is unknown; known are float32, float16"):
        load("smollm2", dtype="int3")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[1]", "not a JSON object"),
        ("{}", "model_type is missing"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_a_bad_config_is_named(tmp_path: Path, content: str, reason: str) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    (path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    assert reason in refusal(path)


@pytest.mark.parametrize(
    ("kind", "hint"), [("qwen9", "nearest known are qwen"), ("zzzzzz", "not supported."), ("cache.x", "not supported")]
)
def test_an_unknown_architecture_is_named_with_the_nearest(tmp_path: Path, kind: str, hint: str) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    message = refusal(path)
    assert repr(kind) in message
    assert hint in message


def test_a_config_that_asks_for_its_own_code_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", model_file="evil.py")
    (path / "evil.py").write_text("raise SystemExit('ran')")
    assert "evil.py" in refusal(path)


@pytest.mark.parametrize("missing", ["hidden_size", "rms_norm_eps"])
def test_a_config_without_a_needed_field_is_refused(tmp_path: Path, missing: str) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    config = json.loads((path / "config.json").read_text())
    del config[missing]
    (path / "config.json").write_text(json.dumps(config))
    assert missing in refusal(path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    (path / "model.safetensors").unlink()
    assert "nothing matches model*.safetensors" in refusal(path)


def rewrite(path: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    weights = dict(mx.load(str(path / "model.safetensors")))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    rewrite(path, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight" in refusal(path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    rewrite(path, lambda w: w.update({"model.norm.weight": mx.zeros((63,))}))
    assert "model.norm.weight" in refusal(path)


@pytest.mark.parametrize("keep", [0, 7, 60, 5_000, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "truncated" in refusal_in(path, file)


def refusal_in(path: Path, file: Path) -> str:
    message = refusal(path)
    assert str(file) in message
    return message


def safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body) if length is None else length) + body + data)
    return path


def spec(start: int, end: int, **other: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end], **other}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "nested too deep"),
        ({"a": spec(0, 8), "b": spec(4, 12)}, "overlap"),
        ({"a": spec(0, 64)}, "truncated: tensor 'a' ends 48 bytes past"),
        ({"a": spec(0, 8, shape=[3])}, "of shape .3. does not fill its 8 bytes"),
        ({"a": spec(8, 0, shape=[2])}, "does not fill its -8 bytes"),
        ({"a": spec(0, 8, dtype="F31")}, "not understood"),
        ({"a": spec(0, 8, shape=[True, 2])}, "not understood"),
        ({"a": spec(0, 8, shape=[-2, -1])}, "not understood"),
        ({"a": spec(0, 8, data_offsets=[0])}, "not understood"),
        ({"a": [1]}, "not understood"),
        ({"a": spec(0, 8, shape=[2**62, 2**62])}, "does not fill"),
    ],
)
def test_a_hostile_safetensors_header_is_refused(tmp_path: Path, header: Any, reason: str) -> None:
    file = safetensors(tmp_path / "model.safetensors", header, bytes(16))
    with pytest.raises(ModelLoadError, match=reason):
        check_file(file)


@pytest.mark.parametrize("length", [2**63, 10**9, 999])
def test_an_absurd_safetensors_header_length_is_refused(tmp_path: Path, length: int) -> None:
    file = safetensors(tmp_path / "model.safetensors", {"a": spec(0, 8)}, bytes(8), length=length)
    with pytest.raises(ModelLoadError, match=f"header claims {length}"):
        check_file(file)


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    (path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    assert "no weight_map" in refusal(path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    (path / "tokenizer.json").write_text("{}")
    assert "not a tokenizer" in refusal_in(path, path / "tokenizer.json")


ALIGN = entry("general.alignment", 4, struct.pack("<I", 3))
LLAMA = entry("general.architecture", 8, text("llama"))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"magic": b"GGML"}, "does not start with the letters GGUF"),
        ({"version": 1}, "version 1"),
        ({"version": 3 << 24}, "big-endian"),
        ({"count": 2**60}, "it claims 1152921504606846976 tensors"),
        ({"pairs": 2**32}, "metadata entries"),
        ({"entries": [entry("k", 99, b"")]}, "unknown type 99"),
        ({"entries": [entry("k", 8, struct.pack("<Q", 2**63))]}, "claims 9223372036854775808 bytes"),
        ({"entries": [entry("k", 9, struct.pack("<IQ", 8, 2**61))]}, "claims 2305843009213693952 strings"),
        ({"entries": [entry("k", 9, struct.pack("<IQ", 4, 2**61))]}, "claims 2305843009213693952 elements"),
        ({"entries": [entry("k", 9, struct.pack("<IQ", 9, 1))]}, "unsupported type 9"),
        ({"entries": [ALIGN]}, "alignment 3"),
        ({"tensors": [text("t") + struct.pack("<I", 9)]}, "9 dimensions"),
        ({"tensors": [tensor("t", (8,), 0, 0)]}, "truncated: tensor 't' ends 16 bytes past"),
        ({"tensors": [tensor("t", (2**40, 2**40), 0, 0)]}, "truncated"),
        ({"tensors": [tensor("t", (2,), 0, 2**63)]}, "truncated|misplaced"),
        ({"tensors": [tensor("t", (2,), 0, 3)]}, "misplaced"),
        ({"tensors": [tensor("t", (0,), 0, 0)]}, "misplaced"),
        ({"tensors": [tensor("t", (2,), 0, 0), tensor("t", (2,), 0, 0)]}, "overlaps"),
        ({"tensors": [tensor("t", (2,), 77, 0)]}, "has type 77, which cannot be read"),
        ({"tensors": [tensor("t.weight", (32,), 6, 0)]}, "has type Q5_0, which cannot be read"),
        ({"tensors": [tensor("t.weight", (31,), 2, 0)]}, "cannot have type Q4_0"),
        ({"tensors": [tensor("t", (32,), 2, 0)]}, "cannot have type Q4_0"),
        ({"entries": [entry("general.architecture", 8, text("mamba"))]}, "'mamba' is not supported"),
        ({}, "architecture '' is not supported"),
        ({"entries": [LLAMA]}, "attention.head_count' is missing"),
    ],
)
def test_a_hostile_gguf_header_is_refused(tmp_path: Path, parts: dict[str, Any], reason: str) -> None:
    given = {"entries": [], "tensors": [], "data": bytes(16), **parts}
    message = refusal(raw_gguf(tmp_path / "bad.gguf", **given))
    assert any(part in message for part in reason.split("|")), message


@pytest.mark.parametrize("keep", [0, 3, 30, 200, 3_000, -40_000, -1])
def test_a_truncated_gguf_file_is_refused(tmp_path: Path, keep: int) -> None:
    path, _, _ = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    refusal(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "vocabulary kind 'bert'"),
        ({"tokenizer.ggml.pre": "viking"}, "text split 'viking'"),
        ({"tokenizer.ggml.tokens": ["a"] * 321}, "has 321 tokens, the embedding 320 rows"),
        ({"tokenizer.ggml.tokens": "a b c"}, "holds no vocabulary"),
        ({"tokenizer.ggml.tokens": mx.arange(9)}, "holds no vocabulary"),
        ({"tokenizer.ggml.token_type": "x"}, "do not match its tokens"),
        ({"tokenizer.ggml.merges": mx.arange(9)}, "vocabulary is damaged"),
        ({"tokenizer.ggml.model": "llama"}, "has no scores"),
        ({"llama.attention.head_count_kv": mx.array(3, mx.uint32)}, "head counts"),
        ({"llama.attention.head_count": mx.array(0, mx.uint32)}, "not a sane count"),
        ({"llama.attention.head_count": "four"}, "not a number"),
        ({"llama.rope.dimension_count": mx.array(8, mx.uint32)}, "rotary width 8"),
        ({"llama.rope.scaling.type": "odd", "llama.rope.scaling.factor": mx.array(2.0)}, "rope scaling 'odd'"),
        ({"llama.expert_count": mx.array(8, mx.uint32)}, "experts"),
        ({"llama.feed_forward_length": mx.array(95, mx.uint32)}, "has shape (96, 64), the model needs (95, 64)"),
        ({"llama.block_count": mx.array(3, mx.uint32)}, "'model.layers.2.self_attn.q_proj.weight' is missing"),
        ({"llama.block_count": mx.array(1, mx.uint32)}, "does not belong to this architecture"),
    ],
)
def test_gguf_metadata_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    config, weights = random_model("llama")
    path = tmp_path / "odd.gguf"
    mx.save_gguf(str(path), gguf_weights(config, weights), metadata(config) | change)
    assert reason in refusal(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 9_000), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_gguf_header_is_read_or_refused_but_never_crashes(tmp_path: Path, at: int, value: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    whole = path.read_bytes() if path.exists() else write_gguf(path)[0].read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole[:at] + value + whole[at + len(value) :])
    with contextlib.suppress(ModelLoadError):
        tensors = read_header(damaged).tensors.values()
        assert all(t.offset + t.nbytes <= len(whole) for t in tensors)


def test_model_code_that_ends_the_process_for_want_of_a_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(name: str) -> Any:
        raise SystemExit(1)

    monkeypatch.setattr("importlib.import_module", leaves)
    with pytest.raises(ModelLoadError, match="mlx-lm's code for 'olmo' needs a package that is not installed"):
        classes({"model_type": "olmo"}, Path("olmo"))
