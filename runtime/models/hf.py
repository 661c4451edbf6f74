"""Load a Hugging Face directory of any architecture mlx-lm knows, MLX-quantized ones included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from onecopy.runtime.errors import ModelLoadError

from . import light
from .dense import settle
from .digest import digest
from .families import classes
from .heads import draft_head
from .hf_vocab import tokenizer_of
from .loaded import Loaded
from .qwen4_exp import is_qwen4_exp, load_qwen4_exp
from .safetensors import check_directory, parse

CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "seq_length")
DEFAULT_CONTEXT = 32_768
"""Served when a config names no length (recurrent models have none)."""


def load_hf(path: Path, name: str, dtype: mx.Dtype | None) -> Loaded:
    """The model in directory `path`. dtype None keeps quantized layers. ModelLoadError names what is wrong."""
    config = parse((path / "config.json").read_bytes(), path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{path / 'config.json'}: the field model_type is missing.")
    files = check_directory(path)
    own = is_qwen4_exp(config)
    model, config = _own(path, dtype) if own else _assemble(path, dtype)
    tokenizer = tokenizer_of(path, _ends(config))
    return Loaded(
        id=name,
        model=model,
        config=config,
        tokenizer=tokenizer,
        template=tokenizer.template if tokenizer else None,
        eos=tokenizer.eos_ids if tokenizer else _ends(config),
        digest=digest([*files, path / "config.json"]),
        kind="hf",
        quantization=config.get("quantization") or config.get("quantization_config"),
        dtype="native" if dtype is None else str(dtype).removeprefix("mlx.core."),
        context=_context(config),
        path=path,
        draft_head={} if own else draft_head(files),
    )


def _own(path: Path, dtype: mx.Dtype | None) -> tuple[nn.Module, dict[str, Any]]:
    """A model that mlx-lm lacks. Its n-gram tables stay in their files."""
    model, config = load_qwen4_exp(path, dtype=dtype)
    file = path / "generation_config.json"
    ends = parse(file.read_bytes(), file).get("eos_token_id") if file.is_file() else None
    return model, config if ends is None else config | {"eos_token_id": ends}


def _assemble(path: Path, dtype: mx.Dtype | None) -> tuple[nn.Module, dict[str, Any]]:
    light.whole()
    from mlx_lm.utils import dequantize_model, load_model

    try:
        model, config = load_model(path, lazy=True, get_model_classes=lambda config: classes(_renamed(config), path))
        if dtype is not None:
            model = dequantize_model(model)
        return settle(model, dtype), config
    except ModelLoadError:
        raise
    except Exception as error:  # model code of a hundred families meets a config and tensors it may not fit
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelLoadError(
            f"{path}: the weights do not fit the model that config.json describes: {reason}"
        ) from error


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the model type under which mlx-lm keeps its classes."""
    from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

    kind = config["model_type"]
    names = config.get("architectures") or ()
    special = (MODEL_ARCHITECTURE_REMAPPING.get((kind, a)) for a in ([names] if isinstance(names, str) else names))
    return config | {"model_type": next(filter(None, special), MODEL_REMAPPING.get(kind, kind))}


def _ends(config: dict[str, Any]) -> frozenset[int]:
    """End ids of the config (generation_config.json wins, as mlx-lm merges it)."""
    text = config.get("text_config") or {}
    found = config.get("eos_token_id", text.get("eos_token_id"))
    return frozenset(i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int))


def _context(config: dict[str, Any]) -> int:
    for part in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    return DEFAULT_CONTEXT
