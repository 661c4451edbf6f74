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
import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.blas.gemm import ready
from onecopy.runtime.rows.caches import RowCache

from .arrange import Turned, spread
from .exponential import exp, on_host, seen
from .few import FEW
from .linear import RowLinear
from .rope import HeadTable

Array = Any
Host = NDArray[Any]

ATTENTION = frozenset({"mlx_lm.models.llama.Attention", "mlx_lm.models.qwen2.Attention"})
FEED_FORWARD = frozenset({"mlx_lm.models.llama.MLP", "mlx_lm.models.qwen2.MLP", "mlx_lm.models.qwen3.MLP"})
"""Blocks whose code is known to be the standard one."""

FLAT = frozenset({"mlx_lm.models.llama.Model", "mlx_lm.models.qwen2.Model"})
"""Models that do nothing but call their blocks, norms and head, and do not look at the shape of what they pass on."""


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
        self._table = table
        self._turn, self._in, self._out = table.turn, joined.flat, out.flat
        self._heads = int(original.n_heads)

    def __call__(self, x: Array, mask: Any = None, cache: Any = None) -> Array:
        if not isinstance(cache, RowCache):
            return self._original[0](x, mask, cache)
        qkv = self._turn(self._in(x.reshape(-1, x.shape[-1])), cache.positions)
        cache.write("kv", qkv[:, self._heads :].swapaxes(0, 1))
        return self._out(cache.attend(qkv[:, : self._heads])).reshape(x.shape)

    def rows(self, x: Host, cache: RowCache) -> Host:
        """The same for `x [rows, width]` that NumPy has."""
        qkv = self._table.turned(self.joined.rows(x), cache.positions)
        cache.put("kv", qkv[:, self._heads :].swapaxes(0, 1))
        return self.o_proj.rows(cache.read(qkv[:, : self._heads]))


class RowNorm(nn.Module):  # type: ignore[misc]
    """`nn.RMSNorm` in float32, with its sums by NumPy: on a CPU MLX adds numbers one by one.

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """

    def __init__(self, weight: Array, eps: float) -> None:
        super().__init__()
        mx.eval(weight)
        self.weight = weight
        self._weight, self._eps = seen(weight), eps

    def __call__(self, x: Array) -> Array:
        mx.eval(x)
        return self.weight * (x * mx.array(self._inverse(seen(x))))

    def rows(self, x: Host) -> Host:
        """The same where NumPy has the numbers, as a new array."""
        out: Host = self._weight * (x * self._inverse(x))
        return out

    def _inverse(self, x: Host) -> Host:
        """One over the root of each row's mean square, `[…, 1]`."""
        mean = np.add.reduce(np.square(x), axis=-1, keepdims=True) * np.float32(1.0 / x.shape[-1])
        out: Host = np.float32(1.0) / np.sqrt(mean + np.float32(self._eps))
        return out


class RowFeedForward(nn.Module):  # type: ignore[misc]
    """`down(silu(gate(x)) * up(x))`, gate and up as one product."""

    def __init__(self, joined: RowLinear, down: RowLinear) -> None:
        super().__init__()
        self.joined = joined
        self.down_proj = down
        self._in, self._out, self._how = joined.flat, down.flat, joined.how
        self._turns = down.how == joined.how and "bias" not in joined and "bias" not in down

    def __call__(self, x: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        how = self._how
        if isinstance(how, Turned) and rows.shape[0] > how.flat and self._turns:
            return how.by_columns(rows, self._columns).reshape(x.shape)
        both = self._in(rows)
        half = both.shape[-1] // 2
        return self._out(swiglu(both[:, :half], both[:, half:])).reshape(x.shape)

    def rows(self, x: Host) -> Host:
        """The same for `x [rows, width]` that NumPy has."""
        both = self.joined.rows(x)
        half = both.shape[-1] // 2
        gate, up = both[:, :half], both[:, half:]
        with np.errstate(over="ignore"):  # infinite is what it is
            return self.down_proj.rows(gate * up / (np.float32(1.0) + np.exp(-gate)))

    def _columns(self, x: Array) -> Array:
        both = mx.matmul(self.joined.weight, x)
        half = both.shape[0] // 2
        return mx.matmul(self.down_proj.weight, swiglu(both[:half], both[half:]))


def install_blocks() -> None:
    """Lets llama-like blocks whose parts are ours run by NumPy in rounds of few rows, but for their products.

    On a CPU MLX takes longer to start and to wait for what lies between products than to compute it. Bits are those
    of the block as it was, which serves all other calls.
    """
    from mlx_lm.models import llama, qwen2

    for block in (llama.TransformerBlock, qwen2.TransformerBlock):
        if not hasattr(block.__call__, "_original"):
            block.__call__ = _either(block.__call__)


def _either(original: Any) -> Any:
    def call(self: nn.Module, x: Array, mask: Any = None, cache: Any = None) -> Array:
        width = x.shape[-1]
        if isinstance(cache, RowCache) and x.size <= FEW * width and ready() and on_host() and _is_ours(self):
            mx.eval(x)
            return mx.array(_rows(self, seen(x).reshape(-1, width), cache).reshape(x.shape))
        return original(self, x, mask, cache)

    call._original = original  # type: ignore[attr-defined]
    return call


def _is_ours(block: nn.Module) -> bool:
    parts = isinstance(block.self_attn, RowAttention) and isinstance(block.mlp, RowFeedForward)
    norms = (block.input_layernorm, block.post_attention_layernorm)
    return parts and all(isinstance(norm, RowNorm) for norm in norms)


def _rows(block: nn.Module, x: Host, cache: RowCache) -> Host:
    h: Host = x + block.self_attn.rows(block.input_layernorm.rows(x), cache)
    h += block.mlp.rows(block.post_attention_layernorm.rows(h))
    return h
