"""Load a GGUF file of a llama, qwen2 or qwen3 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from onecopy.runtime.errors import ModelLoadError

from .dense import GROUP, bits_of, settle, unpack
from .digest import digest
from .families import build
from .gguf_config import config_of, llama3_scaling, parameter_name, row_order
from .gguf_header import Header, read_header
from .gguf_tensors import read_tensors
from .gguf_vocab import tokenizer_of
from .loaded import Loaded


def load_gguf(path: Path, name: str, dtype: mx.Dtype | None) -> Loaded:
    """The model in GGUF file `path`. dtype None keeps packed weights packed. ModelLoadError names what is wrong."""
    header = read_header(path)
    config = config_of(header)
    tokenizer = tokenizer_of(header)
    weights = _weights(header, config)
    if dtype is not None:
        weights = unpack(weights, dtype)
    model = build(config, path)
    _pack(model, weights)
    _fill(header, model, weights)
    return Loaded(
        id=name,
        model=settle(model, None),
        config=config,
        tokenizer=tokenizer,
        template=tokenizer.template,
        eos=tokenizer.eos_ids,
        digest=digest([path]),
        kind="gguf",
        quantization=_quantization(header),
        dtype="native" if dtype is None else str(dtype).removeprefix("mlx.core."),
        context=config["max_position_embeddings"],
        path=path,
    )


def _weights(header: Header, config: dict[str, Any]) -> dict[str, mx.array]:
    """Tensors under mlx-lm's names, in mlx-lm's row order, as stored. Completes `config` from rope tensors."""
    loaded = read_tensors(header)
    if config["rope_scaling"] == {"rope_type": "llama3"}:
        config["rope_scaling"] = llama3_scaling(header, loaded["rope_freqs.weight"])
    reorder = row_order(config)
    named = ((parameter_name(name), array) for name, array in loaded.items())
    return {name: reorder(name, array) for name, array in named if name is not None}


def _pack(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Make packed layers where the file's weights stayed packed."""

    def rule(stem: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{stem}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        return {"group_size": GROUP, "bits": bits_of(weights, stem), "mode": "affine"}

    if any(name.endswith(".scales") for name in weights):
        nn.quantize(model, class_predicate=rule)


def _fill(header: Header, model: nn.Module, weights: dict[str, mx.array]) -> None:
    wanted = {name: p.shape for name, p in tree_flatten(model.parameters())}
    for name, shape in wanted.items():
        if name not in weights:
            raise ModelLoadError(f"{header.path}: the tensor for {name!r} is missing.")
        if weights[name].shape != shape:
            raise ModelLoadError(f"{header.path}: {name!r} has shape {weights[name].shape}, the model needs {shape}.")
    extra = sorted(weights.keys() - wanted.keys())
    if extra:
        raise ModelLoadError(f"{header.path}: the tensor {extra[0]!r} does not belong to this architecture.")
    model.load_weights(list(weights.items()))


def _quantization(header: Header) -> dict[str, Any] | None:
    kinds = sorted({t.quant.name for t in header.tensors.values() if t.quant.block > 1})
    return {"source": "gguf", "types": kinds} if kinds else None
