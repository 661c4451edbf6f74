import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models import Loaded, load
from onecopy.runtime.models.families import build

from tests.support.checkpoints import SIZES, TEMPLATE, write_checkpoint

PROMPT = mx.array([[72, 101, 108, 108, 111]])


def logits(loaded: Loaded) -> np.ndarray:
    return np.array(loaded.model(PROMPT))


def stored(path: Path) -> np.ndarray:
    """Logits of the checkpoint's own arrays in an mlx-lm model, read without our loader."""
    config = json.loads((path / "config.json").read_text())
    model = build(config, path)
    if "quantization" in config:
        nn.quantize(model, **config["quantization"])
    model.load_weights(str(path / "model.safetensors"))
    model.eval()
    return np.array(model(PROMPT))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_directory_loads_with_the_stored_weights(tmp_path: Path, kind: str) -> None:
    path = write_checkpoint(tmp_path / "tiny", kind)
    loaded = load(str(path))
    assert np.array_equal(logits(loaded), stored(path))
    assert (loaded.id, loaded.kind, loaded.context) == ("tiny", "hf", 512)
    assert (loaded.quantization, loaded.path) == (None, path)
    assert loaded.model.training is False


def test_a_renamed_family_loads_under_its_published_name(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    assert np.array_equal(logits(load(str(path))), stored_as(path, "llama"))


def stored_as(path: Path, kind: str) -> np.ndarray:
    model = build(json.loads((path / "config.json").read_text()) | {"model_type": kind}, path)
    model.load_weights(str(path / "model.safetensors"))
    return np.array(model(PROMPT))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_directory_stays_packed_when_native(tmp_path: Path, bits: int) -> None:
    path = write_checkpoint(tmp_path / "tiny", "qwen3", bits=bits)
    loaded = load(str(path), dtype="native")
    assert np.array_equal(logits(loaded), stored(path))
    assert loaded.quantization == {"group_size": 32, "bits": bits}
    assert any(p.dtype == mx.uint32 for _, p in tree_flatten(loaded.model.parameters()))


def test_a_quantized_directory_becomes_plain_floats_on_request(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", "qwen3", bits=4, tied=False)
    loaded = load(str(path), dtype="float32")
    assert {p.dtype for _, p in tree_flatten(loaded.model.parameters())} == {mx.float32}
    np.testing.assert_allclose(logits(loaded), stored(path), atol=1e-4)


def test_half_precision_weights_become_f32_exactly(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    halves = {k: v.astype(mx.bfloat16) for k, v in mx.load(str(path / "model.safetensors")).items()}
    mx.save_safetensors(str(path / "model.safetensors"), halves)
    weights = dict(tree_flatten(load(str(path), dtype="float32").model.parameters()))
    assert all(mx.array_equal(weights[k], v.astype(mx.float32)).item() for k, v in halves.items())


def test_an_indexed_directory_loads_from_all_its_files(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    expected = stored(path)
    weights = mx.load(str(path / "model.safetensors"))
    mx.eval(weights)
    names = sorted(weights)
    (path / "model.safetensors").unlink()
    files = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(files.values()):
        mx.save_safetensors(str(path / file), {n: weights[n] for n in names if files[n] == file})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert np.array_equal(logits(load(str(path))), expected)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors: the weight file is missing"):
        load(str(path))


def test_tokenizer_template_and_end_tokens_come_from_the_directory(tmp_path: Path) -> None:
    loaded = load(str(write_checkpoint(tmp_path / "tiny", eos_token_id=[5, 6])))
    assert loaded.tokenizer is not None
    assert loaded.template == TEMPLATE == loaded.tokenizer.template
    assert loaded.eos == {5, 6, 257}
    assert loaded.tokenizer.bos_id == 256
    assert loaded.tokenizer.names == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_a_template_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    (path / "chat_template.jinja").write_text("from the file")
    assert load(str(path)).template == "from the file"


def test_the_default_of_several_named_templates_is_taken(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load(str(path)).template == "d"


def test_a_directory_without_a_tokenizer_loads_without_one(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    (path / "tokenizer.json").unlink()
    loaded = load(str(path))
    assert (loaded.tokenizer, loaded.template, loaded.eos) == (None, None, {257})


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load(str(path)).eos == {7, 8, 257}


def test_other_weights_under_the_same_name_have_another_digest(tmp_path: Path) -> None:
    one, same = (write_checkpoint(tmp_path / d / "tiny", seed=1) for d in "ab")
    other = write_checkpoint(tmp_path / "c" / "tiny", seed=2)
    digests = [load(str(path)).digest for path in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    rescaled = write_checkpoint(tmp_path / "d" / "tiny", seed=1, rope_theta=5e5)
    assert load(str(rescaled)).digest != digests[0]


def test_a_config_without_a_length_gets_the_default_context(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    config = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"} | {"model_type": "llama"}
    (path / "config.json").write_text(json.dumps(config))
    assert load(str(path)).context == 32_768


def older_vocabulary(path: Path) -> Path:
    """Replace tokenizer.json by the two files it was once made from."""
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return path


def test_an_older_vocabulary_is_converted(tmp_path: Path) -> None:
    path = older_vocabulary(write_checkpoint(tmp_path / "tiny"))
    vocab = json.loads((path / "vocab.json").read_text())
    (path / "vocab.json").write_text(json.dumps(vocab | {"he": 256, "<|endoftext|>": 257}))
    tokenizer = load(str(path)).tokenizer
    assert tokenizer is not None
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("hey")] == [b"he", b"y"]


def test_an_older_vocabulary_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    path = older_vocabulary(write_checkpoint(tmp_path / "tiny"))
    (path / "vocab.json").write_text("{")
    with pytest.raises(ModelLoadError, match="its tokenizer files cannot be converted"):
        load(str(path))


def test_loading_a_directory_prints_nothing(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    code = f"from onecopy.runtime.models import load; load({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
