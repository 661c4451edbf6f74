"""What a loaded model keeps per token, found by asking it: its own cache kinds, and one tiny forward.

Kinds: a plain KV cache is "attention", a rotating one "window", an array cache "recurrent", and a list of caches is
its parts. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.rows.layout import ATTENDED, Kind, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.states import Specs, StateSpec

Array = Any
Tree = int | tuple["Tree", ...]

PROBE_TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)
"""Ids of the forward that shows the shapes; its logits are what a trial of the rows is compared with."""


@dataclass(frozen=True, slots=True)
class ModelRows:
    """What the probe found.

    tree: the model's cache list as layer numbers; a tuple where one block keeps several. dtypes: of each row tensor.
    states: per layer, the arrays of a recurrent one. attention: the distinct (kv heads, query group, key width, value
    width). logits: `[tokens, vocab]` of `PROBE_TOKENS` by the model alone. reasons: what a model of our own does whose
    bits depend on company, where a trial does not reach.
    """

    layout: Layout
    tree: tuple[Tree, ...]
    dtypes: dict[RowTensor, Any]
    states: tuple[Specs, ...]
    attention: tuple[tuple[int, int, int, int], ...]
    logits: Array
    reasons: tuple[str, ...] = ()

    def dtype(self, tensor: RowTensor) -> Any:
        return self.dtypes[tensor]

    @property
    def attended(self) -> set[Any]:
        """The types of rows that are attended to as they are kept."""
        return {self.dtypes[t] for layer in self.layout.layers if layer.kind in ATTENDED for t in layer.rows}


def model_rows(model: nn.Module, name: str) -> ModelRows:
    """Derives the layout of `model` by one forward of `PROBE_TOKENS`. ModelLoadError when it keeps anything else.

    A model of our own says itself what it keeps.
    """
    own: Callable[[], ModelRows] | None = getattr(model, "kept_rows", None)
    try:
        return own() if own is not None else _probed(model, name)
    except RuntimeError as error:  # what a device's kernels say of types they do not have
        reason = " ".join(str(error).split())[:200]
        raise ModelLoadError(
            f"{name}: does not run on this machine with its weights as they are: {reason} Try --dtype float32."
        ) from error
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:  # code of a hundred families
        reason = " ".join(str(error).split())[:200]
        raise ModelLoadError(f"{name}: its model code does not run with this config: {reason}") from error


def _probed(model: nn.Module, name: str) -> ModelRows:
    from mlx_lm.models.cache import make_prompt_cache

    made = make_prompt_cache(model)
    caches: list[Any] = []
    tree = tuple(_numbered(cache, caches) for cache in made)
    kinds = [_kind(cache, name) for cache in caches]
    for cache in caches:
        cache.queries_seen = []
    logits = model(mx.array([PROBE_TOKENS]), cache=made)[0]
    mx.eval(logits)
    layers, states = [], []
    dtypes: dict[RowTensor, Any] = {}
    for kind, cache in zip(kinds, caches, strict=True):
        layer, found = _layer(kind, cache, name)
        layers.append(layer)
        dtypes.update(found)
        states.append(_states(cache) if kind == "recurrent" else ())
    shapes = {_attention_shape(layer, c) for layer, c in zip(layers, caches, strict=True) if c.queries_seen}
    return ModelRows(Layout(tuple(layers)), tree, dtypes, tuple(states), tuple(sorted(shapes)), logits)


def _numbered(cache: Any, into: list[Any]) -> Tree:
    """Appends a cache, or the parts of a list of caches, to `into`; answers with their places there."""
    if type(cache).__name__ == "CacheList":
        return tuple(_numbered(part, into) for part in cache.caches)
    into.append(cache)
    return len(into) - 1


def _kind(cache: Any, name: str) -> Kind:
    kinds: dict[str, Kind] = {"KVCache": "attention", "RotatingKVCache": "window", "ArraysCache": "recurrent"}
    kind = kinds.get(type(cache).__name__)
    if kind is None or getattr(cache, "keep", False):
        raise ModelLoadError(f"{name}: its layers keep a {type(cache).__name__}, which cannot be kept as rows.")
    return kind


def _layer(kind: Kind, cache: Any, name: str) -> tuple[LayerLayout, dict[RowTensor, Any]]:
    if kind == "recurrent":
        return LayerLayout("recurrent", anchor_bytes=sum(s.nbytes for s in _states(cache) if s)), {}
    if cache.keys is None:
        raise ModelLoadError(f"{name}: an attention layer keeps no keys, so its rows cannot be kept.")
    pairs = _tensors(cache.keys, cache.values)
    if kind == "window":
        return LayerLayout("window", tuple(pairs), window=int(cache.max_size)), pairs
    return LayerLayout("attention", tuple(pairs)), pairs


def _tensors(keys: Array, values: Array) -> dict[RowTensor, Any]:
    """One tensor for keys and values of one shape, heads of keys first: half the writes of two."""
    if keys.shape == values.shape and keys.dtype == values.dtype:
        return {RowTensor("kv", 2 * keys.shape[1], keys.shape[3], keys.dtype.size): keys.dtype}
    return {
        RowTensor(name, array.shape[1], array.shape[3], array.dtype.size): array.dtype
        for name, array in (("k", keys), ("v", values))
    }


def _states(cache: Any) -> Specs:
    return tuple(None if a is None else StateSpec(tuple(a.shape[1:]), a.dtype) for a in cache.cache)


def _attention_shape(layer: LayerLayout, cache: Any) -> tuple[int, int, int, int]:
    heads = cache.keys.shape[1]
    return heads, cache.queries_seen[0] // heads, cache.keys.shape[3], cache.values.shape[3]
