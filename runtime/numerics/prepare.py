"""Turns a loaded model into one whose rows do not influence each other: its modules are exchanged in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .arrange import Way
from .blocks import ATTENTION, FEED_FORWARD, FLAT, RowAttention, RowFeedForward, RowNorm, named
from .experts import RowExperts, is_experts
from .exponential import on_host
from .linear import FusedLinear, FusedPart, RoundShape, RowHead, RowLinear, TiedEmbedding
from .rope import HeadTable, RopeTable, TableRope, inverse_frequencies

Array = Any
Choose = Callable[[int, int, bool], Way]
"""(outputs, inputs, is the head) of a linear to its arrangement."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling linears that read one input: one product computes them together."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare` did. shape: set `wanted` before each forward."""

    shape: RoundShape
    fused: int
    linears: int
    ropes: int
    blocks: int
    head: bool


def linear_shapes(model: nn.Module) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(outputs, inputs) of the model's float32 linears after fusing, and of its head."""
    body: set[tuple[int, int]] = set()
    heads: set[tuple[int, int]] = set()
    fused: set[str] = set()
    for path, module in model.named_modules():
        for names in FUSED:
            if _fusable(module, names):
                parts = [module[n].weight for n in names]
                body.add((sum(w.shape[0] for w in parts), parts[0].shape[1]))
                fused.update(f"{path}.{n}" for n in names)
    for path, module in model.named_modules():
        if _is_plain(module) and path not in fused:
            (heads if path.endswith("lm_head") else body).add(tuple(module.weight.shape))
        elif _is_embedding(module):
            heads.add(tuple(module.weight.shape))
    return body, heads


def prepare(model: nn.Module, choose: Choose, positions: int) -> Prepared:
    """Exchanges modules of `model` in place. positions: length of the rope tables in rows."""
    shape = RoundShape()
    fused = _fuse(model, choose)
    linears = _replace(model, _is_plain, lambda path, m: _linear(path, m, shape, choose))
    tied = _replace(model, _is_embedding, lambda _, m: _embedding(m, shape, choose))
    _replace(model, is_experts, lambda _, m: RowExperts(m))
    head = any(isinstance(m, RowHead) for _, m in model.named_modules()) or tied > 0
    ropes = _replace(model, lambda m: inverse_frequencies(m) is not None, _rope_maker(positions))
    blocks = _replace(model, _is_attention, _attention_maker())
    blocks += _replace(model, _is_feed_forward, lambda _, m: RowFeedForward(m.gate_proj.whole, m.down_proj))
    if on_host():
        _replace(model, _is_norm, lambda _, m: RowNorm(m.weight, m.eps))
    shape.flat = named(model) in FLAT and blocks == 2 * len(model.layers)
    return Prepared(shape, fused, linears, ropes, blocks, head)


def _fuse(model: nn.Module, choose: Choose) -> int:
    count = 0
    for _, module in model.named_modules():
        for names in FUSED:
            if _fusable(module, names):
                parts = [module[n] for n in names]
                outputs = sum(p.weight.shape[0] for p in parts)
                joined = FusedLinear(parts, choose(outputs, parts[0].weight.shape[1], False))
                for i, name in enumerate(names):
                    setattr(module, name, FusedPart(joined, i))
                count += 1
    return count


def _fusable(module: nn.Module, names: tuple[str, ...]) -> bool:
    parts = [module[n] for n in names if n in module]
    return (
        len(parts) == len(names)
        and all(_is_plain(p) for p in parts)
        and len({p.weight.shape[1] for p in parts}) == 1
        and len({"bias" in p for p in parts}) == 1
    )


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear and module.weight.dtype == mx.float32


def _is_embedding(module: Any) -> bool:
    return type(module) is nn.Embedding and module.weight.dtype == mx.float32


def _linear(path: str, module: nn.Module, shape: RoundShape, choose: Choose) -> nn.Module:
    bias = module.bias if "bias" in module else None
    outputs, inputs = module.weight.shape
    if path.endswith("lm_head"):
        return RowHead(module.weight, bias, shape, choose(outputs, inputs, True))
    return RowLinear(module.weight, bias, choose(outputs, inputs, False))


def _embedding(module: nn.Module, shape: RoundShape, choose: Choose) -> nn.Module:
    return TiedEmbedding(module.weight, shape, choose(module.weight.shape[0], module.weight.shape[1], True))


def _rope_maker(positions: int) -> Callable[[str, nn.Module], nn.Module]:
    tables: dict[tuple[Any, ...], RopeTable] = {}

    def make(_: str, rope: nn.Module) -> nn.Module:
        found = inverse_frequencies(rope)
        assert found is not None
        inverse, scale, dims, traditional = found
        key = (dims, scale, bytes(memoryview(inverse)))
        if key not in tables:
            tables[key] = RopeTable(inverse, scale, positions)
        return TableRope(dims, traditional, tables[key], rope)

    return make


def _is_attention(module: nn.Module) -> bool:
    if named(module) not in ATTENTION:
        return False
    rope = module.rope
    whole = isinstance(rope, TableRope) and rope.dims == module.o_proj.weight.shape[1] // module.n_heads
    return whole and isinstance(module.q_proj, FusedPart) and isinstance(module.o_proj, RowLinear)


def _is_feed_forward(module: nn.Module) -> bool:
    fused = named(module) in FEED_FORWARD and isinstance(module.gate_proj, FusedPart)
    return fused and isinstance(module.down_proj, RowLinear)


def _is_norm(module: nn.Module) -> bool:
    return type(module) is nn.RMSNorm and module.weight.dtype == mx.float32


def _attention_maker() -> Callable[[str, nn.Module], nn.Module]:
    tables: dict[tuple[Any, ...], HeadTable] = {}

    def make(_: str, old: nn.Module) -> nn.Module:
        heads = (int(old.n_heads), int(old.n_kv_heads), int(old.n_kv_heads))
        key = (id(old.rope.table), old.rope.traditional, heads, old.scale)
        if key not in tables:
            tables[key] = HeadTable(old.rope.table, old.rope.traditional, heads, old.scale)
        return RowAttention(old, old.q_proj.whole, old.o_proj, tables[key])

    return make


def _replace(
    model: nn.Module, matches: Callable[[nn.Module], bool], make: Callable[[str, nn.Module], nn.Module]
) -> int:
    count = 0
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.children().items()):
            if isinstance(child, nn.Module) and matches(child):
                setattr(parent, name, make(f"{path}.{name}", child))
                count += 1
            elif isinstance(child, list):
                for i, item in enumerate(child):
                    if isinstance(item, nn.Module) and matches(item):
                        parent[name][i] = make(f"{path}.{name}.{i}", item)
                        count += 1
    return count
