"""Draft heads that a checkpoint carries beside its model.

mlx-lm's model code leaves out the tensors under `mtp.` (multi-token prediction); here they are kept, under the names
and in the form that the same code would give them, for whoever drafts with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

Array = Any

_HEAD = re.compile(r"(?:^|\.)mtp\.(.+)$")


def draft_head(files: Iterable[Path]) -> dict[str, Array]:
    """Tensors under `mtp.` of checked weight files, by the rest of their names; empty when there are none.

    Lazy: a tensor nobody uses is never read. Where the files are as published (a convolution's kernel last, which is
    how mlx-lm tells), a norm's vector `w` stands for a factor `1 + w`; here it is the factor.
    """
    weights = {name: tensor for file in files for name, tensor in _load(file).items()}
    found = {match[1]: tensor for name, tensor in weights.items() if (match := _HEAD.search(name))}
    published = any(name.endswith("conv1d.weight") and w.shape[-1] != 1 for name, w in weights.items())
    return {name: w + 1.0 if published and _is_norm(name, w) else w for name, w in found.items()}


def _load(file: Path) -> dict[str, Array]:
    return cast(dict[str, Array], mx.load(str(file)))


def _is_norm(name: str, weight: Array) -> bool:
    return weight.ndim == 1 and "norm" in name and name.endswith(".weight")
