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

from .arrange import Turned
from .linear import RowLinear
from .rope import HeadTable

Array = Any

ATTENTION = frozenset({"mlx_lm.models.llama.Attention", "mlx_lm.models.qwen2.Attention"})
FEED_FORWARD = frozenset({"mlx_lm.models.llama.MLP", "mlx_lm.models.qwen2.MLP", "mlx_lm.models.qwen3.MLP"})
"""Blocks whose code is known to be the standard one."""


def named(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def swiglu(gate: Array, x: Array) -> Array:
    """`silu(gate) * x` by a power of two: on a CPU, MLX's own sigmoid takes several times as long."""
    return gate * x / (1.0 + mx.power(2.0, gate * -LOG2_E))


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
        rows = x.shape[0] * x.shape[1]
        qkv = self._table[0].turn(self.joined.flat(x.reshape(rows, -1)), cache.positions)
        cache.write("kv", qkv[:, self._heads :].swapaxes(0, 1))
        out = cache.attend(qkv[:, : self._heads])
        return self.o_proj.flat(out).reshape(x.shape)


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
