"""Tiny GGUF files: written by `mx.save_gguf`, or byte by byte where a test needs a packed type or a hostile header."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from onecopy.runtime.models.families import build

from .checkpoints import SIZES

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_model(
    kind: str, *, tied: bool = True, seed: int = 0, **config: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config and the evaluated parameters (by mlx-lm name) of a tiny random model."""
    settings = {"model_type": kind, "tie_word_embeddings": tied, **SIZES, **config}
    mx.random.seed(seed)
    weights = dict(tree_flatten(build(settings, Path(kind)).parameters()))
    mx.eval(weights)
    return settings, weights


def metadata(config: dict[str, Any], tokens: int = 320) -> dict[str, Any]:
    """What a converter writes for `config`: MLX scalars, strings and string lists."""
    kind = config["model_type"]
    whole = {
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "context_length": "max_position_embeddings",
    }
    numbers = {f"{kind}.{key}": mx.array(config[name], mx.uint32) for key, name in whole.items()}
    return numbers | {
        "general.architecture": kind,
        f"{kind}.rope.freq_base": mx.array(config["rope_theta"], mx.float32),
        f"{kind}.attention.layer_norm_rms_epsilon": mx.array(config["rms_norm_eps"], mx.float32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if "qwen" in kind else "smollm",
        "tokenizer.ggml.tokens": [f"<{i}>" for i in range(tokens)],
        "tokenizer.ggml.token_type": mx.array([1] * tokens, mx.int32),
        "tokenizer.ggml.eos_token_id": mx.array(7, mx.uint32),
    }


def gguf_weights(config: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """`weights` under GGUF's names, and for llama in GGUF's row order."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return {_name(name): _interleave(w, heads.get(name.split(".")[-2]), config) for name, w in weights.items()}


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".", 3)
    if parts[1:2] == ["layers"]:
        return f"blk.{parts[2]}.{NAMES[parts[3]]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def _interleave(weight: mx.array, heads: int | None, config: dict[str, Any]) -> mx.array:
    """The converter's move: rows of the two halves of each head alternate."""
    if heads is None or config["model_type"] != "llama":
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return mx.swapaxes(halves, 1, 2).reshape(weight.shape)


def write_gguf(path: Path, kind: str = "llama", **config: Any) -> tuple[Path, dict[str, Any], dict[str, mx.array]]:
    """A tiny random f32 model in GGUF file `path`, and its config and weights as mlx-lm names them."""
    settings, weights = random_model(kind, **config)
    mx.save_gguf(str(path), gguf_weights(settings, weights), metadata(settings))
    return path, settings, weights


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    """One metadata pair. kind: ggml's value type (4 u32, 8 string, 9 array)."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """One directory entry; `shape` in row-major order."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def raw_gguf(path: Path, entries: list[bytes], tensors: list[bytes], data: bytes = b"", **header: Any) -> Path:
    """A file from parts. header: magic, version, pairs, count override what the parts imply."""
    head = header.get("magic", b"GGUF") + struct.pack(
        "<IQQ", header.get("version", 3), header.get("count", len(tensors)), header.get("pairs", len(entries))
    )
    body = head + b"".join(entries) + b"".join(tensors)
    path.write_bytes(body + b"\0" * (-len(body) % 32) + data)
    return path


def packed_gguf(path: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Write `weights` with every matrix as Q8_0, vectors as f32. Answers what the file then says they are (f32)."""
    stored, directory, data = {}, [], b""
    for name, array in gguf_weights(config, weights).items():
        raw, stored[name] = _q8_0(np.array(array)) if array.ndim == 2 else (np.array(array).tobytes(), array)
        directory.append(tensor(name, array.shape, 8 if array.ndim == 2 else 0, len(data)))
        data += raw + b"\0" * (-len(raw) % 32)
    raw_gguf(path, [_pair(key, value) for key, value in metadata(config).items()], directory, data)
    return stored


def _q8_0(weight: np.ndarray) -> tuple[bytes, mx.array]:
    """ggml's Q8_0: per 32 weights an f16 scale and signed bytes."""
    blocks = weight.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    whole = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    raw = np.concatenate([scales.view(np.uint8), whole.view(np.uint8)], axis=1).tobytes()
    return raw, mx.array((whole * scales.astype(np.float32)).reshape(weight.shape))


def _pair(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return entry(key, 8, text(value))
    if isinstance(value, list):
        return entry(key, 9, struct.pack("<IQ", 8, len(value)) + b"".join(map(text, value)))
    kind = {mx.uint32: 4, mx.int32: 5, mx.float32: 6}[value.dtype]
    raw = np.array(value).tobytes()
    return entry(key, 9, struct.pack("<IQ", kind, value.size) + raw) if value.ndim else entry(key, kind, raw)
