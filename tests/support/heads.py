"""Tiny checkpoints with something that drafts on the device: a head of their own, or a small model beside them."""

from __future__ import annotations

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


def write_with_mtp(path: Path, seed: int = 11) -> Path:
    """A random qwen3_5 checkpoint with a random prediction head under `mtp.`."""
    from mlx_lm.models.qwen3_5 import TextModelArgs
    from onecopy.runtime.drafting.qwen3_5 import Mtp

    from tests.support.checkpoints import SIZES

    write_tiny(path, kind="qwen3_5", **DELTA)
    args = TextModelArgs.from_dict({"tie_word_embeddings": False, **SIZES, **DELTA})
    mx.random.seed(seed)
    head = {f"mtp.{name}": p * 2.0 for name, p in tree_flatten(Mtp(args).parameters())}
    weights = mx.load(str(path / "model.safetensors")) | head
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return path
