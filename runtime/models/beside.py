"""Read a small model that stands beside a served one: its config and its tensors, unfitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from onecopy.runtime.errors import ModelLoadError

from .digest import digest
from .safetensors import check_directory, parse

Array = Any


@dataclass(frozen=True, slots=True)
class Beside:
    """What a directory holds. config: of the file `where`. tensors: lazy, by name. mark: a digest of all its files."""

    where: Path
    config: dict[str, Any]
    tensors: dict[str, Array]
    mark: str


def read_beside(path: Path) -> Beside:
    """Runs on the thread that owns MLX. ModelLoadError when there is no config, or names the file that is wrong."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelLoadError(f"{path}: no drafter is here: there is no config.json.")
    config, files = parse(file.read_bytes(), file), check_directory(path)
    loaded = [cast(dict[str, Array], mx.load(str(each))) for each in files]
    tensors = {name: tensor for each in loaded for name, tensor in each.items()}
    return Beside(file, config, tensors, digest([*files, file]))
