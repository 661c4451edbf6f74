"""Which drafter a loaded model has."""

from __future__ import annotations

from pathlib import Path

from onecopy.runtime.models.loaded import Loaded

from . import qwen4_exp
from .beside import load_beside
from .device import DeviceDrafter
from .mtp import MtpDrafter
from .qwen3_5 import KINDS, Qwen35Head, layers_of


def drafter_for(loaded: Loaded, beside: str | None = None, context: int | None = None) -> DeviceDrafter | None:
    """The drafter in directory `beside`, or that which a checkpoint brings along; None when there is neither.

    Call it before the model is prepared. context: positions served, the model's by default.
    ModelLoadError when the drafter does not fit the model.
    """
    if beside is not None:
        return load_beside(Path(beside), loaded, context or loaded.context)
    if type(loaded.model).__module__ == qwen4_exp.MODULE and "mtp" in loaded.model:
        return MtpDrafter(qwen4_exp.Qwen4Head(loaded))
    if type(loaded.model).__module__ in KINDS and layers_of(loaded):
        return MtpDrafter(Qwen35Head(loaded))
    return None
