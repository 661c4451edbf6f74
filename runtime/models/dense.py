"""Weights as plain floats, because on a CPU only f32 matmul is fast."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

GROUP = 32
"""Weights per scale in every GGUF type that stays packed."""


def bits_of(weights: dict[str, mx.array], stem: str) -> int:
    """Bits per weight of packed GGUF tensor `stem`, from its shape beside its scales' shape."""
    packed, scales = weights[f"{stem}.weight"], weights[f"{stem}.scales"]
    return int(packed.shape[-1] * 32 // (scales.shape[-1] * GROUP))


def unpack(weights: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Every tensor as `dtype`; packed ones multiplied out (weight * scale + bias, per group of 32) in `dtype`."""
    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    plain = {name: w.astype(dtype) for name, w in weights.items() if name.rpartition(".")[0] not in packed}
    for stem in packed:
        scales, biases = (weights[f"{stem}.{part}"].astype(dtype) for part in ("scales", "biases"))
        plain[f"{stem}.weight"] = mx.dequantize(
            weights[f"{stem}.weight"], scales, biases, GROUP, bits_of(weights, stem)
        )
        if f"{stem}.bias" in weights:
            plain[f"{stem}.bias"] = weights[f"{stem}.bias"].astype(dtype)
    return plain


def settle(model: nn.Module, dtype: mx.Dtype | None) -> nn.Module:
    """Cast `model`'s floating parameters to `dtype` (None keeps them) and evaluate them, one tensor at a time, so
    that no second copy of the model exists on the way.
    """
    if dtype is not None:
        model.update(tree_map(lambda p: p.astype(dtype) if _is_float(p) else p, model.parameters()))
    for _, parameter in tree_flatten(model.parameters()):
        mx.eval(parameter)
    model.eval()
    return model


def _is_float(value: Any) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
