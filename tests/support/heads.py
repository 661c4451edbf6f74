"""Tiny checkpoints with something that drafts on the device: a head of their own, or a small model beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.support.system import write_tiny

DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def write_with_mtp(path: Path, seed: int = 11, layers: int = 1) -> Path:
    """A random qwen3_5 checkpoint with a random prediction head under `mtp.`, of so many layers."""
    from mlx_lm.models.qwen3_5 import TextModelArgs
    from onecopy.runtime.drafting.qwen3_5 import Mtp

    from tests.support.checkpoints import SIZES

    write_tiny(path, kind="qwen3_5", mtp_num_hidden_layers=layers, **DELTA)
    args = TextModelArgs.from_dict({"tie_word_embeddings": False, **SIZES, **DELTA})
    mx.random.seed(seed)
    head = {f"mtp.{name}": p * 2.0 for name, p in tree_flatten(Mtp(args, layers).parameters())}
    weights = mx.load(str(path / "model.safetensors")) | head
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return path


def write_block_drafter(
    path: Path,
    *,
    second: bool = False,
    targets: tuple[int, ...] = (0, 1),
    block: int = 6,
    window: int | None = None,
    candidates: int = 5,
    seed: int = 5,
    **config: Any,
) -> Path:
    """A random block drafter of two layers for a tiny target, of the first or the second version."""
    from onecopy.runtime.drafting.beside import FIRST, SECOND, read_config
    from onecopy.runtime.drafting.dflash import BlockModel

    own: dict[str, Any] = {"mask_token_id": 7, "target_layer_ids": list(targets), "block_size": block}
    if second:
        own |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": candidates}
        own |= {"final_logit_softcapping": 20.0, "output_multiplier": 0.5}
    kinds = ["full_attention", "sliding_attention"] if window else ["full_attention"] * 2
    settings: dict[str, Any] = {
        "architectures": [SECOND if second else FIRST],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 320,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "is_causal": False,
        "layer_types": kinds,
        "sliding_window": window,
        "dflash_config": own,
        **config,
    }
    path.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    made = tree_flatten(BlockModel(read_config(settings, path)).parameters())
    weights = {name: 0.3 * mx.random.normal(p.shape) if p.ndim > 1 else p for name, p in made}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    (path / "config.json").write_text(json.dumps(settings))
    return path
