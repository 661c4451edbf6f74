"""From a checkpoint directory to a ready model: names, layouts and the n-gram tables of a qwen4_exp checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models import light
from onecopy.runtime.models.safetensors import check_directory, parse

from .config import Config, parse_config
from .model import Model, Tables
from .ngram import NgramHash, ngram_hash
from .table import NgramTable, TensorPlace, tensor_places

_log = logging.getLogger("onecopy.models")

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_TABLE = re.compile(r"layers\.(\d+)\.ple\.ple_embedding\.ngram_embedding\.(?:shard_(\d+)\.)?weight$")
_HASH = re.compile(r"layers\.\d+\.ple\.ple_embedding\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+_proj)\.(\w+)$")
# Norms whose checkpoint weight is w of a factor 1 + w; the delta net's own norm keeps the factor itself.
_SHIFTED = re.compile(r"(hc_norm|[qk]_norm|[qk]_layernorm|norm_(key|query|conv)|pre_fc_norm_\w+)\.weight$")

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)

Weights = dict[str, mx.array]


def load_qwen4_exp(path: Path, *, dtype: mx.Dtype | None = mx.float32) -> tuple[Model, dict[str, Any]]:
    """The model, its weights evaluated, and the parsed config.json. Runs on the thread that owns MLX.

    dtype: what matrices become (norms, taps and the recurrence's constants are always f32); None keeps them as stored,
    MLX-quantised ones included. N-gram tables stay in their files. Unknown or missing tensors, wrong shapes,
    unreadable files: ModelLoadError with one sentence.
    """
    raw = parse(_read_config(path), path / "config.json")
    config = parse_config(raw)
    files = check_directory(path)
    places = {_plain(n): place for file in files for n, place in tensor_places(file).items()}
    weights = canonical(_read_weights(files))
    model = Model(config, _tables(config, places, path), mtp=_mtp_layers(weights, config))
    _quantise(model, weights, raw)
    _assign(model, weights, dtype, path)
    return _unpacked(model, raw, dtype), raw


def canonical(weights: Weights) -> Weights:
    """Checkpoint tensors under the model's names and layouts: experts stacked, taps [kernel, C], factors 1 + w.

    A checkpoint with one-channel convolutions last ([C, 1, k]) is as published; [C, k, 1] marks one already
    converted for MLX, whose norms hold the factor.
    """
    named = {_plain(name): tensor for name, tensor in weights.items()}
    kept = {name: tensor for name, tensor in named.items() if not _left_out(name)}
    published = all(w.shape[-1] != 1 for n, w in kept.items() if n.endswith("linear_attn.conv1d.weight"))
    split = dict(_split_fused(kept.items()))
    return {name: _laid_out(name, tensor, published) for name, tensor in _stack_experts(split).items()}


def _read_config(path: Path) -> bytes:
    try:
        return (path / "config.json").read_bytes()
    except OSError as wrong:
        raise ModelLoadError(f"{path / 'config.json'}: not readable ({wrong.strerror}).") from None


def _read_weights(files: Iterable[Path]) -> Weights:
    """Every tensor, lazily: those never evaluated (the n-gram tables) are never read."""
    weights: Weights = {}
    for file in files:
        try:
            weights.update(cast(Weights, mx.load(str(file))))
        except (RuntimeError, ValueError) as wrong:
            raise ModelLoadError(f"{file}: not readable ({wrong}).") from None
    return weights


def _plain(name: str) -> str:
    """The name without the wrapper a checkpoint may put around the text trunk."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _left_out(name: str) -> bool:
    return bool(_HASH.search(name)) or name.startswith(("visual.", "vision_tower."))


def _split_fused(items: Iterable[tuple[str, mx.array]]) -> Iterable[tuple[str, mx.array]]:
    """experts.gate_up_proj [E, 2I, d] as gate and up; fused experts.down_proj gets its `.weight`."""
    for name, tensor in items:
        stem, _, last = name.rpartition(".experts.")
        if stem and last.split(".")[0] == "gate_up_proj":
            rest = last.removeprefix("gate_up_proj") or ".weight"
            gate, up = mx.split(tensor, 2, axis=1)
            yield f"{stem}.experts.gate_proj{rest}", gate
            yield f"{stem}.experts.up_proj{rest}", up
        else:
            yield (f"{name}.weight" if stem and last == "down_proj" else name), tensor


def _stack_experts(weights: Weights) -> Weights:
    """experts.3.up_proj.weight … as one experts.up_proj.weight [E, out, in]."""
    out: Weights = {}
    stacks: dict[str, dict[int, mx.array]] = {}
    for name, tensor in weights.items():
        if match := _EXPERT.match(name):
            stem, expert, matrix, kind = match.groups()
            stacks.setdefault(f"{stem}.{matrix}.{kind}", {})[int(expert)] = tensor
        else:
            out[name] = tensor
    return out | {name: mx.stack([parts[i] for i in sorted(parts)]) for name, parts in stacks.items()}


def _laid_out(name: str, tensor: mx.array, published: bool) -> mx.array:
    if name.endswith("conv1d.weight"):
        return tensor.squeeze(1 if tensor.shape[1] == 1 else 2).T
    if published and _SHIFTED.search(name):
        return 1.0 + tensor.astype(mx.float32)
    return tensor


def _tables(config: Config, places: Mapping[str, TensorPlace], path: Path) -> Tables:
    """Each PLE layer's hash and its memory-mapped table."""
    shards: dict[int, dict[int, TensorPlace]] = {}
    for name, place in places.items():
        if match := _TABLE.search(name):
            shards.setdefault(int(match[1]), {})[int(match[2] or 0)] = place
    return {
        layer: _table(_stored_hash(ngram_hash(config, i), layer, places), shards.get(layer, {}), config, path)
        for i, layer in enumerate(config.ple_layers)
    }


def _table(
    of: NgramHash, shards: Mapping[int, TensorPlace], config: Config, path: Path
) -> tuple[NgramHash, NgramTable]:
    table = NgramTable([shards[i] for i in sorted(shards)])
    needed, width = int((of.primes + of.offsets).max()), config.ple_dim // len(of.primes)
    if table.rows < needed or table.width != width:
        raise ModelLoadError(
            f"{path}: the n-gram table is [{table.rows}, {table.width}], the config needs [{needed}, {width}]."
        )
    return of, table


def _stored_hash(computed: NgramHash, layer: int, places: Mapping[str, TensorPlace]) -> NgramHash:
    """Checkpoints carry the hash constants as buffers; they are what the table was trained with."""
    stem = f"layers.{layer}.ple.ple_embedding."
    buffers = {"layer_multipliers": computed.multipliers, "ngram_heads_vocab_sizes": computed.primes}
    buffers["ngram_heads_offsets"] = computed.offsets
    for name, expected in buffers.items():
        place = places.get(stem + name)
        if place and not np.array_equal(np.fromfile(place.path, "<i8", expected.size, "", place.offset), expected):
            raise ModelLoadError(f"{place.path}: {stem}{name} does not match config.json.")
    return computed


def _mtp_layers(weights: Weights, config: Config) -> int:
    """Layers of the head that `mtp.` holds, where it is one that this package knows and has as many as the config says.

    Otherwise its tensors are dropped, with a line.
    """
    found = {name: weights[name].shape for name in weights if name.startswith("mtp.")}
    if not found:
        return 0
    count = len({name.split(".")[2] for name in found if name.startswith("mtp.layers.")})
    if count and config.mtp_layers in (0, count) and found == _mtp_shapes(config, count):
        return count
    _log.warning("The checkpoint's MTP head has an unknown shape; it is not used for drafting.")
    for name in found:
        del weights[name]
    return 0


def _mtp_shapes(config: Config, layers: int) -> dict[str, tuple[int, ...]]:
    head = Model(config, {}, mtp=layers).mtp
    return {f"mtp.{name}": value.shape for name, value in tree_flatten(head.parameters())}


def _quantise(model: Model, weights: Weights, raw: Mapping[str, Any]) -> None:
    if settings := raw.get("quantization"):
        nn.quantize(
            model,
            group_size=int(settings["group_size"]),
            bits=int(settings["bits"]),
            class_predicate=lambda name, module: hasattr(module, "to_quantized") and f"{name}.scales" in weights,
        )


def _unpacked(model: Model, raw: Mapping[str, Any], dtype: mx.Dtype | None) -> Model:
    """Plain matrices instead of quantised ones, unless they were asked for as stored."""
    if dtype is None or not raw.get("quantization"):
        return model
    light.enter()
    from mlx_lm.utils import dequantize_model

    plain: Model = dequantize_model(model)
    plain.set_dtype(dtype, lambda kind: kind in _FLOATS and kind != mx.float32)
    mx.eval(plain.parameters())
    return plain


def _assign(model: Model, weights: Weights, dtype: mx.Dtype | None, path: Path) -> None:
    if model.config.tied:
        weights.pop("lm_head.weight", None)
    try:
        model.load_weights([(name, _cast(name, tensor, dtype)) for name, tensor in weights.items()], strict=True)
        mx.eval(model.parameters())
    except (RuntimeError, ValueError) as wrong:
        first = str(wrong).strip().splitlines()[0]
        raise ModelLoadError(f"{path}: the weights do not fit the config ({first}).") from None
    model.eval()


def _cast(name: str, tensor: mx.array, dtype: mx.Dtype | None) -> mx.array:
    if tensor.dtype not in _FLOATS:
        return tensor
    small = tensor.ndim == 1 or name.endswith("conv1d.weight")
    return tensor.astype(mx.float32 if small else dtype or tensor.dtype)
