"""The block drafter's network: a few layers that read a target model's hidden states and fill a block of masks at once.

DFlash (Chen et al. 2026, arXiv 2602.06036) and the public description of its second version. Hidden states of chosen
layers of the target, joined and projected, give keys and values for every row; a block of the newest token and masks
attends to them and to itself, and the target's own head reads what stands at the masks. The second version mixes
neighbours in the block by small convolutions whose kernels depend on the input, and picks tokens one after the other by
how well each follows the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from onecopy.runtime.rows.caches import RowCache

Array = Any


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """What a drafter's config says. windows: per layer, the rows it sees of the context, None for all.

    targets: layers of the target whose outputs it reads. causal: per layer, whether a block sees only what is before.
    conv: (kernel, group) of the second version's convolutions. selector: (rank, candidates) of its selection. scale,
    cap: of logits, cap 0 is none.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    eps: float
    theta: float
    block: int
    mask: int
    targets: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    conv: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None
    embedding_scale: float = 1.0
    scale: float = 1.0
    cap: float = 0.0


class BlockAttention(nn.Module):  # type: ignore[misc]
    """Keys and values of the context come from the target's states, those of the block from the block."""

    def __init__(self, c: BlockConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, c.eps)
        self.k_norm = nn.RMSNorm(c.head_dim, c.eps)
        self._c = c

    def keep(self, x: Array, rope: nn.Module, cache: RowCache) -> Any:
        """Writes keys and values of `x [batch, length, hidden]`; answers with what attention reads."""
        keys = rope(self._heads(self.k_norm, self.k_proj(x)), offset=cache.offset)
        return cache.update_and_fetch(keys, self._split(self.v_proj(x)).swapaxes(1, 2))

    def __call__(self, x: Array, rope: nn.Module, cache: RowCache) -> Array:
        rows, _ = self.keep(x, rope, cache)
        queries = rope(self._heads(self.q_norm, self.q_proj(x)), offset=cache.offset)
        out = rows.attention(queries, self._c.head_dim**-0.5, None)
        return self.o_proj(out.swapaxes(1, 2).flatten(2))

    def _heads(self, norm: nn.Module, x: Array) -> Array:
        return norm(self._split(x)).swapaxes(1, 2)

    def _split(self, x: Array) -> Array:
        return mx.unflatten(x, -1, (-1, self._c.head_dim))


class BlockMlp(nn.Module):  # type: ignore[misc]
    def __init__(self, c: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.inner, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.inner, bias=False)
        self.down_proj = nn.Linear(c.inner, c.hidden, bias=False)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DynamicConv(nn.Module):  # type: ignore[misc]
    """Before and after a part of a layer: each place of the block mixed with those before it, by groups of channels.

    The kernel is a learned one plus one computed from the input of the first mixing.
    """

    def __init__(self, hidden: int, kernel: int, group: int) -> None:
        super().__init__()
        self.base_kernel = mx.zeros((2, kernel, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * kernel * (hidden // group), bias=False)
        self._shape = (2, kernel, hidden // group, 1)
        self._group = group

    def around(self, x: Array, part: Any) -> Array:
        dynamic = mx.unflatten(self.kernel_projection(x), -1, self._shape)
        return self._mix(part(self._mix(x, dynamic, 0)), dynamic, 1)

    def _mix(self, x: Array, dynamic: Array, side: int) -> Array:
        by_group = mx.unflatten(x, -1, (-1, self._group))
        base = mx.unflatten(self.base_kernel[side], -1, (-1, self._group))
        out = mx.zeros_like(by_group)
        for back in range(min(base.shape[0], x.shape[1])):
            before = mx.pad(by_group, [(0, 0), (back, 0), (0, 0), (0, 0)])[:, : x.shape[1]]
            out = out + (base[back] + dynamic[:, :, side, back]) * before
        return out.flatten(2)


class BlockLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, c: BlockConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(c)
        self.mlp = BlockMlp(c)
        self.input_layernorm = nn.RMSNorm(c.hidden, c.eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.eps)
        if c.conv is not None:
            self.attention_conv = DynamicConv(c.hidden, *c.conv)
            self.mlp_conv = DynamicConv(c.hidden, *c.conv)

    def __call__(self, x: Array, rope: nn.Module, cache: RowCache) -> Array:
        x = x + self._around("attention_conv", self.input_layernorm(x), lambda y: self.self_attn(y, rope, cache))
        return x + self._around("mlp_conv", self.post_attention_layernorm(x), self.mlp)

    def _around(self, name: str, x: Array, part: Any) -> Array:
        return self[name].around(x, part) if name in self else part(x)


class Selector(nn.Module):  # type: ignore[misc]
    """How well a token follows another, given what the drafter knows at its place: scores for the best candidates."""

    def __init__(self, c: BlockConfig) -> None:
        super().__init__()
        assert c.selector is not None
        rank, self._candidates = c.selector
        self.predecessor_codebook = mx.zeros((c.vocab, rank))
        self.successor_codebook = mx.zeros((c.vocab, rank))
        self.hidden_projection = nn.Linear(c.hidden, rank, bias=False)

    def __call__(self, hidden: Array, logits: Array, before: Sequence[int]) -> Array:
        """hidden `[n, hidden]`, logits `[n, vocab]` and the tokens before, to logits of candidates, the rest -inf."""
        most = min(self._candidates, logits.shape[-1])
        ids = mx.argpartition(logits, -most, axis=-1)[:, -most:]
        edge = self.predecessor_codebook[mx.array(list(before), mx.int32)] * self.hidden_projection(hidden)
        scores = mx.take_along_axis(logits, ids, axis=-1) + mx.sum(
            edge[:, None] * self.successor_codebook[ids], axis=-1
        )
        return mx.put_along_axis(
            mx.full(logits.shape, -mx.inf, logits.dtype), ids, scores.astype(logits.dtype), axis=-1
        )


class BlockModel(nn.Module):  # type: ignore[misc]
    """The network without what it borrows from the target: embedding and output head."""

    def __init__(self, c: BlockConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(len(c.targets) * c.hidden, c.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(c.hidden, c.eps)
        self.layers = [BlockLayer(c) for _ in c.windows]
        self.norm = nn.RMSNorm(c.hidden, c.eps)
        if c.selector is not None:
            self.candidate_selector = Selector(c)

    def keep(self, features: Array, rope: nn.Module, caches: Sequence[Any]) -> None:
        """Writes the rows of all layers for the target's states `[batch, length, targets * hidden]`."""
        context = self.hidden_norm(self.fc(features))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.keep(context, rope, cache)

    def __call__(self, x: Array, rope: nn.Module, caches: Sequence[Any]) -> Array:
        """An embedded block `[batch, length, hidden]` to what the target's head reads."""
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rope, cache)
        return self.norm(x)
