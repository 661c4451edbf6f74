"""`load`: one entry for every kind of source."""

from __future__ import annotations

import mlx.core as mx
from onecopy.runtime.errors import ModelLoadError

from .loaded import Loaded
from .names import Source, resolve

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16, "native": None}


def load(name_or_path: str, *, dtype: str | None = None) -> Loaded:
    """Load a model: "smollm2", a Hugging Face directory, or a GGUF file. Runs on the thread that owns MLX; no network.

    dtype: "float32", "float16" or "bfloat16" converts (and unpacks) every weight at load, "native" keeps them as
    stored; None is "float32" on a CPU, where only f32 matmul is fast, and "native" elsewhere.
    ModelLoadError names the file and the reason.
    """
    source = resolve(name_or_path)
    chosen = dtype or ("float32" if mx.default_device().type == mx.DeviceType.cpu else "native")
    if chosen not in DTYPES:
        raise ModelLoadError(f"the weight type {chosen!r} is unknown; known are {', '.join(DTYPES)}.")
    return _load(source, DTYPES[chosen])


def _load(source: Source, dtype: mx.Dtype | None) -> Loaded:
    from .gguf import load_gguf

    return load_gguf(source.path, source.id, dtype)
