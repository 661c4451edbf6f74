"""Tiny qwen4_exp checkpoints: every weight is drawn from a NumPy generator seeded by its name.

The rule is the one the committed reference logits were made with, so a test can rebuild that checkpoint, or any
other shape of the family, without the reference implementation. Layout on disk is the published one.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.support.checkpoints import write_tokenizer
from tests.support.tokens import CHATML

SEED = 20260

TINY: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 1000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 4,
    "seed": 1234,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

Weights = dict[str, NDArray[Any]]


def tiny(**changes: Any) -> dict[str, Any]:
    """The tiny `config.json` with some fields changed; layer types follow the layer count unless given."""
    config = {**TINY, **changes}
    config.setdefault("layer_types", _kinds(config["num_hidden_layers"], config.pop("full_attention_interval", 4)))
    return config


def draw(config: dict[str, Any], *, mtp: int = 0) -> Weights:
    """Every tensor under its in-memory name (experts fused and stacked, n-gram tables whole).

    mtp: layers of the prediction head, 0 for none.
    """
    shapes = _shapes(config) | (_mtp_shapes(config, mtp) if mtp else {})
    return {name: _values(name, shape) for name, shape in shapes.items()}


def write(path: Path, config: dict[str, Any], *, mtp: int = 0, prefix: str = "model.") -> Path:
    """A checkpoint directory as published: one tensor per expert, tables cut into shards, names under `prefix`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    saved = _published(draw(config, mtp=mtp), config["split_ngram_parts"])
    renamed = {n if n.startswith("mtp.") else n.replace("model.", prefix, 1): v for n, v in saved.items()}
    mx.save_safetensors(str(path / "model.safetensors"), {n: mx.array(v) for n, v in renamed.items()})
    return path


def _kinds(count: int, every: int) -> list[str]:
    return ["linear_attention" if (i + 1) % every else "indexed_attention" for i in range(count)]


def _values(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    g = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    if name.endswith("A_log"):
        v = np.log(g.uniform(0.05, 8.0, shape))
    elif name.endswith("dt_bias"):
        v = g.uniform(-3.0, 0.5, shape)
    elif name.endswith("linear_attn.norm.weight"):
        v = 1.0 + 0.1 * g.standard_normal(shape)
    elif len(shape) == 1:
        v = 0.1 * g.standard_normal(shape)
    else:
        v = g.standard_normal(shape) * _scale(name, shape)
    return v.astype(np.float32)


def _scale(name: str, shape: tuple[int, ...]) -> float:
    if "conv1d" in name:
        return 0.5
    return 1.0 if "embed" in name else 1.0 / math.sqrt(shape[-1])


def _shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, vocab = c["hidden_size"], c["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (vocab, d)
    out |= _hyper("model.hyper_connection_mixer.", c, inject=False)
    for i, kind in enumerate(c["layer_types"]):
        stem = f"model.layers.{i}."
        out |= _layer(stem, c, kind in ("indexed_attention", "full_attention"))
        if i + 1 in c["ple_layer_ids"]:
            out |= _ple(stem + "ple.", c, sorted(c["ple_layer_ids"]).index(i + 1))
    return out


def _layer(stem: str, c: dict[str, Any], indexed: bool) -> dict[str, tuple[int, ...]]:
    block = _attention(stem + "self_attn.", c) if indexed else _delta(stem + "linear_attn.", c)
    hyper = _hyper(stem + "attn_hyper_connection.", c) | _hyper(stem + "mlp_hyper_connection.", c)
    return block | _moe(stem + "mlp.", c) | hyper


def _hyper(stem: str, c: dict[str, Any], *, inject: bool = True) -> dict[str, tuple[int, ...]]:
    size, low = c["hc_count"] * c["hidden_size"], c["hc_lowrank"]
    out: dict[str, tuple[int, ...]] = {
        f"{stem}hc_norm.weight": (size,),
        f"{stem}input_mix_weight_down.weight": (low, size),
        f"{stem}input_mix_weight_up.weight": (size, low),
    }
    return out | ({f"{stem}block_inject_weight.weight": (c["hc_count"], size)} if inject else {})


def _attention(stem: str, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, dh, di = c["hidden_size"], c["head_dim"], c["indexer_head_dim"]
    q, kv = c["num_attention_heads"] * dh, c["num_key_value_heads"] * dh
    sizes = {"q_proj": (2 * q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
    out: dict[str, tuple[int, ...]] = {f"{stem}{n}.weight": s for n, s in sizes.items()}
    if c["attention_bias"]:
        out |= {f"{stem}{n}.bias": s[:1] for n, s in sizes.items()}
    out |= {f"{stem}q_norm.weight": (dh,), f"{stem}k_norm.weight": (dh,)}
    out[f"{stem}indexer.index_qk_proj.weight"] = ((c["indexer_n_heads"] + 1) * di, d)
    return out | {f"{stem}indexer.q_layernorm.weight": (di,), f"{stem}indexer.k_layernorm.weight": (di,)}


def _delta(stem: str, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, hv = c["hidden_size"], c["linear_num_value_heads"]
    values = hv * c["linear_value_head_dim"]
    qkv = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    return {
        f"{stem}in_proj_qkv.weight": (qkv, d),
        f"{stem}in_proj_z.weight": (values, d),
        f"{stem}in_proj_a.weight": (hv, d),
        f"{stem}in_proj_b.weight": (hv, d),
        f"{stem}conv1d.weight": (qkv, 1, c["linear_conv_kernel_dim"]),
        f"{stem}A_log": (hv,),
        f"{stem}dt_bias": (hv,),
        f"{stem}norm.weight": (c["linear_value_head_dim"],),
        f"{stem}out_proj.weight": (d, values),
    }


def _moe(stem: str, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, e, i, s = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    return {
        f"{stem}gate.weight": (e, d),
        f"{stem}experts.gate_up_proj": (e, 2 * i, d),
        f"{stem}experts.down_proj": (e, d, i),
        f"{stem}shared_expert.gate_proj.weight": (s, d),
        f"{stem}shared_expert.up_proj.weight": (s, d),
        f"{stem}shared_expert.down_proj.weight": (d, s),
        f"{stem}shared_expert_gate.weight": (1, d),
    }


def _ple(stem: str, c: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    size, ple = c["hc_count"] * c["hidden_size"], c["ple_embed_dim"]
    heads = (c["ngram_size"] - 1) * c["heads_per_ngram"]
    divisor = c["make_ngram_vocab_size_divisible_by"]
    rows = -(-sum(primes_from(c["ngram_vocab_size_base"], heads * (index + 1))[-heads:]) // divisor) * divisor
    return {
        f"{stem}key_proj.weight": (size, ple),
        f"{stem}value_proj.weight": (c["hidden_size"], ple),
        f"{stem}conv1d.weight": (size, 1, c["ple_conv_kernel_size"]),
        f"{stem}ple_embedding.ngram_embedding.weight": (rows, ple // heads),
    } | {f"{stem}norm_{n}.weight": (size,) for n in ("key", "query", "conv")}


def _mtp_shapes(c: dict[str, Any], layers: int) -> dict[str, tuple[int, ...]]:
    d, size = c["hidden_size"], c["hc_count"] * c["hidden_size"]
    out: dict[str, tuple[int, ...]] = {
        "mtp.pre_fc_norm_hidden.weight": (size,),
        "mtp.pre_fc_norm_embedding.weight": (d,),
        "mtp.fc_hidden.weight": (d, d),
        "mtp.fc_embedding.weight": (d, d),
    }
    for i in range(layers):
        out |= _layer(f"mtp.layers.{i}.", c, True)
    return out | _hyper("mtp.hyper_connection_mixer.", c, inject=False)


def primes_from(base: int, count: int) -> list[int]:
    """The first `count` primes not below `base`, by a plain sieve."""
    limit = base + 60 * count + 100
    sieve = np.ones(limit, bool)
    sieve[:2] = False
    for n in range(2, math.isqrt(limit) + 1):
        sieve[n * n :: n] = False
    found: list[int] = (np.flatnonzero(sieve[base:])[:count] + base).tolist()
    return found


def _published(weights: Weights, parts: int) -> Weights:
    out: Weights = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(np.split(v, 2) for v in value):
                stem = name.removesuffix("gate_up_proj")
                out |= {f"{stem}{e}.gate_proj.weight": gate, f"{stem}{e}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            out |= {f"{stem}{e}.down_proj.weight": v for e, v in enumerate(value)}
        elif name.endswith("ngram_embedding.weight"):
            stem = name.removesuffix("weight")
            out |= {f"{stem}shard_{i}.weight": v for i, v in enumerate(np.array_split(value, parts))}
        else:
            out[name] = value
    return out


def write_served(path: Path, template: str = CHATML, *, mtp: int = 0, **changes: Any) -> Path:
    """A four-layer checkpoint that serves 65,536 positions, with a byte tokenizer and a template."""
    write(path, tiny(**{"num_hidden_layers": 4, "max_position_embeddings": 65536, **changes}), mtp=mtp)
    write_tokenizer(path, template)
    return path
