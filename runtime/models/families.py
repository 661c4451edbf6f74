"""From a config to model classes: mlx-lm's, looked up by model type, and our own where mlx-lm has none."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import mlx.nn as nn
from onecopy.runtime.errors import ModelLoadError

from . import light
from .qwen4_exp.config import MODEL_TYPES

OWN = frozenset(MODEL_TYPES)
"""Model types whose classes live in this package; `hf.py` knows how each is loaded."""

HELPERS = frozenset(
    {"activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm"}
    | {"switch_layers"}
)


def build(config: dict[str, Any], source: Path) -> nn.Module:
    """An empty model for `config`. ModelLoadError when the type is unknown or the config does not fit it."""
    model_class, args_class = classes(config, source)
    try:
        return model_class(args_class.from_dict(config))
    except (TypeError, KeyError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ModelLoadError(f"{source}: the config does not fit a {config['model_type']!r} model: {error}") from None


def classes(config: dict[str, Any], source: Path) -> tuple[Any, Any]:
    """(Model, ModelArgs) for `config["model_type"]`. ModelLoadError names an unknown type and the nearest known."""
    kind = str(config.get("model_type"))
    if kind not in known():
        raise ModelLoadError(f"{source}: {unknown(kind)}")
    try:
        light.enter()
        module = importlib.import_module(f"mlx_lm.models.{kind}")
        return module.Model, module.ModelArgs
    except SystemExit:  # what a model file does when a package that it needs is missing
        raise ModelLoadError(f"{source}: mlx-lm's code for {kind!r} needs a package that is not installed.") from None
    except (ImportError, AttributeError, ValueError):
        raise ModelLoadError(f"{source}: {unknown(kind)}") from None


def known() -> list[str]:
    """Every model type that can be loaded."""
    spec = importlib.util.find_spec("mlx_lm")
    roots = (spec.submodule_search_locations if spec else None) or []
    names = {p.stem for root in roots for p in Path(root, "models").glob("*.py")}
    return sorted(names - HELPERS - {"__init__"} | OWN)


def unknown(kind: str) -> str:
    near = difflib.get_close_matches(kind, known(), n=3, cutoff=0.5)
    hint = f"; the nearest known are {', '.join(near)}" if near else ""
    return f"the model architecture {kind!r} is not supported{hint}."
