"""What a qwen4_exp `config.json` says, checked once: a `Config` is always a shape the model code can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onecopy.runtime.errors import ModelLoadError

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
LINEAR, INDEXED = "linear_attention", "indexed_attention"


def is_qwen4_exp(config: Mapping[str, Any]) -> bool:
    """True when a parsed `config.json` names this family (text-only or the multimodal wrapper's text trunk)."""
    return config.get("model_type") in MODEL_TYPES


@dataclass(frozen=True, slots=True)
class Config:
    """Shapes and constants of the text trunk. Names follow `config.json`; rotary and gate settings are resolved.

    rotary_dim: how many leading values of a head are rotated. output_gate: "sigmoid" or "silu".
    eos: the first EOS id; the n-gram hash uses it as the boundary token. ple_layers: zero-based, ascending.
    mtp_layers: of the prediction head, 0 where the file does not say.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    eps: float
    bias: bool
    tied: bool
    linear_kernel: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    output_gate: str
    experts: int
    experts_per_token: int
    moe_size: int
    shared_size: int
    norm_topk: bool
    hc_count: int
    hc_lowrank: int
    index_heads: int
    index_dim: int
    budget: int
    ratio: int
    ple_layers: tuple[int, ...]
    ple_dim: int
    ple_kernel: int
    ngram_size: int
    heads_per_ngram: int
    ngram_base: int
    ngram_divisor: int
    seed: int
    eos: int
    max_positions: int
    mtp_layers: int

    @property
    def selected_blocks(self) -> int:
        """How many complete index blocks a query may attend to at most."""
        return self.budget // self.ratio

    @property
    def tile(self) -> int:
        """Keys per attention tile: a power of two, at most 256, so a tile never crosses a block of rows."""
        return min(256, 1 << (self.budget + self.ratio - 1).bit_length())

    @property
    def pool_tile(self) -> int:
        """Pooled keys per scoring tile: those of one 256-row block where the ratio divides it."""
        return 256 // self.ratio if 256 % self.ratio == 0 else 64

    @property
    def conv_size(self) -> int:
        """Channels of the delta net's convolution: queries, keys and values side by side."""
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim


def parse_config(raw: Mapping[str, Any]) -> Config:
    """A `Config` from the parsed `config.json`. Raises ModelLoadError naming the field that cannot be served."""
    text: Mapping[str, Any] = raw.get("text_config") or raw
    try:
        config = _build(text, raw)
    except KeyError as missing:
        raise ModelLoadError(f"config.json: the qwen4_exp field {missing} is missing.") from None
    except (TypeError, ValueError) as wrong:
        raise ModelLoadError(f"config.json: a qwen4_exp field has the wrong type ({wrong}).") from None
    _check(config)
    return config


def _build(text: Mapping[str, Any], raw: Mapping[str, Any]) -> Config:
    get = text.get
    rope = _rope(text)
    heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    head_dim = int(get("head_dim") or hidden // heads)
    return Config(
        vocab_size=int(text["vocab_size"]),
        hidden_size=hidden,
        layer_types=_layer_types(text),
        heads=heads,
        kv_heads=int(text["num_key_value_heads"]),
        head_dim=head_dim,
        rotary_dim=int(head_dim * float(rope.get("partial_rotary_factor", get("partial_rotary_factor", 1.0)))),
        rope_theta=float(rope.get("rope_theta", get("rope_theta", 10000.0))),
        eps=float(get("rms_norm_eps", 1e-6)),
        bias=bool(get("attention_bias", False)),
        tied=bool(get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
        linear_kernel=int(get("linear_conv_kernel_dim", 4)),
        linear_key_heads=int(text["linear_num_key_heads"]),
        linear_value_heads=int(text["linear_num_value_heads"]),
        linear_key_dim=int(text["linear_key_head_dim"]),
        linear_value_dim=int(text["linear_value_head_dim"]),
        output_gate=str(get("output_gate_type") or get("hidden_act", "silu")),
        experts=int(text["num_experts"]),
        experts_per_token=int(text["num_experts_per_tok"]),
        moe_size=int(text["moe_intermediate_size"]),
        shared_size=int(text["shared_expert_intermediate_size"]),
        norm_topk=bool(get("norm_topk_prob", True)),
        hc_count=int(get("hc_count", 4)),
        hc_lowrank=int(get("hc_lowrank", 320)),
        index_heads=int(text["indexer_n_heads"]),
        index_dim=int(text["indexer_head_dim"]),
        budget=int(text["indexer_budget"]),
        ratio=int(text["indexer_compress_ratio"]),
        ple_layers=tuple(sorted({int(one_based) - 1 for one_based in get("ple_layer_ids") or ()})),
        ple_dim=int(get("ple_embed_dim") or hidden),
        ple_kernel=int(get("ple_conv_kernel_size", 4)),
        ngram_size=int(get("ngram_size", 3)),
        heads_per_ngram=int(get("heads_per_ngram", 8)),
        ngram_base=int(get("ngram_vocab_size_base", 20_000_000)),
        ngram_divisor=int(get("make_ngram_vocab_size_divisible_by", 128)),
        seed=int(get("seed", 1234)),
        eos=_first_eos(get("eos_token_id", raw.get("eos_token_id"))),
        max_positions=int(get("max_position_embeddings", 32768)),
        mtp_layers=int(get("mtp_num_hidden_layers") or 0),
    )


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ModelLoadError(f"config.json: rope_type '{kind}' is not offered for qwen4_exp.")
    return rope


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    """Published files write "full_attention" for the indexed layers; without a list every n-th layer is indexed."""
    count = int(text["num_hidden_layers"])
    listed = text.get("layer_types")
    if listed is None:
        every = int(text.get("full_attention_interval", 4))
        return tuple(LINEAR if (i + 1) % every else INDEXED for i in range(count))
    return tuple(INDEXED if kind == "full_attention" else str(kind) for kind in listed)[:count]


def _first_eos(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return -1 if value is None else int(value)


def _check(c: Config) -> None:
    """Every rule a shape must meet, in one table: (holds, what to tell the user)."""
    ngram_heads = (c.ngram_size - 1) * c.heads_per_ngram
    rules = (
        (not set(c.layer_types) - {LINEAR, INDEXED}, f"layer_types {sorted(set(c.layer_types))} are not all known"),
        (c.output_gate in ("sigmoid", "silu"), f"output_gate_type '{c.output_gate}' is not known"),
        (c.hc_count > 1, "hc_count must be at least 2"),
        (c.heads % c.kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads"),
        (c.linear_value_heads % c.linear_key_heads == 0, "linear_num_value_heads must be a multiple of key heads"),
        (0 < c.experts_per_token <= c.experts, "num_experts_per_tok must be between 1 and num_experts"),
        (min(c.budget, c.ratio, c.index_heads, c.index_dim) > 0, "indexer values must be positive"),
        (c.budget % c.ratio == 0, "indexer_budget must be a multiple of indexer_compress_ratio"),
        (c.rotary_dim % 2 == 0, "the rotated part of a head must be even"),
        (c.rotary_dim <= min(c.head_dim, c.index_dim), "the rotated part must fit the head and the index head"),
        (
            not c.ple_layers or (ngram_heads > 0 and c.ple_dim % ngram_heads == 0),
            "ple_embed_dim must be a multiple of the n-gram heads",
        ),
        (not c.ple_layers or c.eos >= 0, "eos_token_id must be set when PLE layers are used"),
        (
            all(0 <= i < len(c.layer_types) and c.layer_types[i] == LINEAR for i in c.ple_layers),
            "ple_layer_ids must name linear_attention layers",
        ),
    )
    for holds, problem in rules:
        if not holds:
            raise ModelLoadError(f"config.json: {problem}.")
