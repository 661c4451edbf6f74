"""Which drafter a loaded model has."""

from __future__ import annotations

from onecopy.runtime.models.loaded import Loaded

from .device import DeviceDrafter
from .mtp import MtpDrafter
from .qwen3_5 import KINDS, Qwen35Head


def drafter_for(loaded: Loaded) -> DeviceDrafter | None:
    """The drafter that a checkpoint brings along, None when it brings none. Call it before the model is prepared.

    A model that has more prediction layers than one is drafted for by copies only.
    """
    layers = {name.split(".")[1] for name in loaded.draft_head if name.startswith("layers.")}
    if type(loaded.model).__module__ in KINDS and layers == {"0"}:
        return MtpDrafter(Qwen35Head(loaded))
    return None
