"""A tiny qwen3_5 directory as Hugging Face publishes it, and as mlx-lm quantizes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from onecopy.runtime.models.families import build

from tests.support.checkpoints import write_tokenizer
from tests.support.tokens import CHATML

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 257,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
QUANTIZATION = {"group_size": 64, "bits": 4}
Weights = dict[str, mx.array]


def write_published(path: Path, *, experts: bool = False, tokenizer: bool = True) -> Path:
    """bfloat16 weights under the multimodal wrapper's names, beside a vision tower and an MTP head."""
    kind = "qwen3_5_moe" if experts else "qwen3_5"
    text = TEXT | (EXPERTS if experts else {})
    model = _random(kind, text)
    weights = dict(map(_as_published, *zip(*tree_flatten(model.parameters()), strict=True)))
    weights |= {"model.visual.patch_embed.proj.weight": mx.ones((4, 4))} | head()
    return _write(path, weights, {"model_type": kind, "text_config": text}, tokenizer)


def write_quantized(path: Path, *, experts: bool = False, tokenizer: bool = True) -> Path:
    """Packed to four bits in groups of 64, under mlx-lm's own names."""
    kind = "qwen3_5_moe" if experts else "qwen3_5"
    text = TEXT | (EXPERTS if experts else {})
    model = _random(kind, text)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, **QUANTIZATION)
    config = {"model_type": kind, "text_config": text, "quantization": QUANTIZATION}
    return _write(path, dict(tree_flatten(model.parameters())), config, tokenizer)


def head() -> Weights:
    """A draft head's tensors by the names that checkpoints give them."""
    shapes = {"fc.weight": (64, 128), "norm.weight": (64,), "pre_fc_norm_hidden.weight": (64,)}
    return {f"mtp.{name}": mx.full(shape, 0.25, mx.bfloat16) for name, shape in shapes.items()}


def _random(kind: str, text: dict[str, Any]) -> nn.Module:
    mx.random.seed(5)
    model = build({"model_type": kind, "text_config": text}, Path(kind))
    model.load_weights([(n, w * 3.0 if w.ndim > 1 else w) for n, w in tree_flatten(model.parameters())])
    return model


def _as_published(name: str, weight: mx.array) -> tuple[str, mx.array]:
    if name.endswith("conv1d.weight"):
        weight = weight.moveaxis(2, 1)
    elif weight.ndim == 1 and name.endswith("norm.weight") and "linear_attn.norm" not in name:
        weight = weight - 1.0
    name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
    return name, weight.astype(mx.bfloat16)


def _write(path: Path, weights: Weights, config: dict[str, Any], tokenizer: bool) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer:
        write_tokenizer(path, CHATML)
    return path
