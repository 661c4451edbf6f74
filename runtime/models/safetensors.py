"""A model directory's safetensors files, checked before any tensor is read.

Format: an unsigned 64-bit header length, that many bytes of JSON (name to dtype, shape, data_offsets), then the data.
The reader behind `mx.load` loads lazily: a file cut short would otherwise fail late, or hand out bytes of nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onecopy.runtime.errors import ModelLoadError

from .names import weight_files

LONGEST_HEADER = 100_000_000
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def check_directory(path: Path) -> list[Path]:
    """The checked weight files of model directory `path`. ModelLoadError names the first file that is wrong."""
    index = path / "model.safetensors.index.json"
    named = _indexed(index) if index.is_file() else set()
    files = weight_files(path)
    for name in sorted(named - {f.name for f in files}):
        raise ModelLoadError(f"{path / name}: the weight file is missing (it is named in {index.name}).")
    if not files:
        raise ModelLoadError(f"{path}: no weight files: nothing matches model*.safetensors.")
    for file in files:
        check_file(file)
    return files


def check_file(path: Path) -> None:
    """Check one file's header against its size. ModelLoadError says what does not fit."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or length > min(size - 8, LONGEST_HEADER):
            raise ModelLoadError(
                f"{path}: truncated or damaged: the header claims {length} of the file's {size} bytes."
            )
        header = parse(file.read(length), path)
    _check_spans(path, header, size - 8 - length)


def parse(text: bytes | str, path: Path) -> dict[str, Any]:
    """The JSON object in `text`; `path` is what the error names."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise ModelLoadError(f"{path}: not valid JSON: {reason}.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: not a JSON object.")
    return value


def _indexed(index: Path) -> set[str]:
    names = parse(index.read_bytes(), index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise ModelLoadError(f"{index}: damaged: it has no weight_map from tensors to files.")
    return set(names.values())


def _check_spans(path: Path, header: dict[str, Any], room: int) -> None:
    free, before = 0, ""
    for start, end, name in sorted(_spans(path, header)):
        if end > room:
            raise ModelLoadError(
                f"{path}: truncated: tensor {name!r} ends {end - room} bytes past the end of the file."
            )
        if start < free:
            raise ModelLoadError(f"{path}: damaged: tensors {before!r} and {name!r} overlap.")
        free, before = end, name


def _spans(path: Path, header: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    for name, entry in header.items():
        if name != "__metadata__":
            yield (*_span(path, name, entry), name)


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        bits, shape = BITS[entry["dtype"]], [_count(n) for n in entry["shape"]]
        start, end = (_count(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ModelLoadError(f"{path}: damaged: the entry of tensor {name!r} is not understood.") from None
    if (end - start) * 8 != math.prod(shape) * bits:
        raise ModelLoadError(
            f"{path}: damaged: tensor {name!r} of shape {shape} does not fill its {end - start} bytes."
        )
    return start, end


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value
