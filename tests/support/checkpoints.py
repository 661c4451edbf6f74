"""Tiny random Hugging Face checkpoints, written to a directory by a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from onecopy.runtime.models.families import build
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "eos_token_id": 257,
}


def write_checkpoint(
    path: Path, kind: str = "llama", *, bits: int | None = None, tied: bool = True, seed: int = 0, **config: Any
) -> Path:
    """Write a random model of type `kind` into `path` with a byte tokenizer and a chat template; answers `path`.

    bits: quantize the linear layers and the embedding to that many bits, in groups of 32, as mlx-lm saves them.
    """
    path.mkdir(parents=True, exist_ok=True)
    settings = {"model_type": kind, "tie_word_embeddings": tied, **SIZES, **config}
    mx.random.seed(seed)
    model = build(settings, path)
    if bits is not None:
        settings["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(model, group_size=32, bits=bits)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(settings))
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path, template: str = TEMPLATE) -> None:
    """A byte-level vocabulary without merges: ids 0-255 are bytes, 256 <|im_start|>, 257 <|im_end|>, 258 <think>."""
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
