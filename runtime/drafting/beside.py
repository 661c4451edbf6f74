"""Make a block drafter of what a Hugging Face directory holds, and fit it to the target it drafts for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten
from onecopy.runtime.errors import ModelLoadError, Unsupported
from onecopy.runtime.models.beside import read_beside
from onecopy.runtime.models.loaded import Loaded

from .block import BlockDrafter
from .dflash import BlockConfig, BlockModel
from .target import Target

T = TypeVar("T")
Config = dict[str, Any]

FIRST, SECOND = "DFlashDraftModel", "DFlash2DraftModel"
"""Architectures that are understood, by the names in their configs."""


def load_beside(path: Path, loaded: Loaded, context: int) -> BlockDrafter:
    """The drafter in directory `path` for a target that is loaded and not yet prepared.

    ModelLoadError in one line: what is no such directory, what does not belong to this target.
    """
    found = read_beside(path)
    config = read_config(found.config, found.where)
    try:
        target = Target(loaded)
    except Unsupported as error:
        raise ModelLoadError(error.message) from None
    _fits(config, target, path, loaded.id)
    model = BlockModel(config)
    _fill(model, found.tensors, target.dtype, path)
    return BlockDrafter(model, config, target, context, found.mark)


def read_config(found: Config, file: Path) -> BlockConfig:
    """ModelLoadError names the field that is missing or not understood."""
    kind = next(iter(found.get("architectures") or ()), None)
    if kind not in (FIRST, SECOND):
        raise ModelLoadError(f"{file}: {kind!r} is no drafter that is known; known are {FIRST} and {SECOND}.")
    own = {**found, **(found.get("dflash_config") or {})}

    def field(name: str, make: Callable[[Any], T]) -> T:
        try:
            return make(own[name])
        except (KeyError, TypeError, ValueError):
            raise ModelLoadError(f"{file}: the field {name} is missing or not understood.") from None

    layers = field("num_hidden_layers", int)
    kinds = tuple(own.get("layer_types") or ("full_attention",) * layers)
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelLoadError(f"{file}: the field layer_types is missing or not understood.")
    rope = own.get("rope_parameters") or own.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelLoadError(f"{file}: rotary positions of type {rope.get('rope_type')!r} are not supported here.")
    causal = own.get("is_causal")
    second = kind == SECOND
    return BlockConfig(
        hidden=field("hidden_size", int),
        heads=field("num_attention_heads", int),
        kv_heads=field("num_key_value_heads", int),
        head_dim=field("head_dim", int),
        inner=field("intermediate_size", int),
        vocab=field("vocab_size", int),
        eps=field("rms_norm_eps", float),
        theta=float(rope.get("rope_theta", own.get("rope_theta", 10000.0))),
        block=max(2, field("block_size", int)),
        mask=field("mask_token_id", int),
        targets=field("target_layer_ids", lambda ids: tuple(map(int, ids))),
        windows=tuple(field("sliding_window", int) if k == "sliding_attention" else None for k in kinds),
        causal=tuple(k == "sliding_attention" if causal is None else bool(causal) for k in kinds),
        conv=(field("conv_kernel_size", int), field("conv_group_size", int)) if second else None,
        selector=(field("selector_rank", int), field("selector_top_k", int)) if second else None,
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        scale=float(own.get("output_multiplier") or 1.0),
        cap=float(own.get("final_logit_softcapping") or 0.0),
    )


def _fits(c: BlockConfig, target: Target, path: Path, name: str) -> None:
    layers = len(target.layers)
    for wrong, sentence in (
        (c.hidden != target.width, f"its hidden states have {c.hidden} elements, those of {name} {target.width}"),
        (c.vocab != target.vocab, f"it knows {c.vocab} tokens, {name} knows {target.vocab}"),
        (not 0 <= c.mask < c.vocab, f"its mask token {c.mask} is no token of {name}"),
        (
            not c.targets or not all(0 <= i < layers for i in c.targets),
            f"it reads layers {list(c.targets)}, {name} has {layers}",
        ),
        (len(set(c.causal)) > 1, "its layers differ in whether a block sees itself whole"),
    ):
        if wrong:
            raise ModelLoadError(f"{path}: this drafter is not for {name}: {sentence}.")


def _fill(model: BlockModel, tensors: dict[str, Any], dtype: Any, path: Path) -> None:
    wanted = {key: tuple(value.shape) for key, value in tree_flatten(model.parameters())}
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            raise ModelLoadError(f"{path}: the tensor {name} is missing.")
        if name not in wanted:
            raise ModelLoadError(f"{path}: the tensor {name} belongs to nothing that its config describes.")
        if wanted[name] != tuple(tensors[name].shape):
            raise ModelLoadError(f"{path}: the tensor {name} is {list(tensors[name].shape)}, not {list(wanted[name])}.")
    model.load_weights([(name, tensor.astype(dtype)) for name, tensor in tensors.items()])
    model.eval()
    mx.eval(model.parameters())
