"""Mixture of experts with one shared expert beside it. Every row picks its experts alone."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from onecopy.runtime.models import light

from .config import Config
from .layers import silu


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All experts' weights stacked; one row at a time goes through the experts it picked."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size, inner, count = config.hidden_size, config.moe_size, config.experts
        self.gate_proj = _stacked(size, inner, count)
        self.up_proj = _stacked(size, inner, count)
        self.down_proj = _stacked(inner, size, count)

    def __call__(self, x: mx.array, picks: mx.array) -> mx.array:
        """x [B, W, d], picks [B, W, k] -> each pick's output [B, W, k, d]."""
        x = x[..., None, None, :]
        inner = silu(self.gate_proj(x, picks)) * self.up_proj(x, picks)
        return self.down_proj(inner, picks).squeeze(-2)


class SparseMoe(nn.Module):
    """Softmax over all experts in f32, top-k, optionally renormalised, plus the gated shared expert."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = SwiGLU(config.hidden_size, config.shared_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)
        self._k, self._renormalise = config.experts_per_token, config.norm_topk

    def __call__(self, x: mx.array) -> mx.array:
        """x [B, W, d] -> [B, W, d]."""
        picks, weights = self._route(x)
        routed = (self.experts(x, picks) * weights[..., None].astype(x.dtype)).sum(axis=-2)
        return routed + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)

    def _route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        chances = mx.softmax(self.gate(x).astype(mx.float32), axis=-1, precise=True)
        picks = mx.argpartition(-chances, self._k - 1, axis=-1)[..., : self._k]
        picks = mx.sort(picks, axis=-1)
        weights = mx.take_along_axis(chances, picks, axis=-1)
        if self._renormalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return picks, weights


def _stacked(size: int, out: int, count: int) -> nn.Module:
    """`count` matrices as one [count, out, size], applied by index; mlx-lm's, which also knows them quantised."""
    light.enter()
    from mlx_lm.models.switch_layers import SwitchLinear

    return SwitchLinear(size, out, count, bias=False)
