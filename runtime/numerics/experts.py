"""Experts' products in one form whatever runs beside them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

Array = Any


class RowExperts(nn.Module):  # type: ignore[misc]
    """mlx-lm's `SwitchLinear` in float32: each row by the matrix of its expert, one product a row.

    mlx-lm sorts many rows by expert and leaves few as they come. Both are the same products, but an axis of length one
    may then stand in memory otherwise, by which some BLAS kernels are chosen: rows come to the product in one form.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.weight = original.weight
        if "bias" in original:
            self.bias = original.bias
        self._turned = original.weight.swapaxes(-1, -2)

    def __call__(self, x: Array, indices: Array, sorted_indices: bool = False) -> Array:
        """x `[..., 1, k]`, indices of experts that its leading axes are broadcast with; `[..., 1, m]`."""
        rows = x.reshape(-1, x.shape[-1]).reshape(x.shape)
        y = mx.gather_mm(rows, self._turned, rhs_indices=indices, sorted_indices=sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


def is_experts(module: nn.Module) -> bool:
    """Whether a module is mlx-lm's own, in float32."""
    own = f"{type(module).__module__}.{type(module).__name__}" == "mlx_lm.models.switch_layers.SwitchLinear"
    return own and module.weight.dtype == mx.float32
