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
from onecopy.runtime.rows.caches import RowCache

from .arrange import Turned, spread
from .exponential import exp, on_host
from .linear import RowLinear
from .rope import HeadTable

Array = Any

ATTENTION = frozenset({"mlx_lm.models.llama.Attention", "mlx_lm.models.qwen2.Attention"})
FEED_FORWARD = frozenset({"mlx_lm.models.llama.MLP", "mlx_lm.models.qwen2.MLP", "mlx_lm.models.qwen3.MLP"})
"""Blocks whose code is known to be the standard one."""

FLAT = frozenset({"mlx_lm.models.llama.Model", "mlx_lm.models.qwen2.Model"})
"""Models that do nothing but call their blocks, norms and head, and do not look at the shape of what they pass on."""


FEW = 16
"""Rows of a round in which starting and building operations costs more than computing them: for these, numbers are kept
in their shapes, and layers begin while the next ones are being built."""


def named(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def swiglu(gate: Array, x: Array) -> Array:
    """`silu(gate) * x`, with an exponential that is not MLX's own on a CPU. Evaluates `gate` there."""
    return gate * x / (spread(1.0, gate.shape) + exp(-gate))


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
        self._turn, self._in, self._out = table.turn, joined.flat, out.flat
        self._heads = int(original.n_heads)

    def __call__(self, x: Array, mask: Any = None, cache: Any = None) -> Array:
        if not isinstance(cache, RowCache):
            return self._original[0](x, mask, cache)
        qkv = self._turn(self._in(x.reshape(-1, x.shape[-1])), cache.positions)
        cache.write("kv", qkv[:, self._heads :].swapaxes(0, 1))
        return self._out(cache.attend(qkv[:, : self._heads])).reshape(x.shape)


class RowNorm(nn.Module):  # type: ignore[misc]
    """`nn.RMSNorm` in float32, in the steps in which MLX computes it where it has no kernel for it, with its bits.

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """

    def __init__(self, weight: Array, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._numbers = NormNumbers(weight, eps)

    def __call__(self, x: Array) -> Array:
        each, eps, weight = self._numbers.of(x.shape)
        return weight * (x * mx.rsqrt(x.square().sum(axis=-1, keepdims=True) * each + eps))


class NormNumbers:
    """What a norm multiplies and adds, in the shapes of what it is given: kept for few rows, made for many."""

    def __init__(self, weight: Array, eps: float) -> None:
        self._weight, self._eps = weight, eps
        self._kept: dict[tuple[int, ...], tuple[Array, Array, Array]] = {}

    def of(self, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
        """One over the width, eps, and the weights, to be used with an array of `shape`."""
        found = self._kept.get(shape)
        return self._made(shape) if found is None else found

    def _made(self, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
        one = (*shape[:-1], 1)
        few = len(shape) == 2 and shape[0] <= FEW
        weight = mx.broadcast_to(self._weight, shape) if few else self._weight
        made = spread(1.0 / shape[-1], one), spread(self._eps, one), weight
        if few:
            mx.eval(weight)
            self._kept[shape] = made
        return made


class RowFeedForward(nn.Module):  # type: ignore[misc]
    """`down(silu(gate(x)) * up(x))`, gate and up as one product."""

    def __init__(self, joined: RowLinear, down: RowLinear) -> None:
        super().__init__()
        self.joined = joined
        self.down_proj = down
        self._in, self._out, self._how = joined.flat, down.flat, joined.how
        self._begins = on_host()
        self._turns = down.how == joined.how and "bias" not in joined and "bias" not in down

    def __call__(self, x: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        how = self._how
        if isinstance(how, Turned) and rows.shape[0] > how.flat and self._turns:
            return how.by_columns(rows, self._columns).reshape(x.shape)
        both = self._in(rows)
        half = both.shape[-1] // 2
        out = self._out(swiglu(both[:, :half], both[:, half:])).reshape(x.shape)
        if self._begins and rows.shape[0] <= FEW:
            mx.async_eval(out)  # type: ignore[no-untyped-call]
        return out

    def _columns(self, x: Array) -> Array:
        both = mx.matmul(self.joined.weight, x)
        half = both.shape[0] // 2
        return mx.matmul(self.down_proj.weight, swiglu(both[:half], both[half:]))
