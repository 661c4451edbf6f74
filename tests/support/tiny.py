"""Tiny random models held in memory, for tests that need many kinds and no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from onecopy.runtime.models.families import build
from onecopy.runtime.models.loaded import Loaded

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}


def tiny(kind: str = "llama", *, seed: int = 0, scale: float = 2.0, **config: Any) -> Loaded:
    """A random model of that type. scale: how much wider than usual its weights are, so that tokens vary."""
    settings = {"model_type": kind, **SIZES, **config}
    mx.random.seed(seed)
    model = build(settings, Path(kind))
    model.load_weights([(name, _varied(name, p, scale)) for name, p in tree_flatten(model.parameters())])
    model.eval()
    mx.eval(model.parameters())
    return Loaded(
        id=kind,
        model=model,
        config=settings,
        tokenizer=None,
        template=None,
        eos=frozenset(),
        digest="0" * 64,
        kind="hf",
        quantization=None,
        dtype="float32",
        context=int(settings["max_position_embeddings"]),
        path=Path(kind),
    )


def _varied(name: str, parameter: mx.array, scale: float) -> mx.array:
    if name.endswith("sinks"):
        return mx.random.normal(parameter.shape)
    return parameter * scale if parameter.ndim > 1 else parameter
