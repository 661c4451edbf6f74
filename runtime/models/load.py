"""`load`: one entry for every kind of source."""

from __future__ import annotations

import mlx.core as mx
from onecopy.runtime.errors import ModelLoadError

from .gguf import load_gguf
from .hf import load_hf
from .loaded import Loaded
from .names import resolve

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
    read = load_gguf if source.kind == "gguf" else load_hf
    return read(source.path, source.id, DTYPES[chosen])
