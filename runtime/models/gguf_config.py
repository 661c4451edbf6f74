"""From GGUF metadata and tensor names to mlx-lm's config and parameter names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from onecopy.runtime.errors import ModelLoadError

from .gguf_header import Header

ARCHITECTURES = ("llama", "qwen2", "qwen3")

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_ROPE_FREQS = "rope_freqs.weight"


def config_of(header: Header) -> dict[str, Any]:
    """The mlx-lm config of a GGUF file. ModelLoadError for an architecture or a value that is not understood."""
    if header.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(
            f"{header.path}: GGUF architecture {header.architecture!r} is not supported; supported are {known}."
        )
    heads = _whole(header, "attention.head_count")
    hidden = _whole(header, "embedding_length")
    config = {
        "model_type": header.architecture,
        "hidden_size": hidden,
        "num_hidden_layers": _whole(header, "block_count"),
        "intermediate_size": _whole(header, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(header, "attention.head_count_kv", heads),
        "head_dim": _whole(header, "attention.key_length", hidden // heads),
        "rms_norm_eps": float(_number(header, "attention.layer_norm_rms_epsilon")),
        "rope_theta": float(_number(header, "rope.freq_base", 10_000.0)),
        "max_position_embeddings": _whole(header, "context_length"),
        "vocab_size": _vocab(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "rope_scaling": _rope_scaling(header),
    }
    _check(header, config)
    return config


def parameter_name(name: str) -> str | None:
    """mlx-lm's name of GGUF tensor `name`; None for tensors the model computes itself."""
    if name == _ROPE_FREQS:
        return None
    stem, _, kind = name.rpartition(".")
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{kind}"
    layer = _LAYER.fullmatch(stem)
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}"
    return name


def row_order(config: dict[str, Any]) -> Callable[[str, mx.array], mx.array]:
    """Undo the row order GGUF gives query and key weights of llama models.

    The converter interleaves the two halves of each head so that rotary pairs are neighbours; mlx-lm rotates halves.
    Rows move whole, so packed weights and their scales move the same way.
    """
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def reorder(name: str, array: mx.array) -> mx.array:
        count = heads.get(name.split(".")[-2]) if config["model_type"] == "llama" else None
        if count is None:
            return array
        shape = array.shape
        pairs = array.reshape(count, shape[0] // count // 2, 2, *shape[1:])
        return mx.swapaxes(pairs, 1, 2).reshape(shape)

    return reorder


def _vocab(header: Header) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{header.path}: the tensor 'token_embd.weight' is missing.")
    return embedding.shape[0]


def _rope_scaling(header: Header) -> dict[str, Any] | None:
    kind = header.get("rope.scaling.type", "none")
    factor = header.get("rope.scaling.factor", 0.0)
    original = header.get("rope.scaling.original_context_length")
    if _ROPE_FREQS in header.tensors:
        return {"rope_type": "llama3"}
    if kind == "none" or not factor:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and original:
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(original)}
    raise ModelLoadError(f"{header.path}: rope scaling {kind!r} is not supported.")


def llama3_scaling(header: Header, factors: mx.array) -> dict[str, Any]:
    """The published Llama 3 frequency rule whose result `factors` (head_dim / 2, f32) is.

    The file holds the rule's outcome, the config its inputs; only `factor` differs between the releases. The outcome
    is computed again and compared, so another rule is an error, not a quietly different model.
    """
    low, high, original = 1.0, 4.0, 8192
    values: list[float] = factors.astype(mx.float32).tolist()  # type: ignore[assignment]
    factor = max(values)
    base = float(header.get("rope.freq_base", 10_000.0))
    for i, found in enumerate(values):
        turns = original / (2 * math.pi * base ** (i / len(values)))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        if abs(1 / ((1 - smooth) / factor + smooth) - found) > 1e-3 * found:
            raise ModelLoadError(f"{header.path}: the rope frequencies follow no rule that is supported.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _check(header: Header, config: dict[str, Any]) -> None:
    rope = header.get("rope.dimension_count", config["head_dim"])
    if rope != config["head_dim"]:
        raise ModelLoadError(f"{header.path}: rotary width {rope} with head width {config['head_dim']} is unsupported.")
    if header.get("expert_count", 0):
        raise ModelLoadError(f"{header.path}: GGUF files with experts are not supported.")
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ModelLoadError(f"{header.path}: the head counts in the metadata do not divide.")


def _number(header: Header, key: str, default: float | None = None) -> float:
    value = header.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"{header.path}: metadata '{header.architecture}.{key}' is missing or not a number.")
    return value


def _whole(header: Header, key: str, default: int | None = None) -> int:
    value = _number(header, key, default)
    if not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ModelLoadError(f"{header.path}: metadata '{header.architecture}.{key}' is {value}, not a sane count.")
    return value
