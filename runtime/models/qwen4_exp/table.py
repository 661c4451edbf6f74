"""N-gram embedding rows straight from the checkpoint's files: memory-mapped, read row by row, never loaded whole.

A table can be larger than memory. Only the pages under the rows that a token names are read; the kernel may
drop them again at any time, since they are clean.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models.safetensors import parse

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies: its file, byte offset in that file, safetensors dtype and shape."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


def tensor_places(path: Path) -> dict[str, TensorPlace]:
    """Every tensor of one checked safetensors file, from its header alone."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse(file.read(size), path)
    return {
        name: TensorPlace(path, 8 + size + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


class NgramTable:
    """Rows of a table that is cut on dim 0 into shards, in order. Host memory only; nothing is mutated."""

    def __init__(self, shards: Sequence[TensorPlace]) -> None:
        if not shards:
            raise ModelLoadError("The checkpoint has no n-gram embedding table.")
        widths = {place.shape[1:] for place in shards}
        kinds = {place.dtype for place in shards}
        if len(widths) != 1 or len(kinds) != 1 or not kinds <= set(_DTYPES):
            raise ModelLoadError(f"{shards[0].path}: n-gram table shards differ in width or type ({kinds}).")
        self._kind = shards[0].dtype
        self._maps = [_mapped(place) for place in shards]
        self._ends = np.cumsum([len(shard) for shard in self._maps])
        self.rows, self.width = int(self._ends[-1]), int(self._maps[0].shape[1])

    def take(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows [*ids.shape, width] as float32. Ids must be in [0, rows)."""
        flat = ids.reshape(-1)
        shard_of = np.searchsorted(self._ends, flat, side="right")
        out = np.empty((flat.size, self.width), np.float32)
        for shard in np.unique(shard_of):
            picked = np.flatnonzero(shard_of == shard)
            rows = self._maps[shard]
            out[picked] = _as_float(rows[flat[picked] - (self._ends[shard] - len(rows))], self._kind)
        return out.reshape(*ids.shape, self.width)


def _mapped(place: TensorPlace) -> NDArray[Any]:
    try:
        rows: NDArray[Any] = np.memmap(place.path, _DTYPES[place.dtype], "r", place.offset, place.shape)
    except (OSError, ValueError) as wrong:
        raise ModelLoadError(f"{place.path}: the n-gram table cannot be mapped ({wrong}).") from None
    _expect_random_reads(rows)
    return rows


def _expect_random_reads(rows: NDArray[Any]) -> None:
    """Read-ahead would fetch 32 pages for each row of a few hundred bytes."""
    mapping = getattr(rows, "_mmap", None)
    if mapping is not None and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)


def _as_float(rows: NDArray[Any], kind: str) -> NDArray[np.float32]:
    wide: NDArray[Any] = (rows.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else rows
    return wide.astype(np.float32)
