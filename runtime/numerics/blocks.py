"""The standard attention and feed-forward blocks in as few operations as they can have.

On a CPU an operation on one row costs more to start than to compute. Of the blocks that llama-like models are made of,
the projections of one input are one product, queries and keys are turned together, and keys and values are written in
one piece. Other blocks run as mlx-lm wrote them. The original block serves calls without a `RowCache`.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from onecopy.runtime.rows.attention import LOG2_E
from onecopy.runtime.rows.caches import RowCache

from .arrange import Turned, spread
from .linear import RowLinear
from .rope import HeadTable

Array = Any

ATTENTION = frozenset({"mlx_lm.models.llama.Attention", "mlx_lm.models.qwen2.Attention"})
FEED_FORWARD = frozenset({"mlx_lm.models.llama.MLP", "mlx_lm.models.qwen2.MLP", "mlx_lm.models.qwen3.MLP"})
"""Blocks whose code is known to be the standard one."""

FLAT = frozenset({"mlx_lm.models.llama.Model", "mlx_lm.models.qwen2.Model"})
"""Models that do nothing but call their blocks, norms and head, and do not look at the shape of what they pass on."""


def named(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def swiglu(gate: Array, x: Array) -> Array:
    """`silu(gate) * x` by a power of two: on a CPU, MLX's own sigmoid takes several times as long."""
    one, two, turn = (spread(v, gate.shape) for v in (1.0, 2.0, -LOG2_E))
    return gate * x / (one + mx.power(two, gate * turn))


def install_swiglu() -> None:
    """Puts `swiglu` into every loaded mlx-lm model module, for float32; other types keep mlx-lm's."""
    from mlx_lm.models import activations

    original = getattr(activations.swiglu, "_original", activations.swiglu)

    def either(gate: Array, x: Array) -> Array:
        return swiglu(gate, x) if gate.dtype == mx.float32 else original(gate, x)

    either._original = original  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "swiglu"):
            module.swiglu = either  # type: ignore[attr-defined]


class RowAttention(nn.Module):  # type: ignore[misc]
    """Attention with rotary positions over whole heads, fused projections and a joint buffer of keys and values."""

    def __init__(self, original: nn.Module, joined: RowLinear, out: RowLinear, table: HeadTable) -> None:
        super().__init__()
        self.joined = joined
        self.o_proj = out
        self._original = [original]
        self._table = [table]
        self._heads = int(original.n_heads)

    def __call__(self, x: Array, mask: Any = None, cache: Any = None) -> Array:
        if not isinstance(cache, RowCache):
            return self._original[0](x, mask, cache)
        qkv = self._table[0].turn(self.joined.flat(x.reshape(-1, x.shape[-1])), cache.positions)
        cache.write("kv", qkv[:, self._heads :].swapaxes(0, 1))
        out = cache.attend(qkv[:, : self._heads])
        return self.o_proj.flat(out).reshape(x.shape)


class RowNorm(nn.Module):  # type: ignore[misc]
    """`nn.RMSNorm` in float32, in the steps in which MLX computes it where it has no kernel for it, with its bits.

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """

    FEW = 16
    """Rows for which the weights are kept repeated (without memory of their own)."""

    def __init__(self, weight: Array, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._repeated: dict[int, Array] = {}

    def __call__(self, x: Array) -> Array:
        *lead, width = x.shape
        one = (*lead, 1)
        mean = x.square().sum(axis=-1, keepdims=True) * spread(1.0 / width, one)
        return self._weights(x) * (x * mx.rsqrt(mean + spread(self._eps, one)))

    def _weights(self, x: Array) -> Array:
        if x.ndim != 2 or x.shape[0] > self.FEW:
            return self.weight
        if x.shape[0] not in self._repeated:
            self._repeated[x.shape[0]] = made = mx.broadcast_to(self.weight, x.shape)
            mx.eval(made)
        return self._repeated[x.shape[0]]


class RowFeedForward(nn.Module):  # type: ignore[misc]
    """`down(silu(gate(x)) * up(x))`, gate and up as one product."""

    def __init__(self, joined: RowLinear, down: RowLinear) -> None:
        super().__init__()
        self.joined = joined
        self.down_proj = down
        self._turns = down.how == joined.how and "bias" not in joined and "bias" not in down

    def __call__(self, x: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        how = self.joined.how
        if isinstance(how, Turned) and rows.shape[0] > how.flat and self._turns:
            return how.by_columns(rows, self._columns).reshape(x.shape)
        both = self.joined.flat(rows)
        half = both.shape[-1] // 2
        return self.down_proj.flat(swiglu(both[:, :half], both[:, half:])).reshape(x.shape)

    def _columns(self, x: Array) -> Array:
        both = mx.matmul(self.joined.weight, x)
        half = both.shape[0] // 2
        return mx.matmul(self.down_proj.weight, swiglu(both[:half], both[half:]))
