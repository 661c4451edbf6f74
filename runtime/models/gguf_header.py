"""A GGUF file's header: metadata and the tensor directory, checked before any other code maps the file.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian. The tensor reader behind `mx.load` trusts every count,
length and offset, so each one is held against the file's size here first.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecopy.runtime.errors import ModelLoadError

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata value type to its `struct` letter."""

MAX_NAME, MAX_DIMS, MAX_ENTRIES = 65_535, 4, 1 << 22


@dataclass(frozen=True, slots=True)
class Quant:
    """One tensor type. block: weights per block, size: bytes per block. readable: `mx.load` can read it."""

    name: str
    block: int
    size: int
    readable: bool = True
    packed: bool = False


QUANTS = {
    0: Quant("F32", 1, 4),
    1: Quant("F16", 1, 2),
    2: Quant("Q4_0", 32, 18, packed=True),
    3: Quant("Q4_1", 32, 20, packed=True),
    6: Quant("Q5_0", 32, 22, readable=False),
    7: Quant("Q5_1", 32, 24, readable=False),
    8: Quant("Q8_0", 32, 34, packed=True),
    9: Quant("Q8_1", 32, 36, readable=False),
    10: Quant("Q2_K", 256, 84),
    11: Quant("Q3_K", 256, 110, readable=False),
    12: Quant("Q4_K", 256, 144, packed=True),
    13: Quant("Q5_K", 256, 176, readable=False),
    14: Quant("Q6_K", 256, 210),
    15: Quant("Q8_K", 256, 292, readable=False),
    24: Quant("I8", 1, 1),
    25: Quant("I16", 1, 2),
    26: Quant("I32", 1, 4),
    30: Quant("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` in row-major order (the file's, reversed), quant: its type, offset: bytes into the file."""

    name: str
    shape: tuple[int, ...]
    quant: Quant
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """metadata: key to int, float, bool, str or a list of one of them. tensors: name to its entry."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_header(path: Path) -> Header:
    """Read and check the whole header. ModelLoadError names the file and the first thing wrong with it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except ValueError as error:
        raise ModelLoadError(f"{path}: not a GGUF file: {error}") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Reader:
    """A cursor over the mapped file; every read is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.end = len(data)

    def header(self) -> Header:
        tensors, pairs = self._preamble()
        metadata = dict(self._pair() for _ in range(pairs))
        alignment = self._alignment(metadata)
        raw = [self._tensor() for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment
        return Header(self.path, metadata, dict(self._place(raw, start, alignment)))

    def _preamble(self) -> tuple[int, int]:
        if self.data[:4] != b"GGUF":
            raise self.bad("not a GGUF file: it does not start with the letters GGUF")
        self.at = 4
        version: int = self.number("I")
        if version not in (2, 3):
            why = "it is big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise self.bad(f"unsupported GGUF file: {why}; versions 2 and 3, little-endian, are read")
        tensors, pairs = self.number("Q"), self.number("Q")
        if max(tensors, pairs) > min(MAX_ENTRIES, self.end // 12):
            raise self.bad(f"damaged header: it claims {tensors} tensors and {pairs} metadata entries")
        return tensors, pairs

    def _pair(self) -> tuple[str, Any]:
        key = self.string(MAX_NAME)
        return key, self._value(key, self.number("I"))

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self.string(self.end)
        if kind == ARRAY:
            return self._array(key, self.number("I"), self.number("Q"))
        if kind not in SCALARS:
            raise self.bad(f"damaged header: metadata {key!r} has the unknown type {kind}")
        return self.number(SCALARS[kind])

    def _array(self, key: str, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            self._room(count * 8, f"the list {key!r} claims {count} strings")
            return [self.string(self.end) for _ in range(count)]
        if kind not in SCALARS:
            raise self.bad(f"damaged header: list {key!r} has elements of unsupported type {kind}")
        width = struct.calcsize(SCALARS[kind])
        self._room(count * width, f"the list {key!r} claims {count} elements")
        values = struct.unpack_from(f"<{count}{SCALARS[kind]}", self.data, self.at)
        self.at += count * width
        return list(values)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.bad(f"damaged header: alignment {alignment!r}")
        return alignment

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string(MAX_NAME)
        dims = self.number("I")
        if not 1 <= dims <= MAX_DIMS:
            raise self.bad(f"damaged header: tensor {name!r} has {dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(dims))[::-1]
        return name, shape, self.number("I"), self.number("Q")

    def _place(
        self, raw: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> Iterator[tuple[str, TensorInfo]]:
        """Check each tensor's type and place: known, readable, aligned, inside the file, none over another."""
        free, seen = 0, set()
        for name, shape, kind, offset in sorted(raw, key=lambda t: t[3]):
            quant = self._quant(name, shape, kind)
            nbytes = _nbytes(shape, quant)
            if name in seen or offset % alignment or offset < free or min(shape) < 1:
                raise self.bad(f"damaged header: tensor {name!r} overlaps another, is doubled or misplaced")
            if start + offset + nbytes > self.end:
                missing = start + offset + nbytes - self.end
                raise self.bad(f"truncated: tensor {name!r} ends {missing} bytes past the end of the file")
            free = offset + nbytes
            seen.add(name)
            yield name, TensorInfo(name, shape, quant, start + offset, nbytes)

    def _quant(self, name: str, shape: tuple[int, ...], kind: int) -> Quant:
        quant = QUANTS.get(kind)
        if quant is None or not quant.readable:
            known = ", ".join(q.name for q in QUANTS.values() if q.readable)
            raise self.bad(f"tensor {name!r} has type {quant.name if quant else kind}, which cannot be read ({known})")
        if shape[-1] % quant.block or (quant.packed and not name.endswith(".weight")):
            raise self.bad(f"damaged header: tensor {name!r} of shape {shape} cannot have type {quant.name}")
        return quant

    def number(self, letter: str) -> Any:
        width = struct.calcsize(letter)
        self._room(width, "it ends inside its header")
        (value,) = struct.unpack_from("<" + letter, self.data, self.at)
        self.at += width
        return value

    def string(self, longest: int) -> str:
        size = self.number("Q")
        if size > longest or self.at + size > self.end:
            raise self.bad(f"truncated or damaged: a string at byte {self.at} claims {size} bytes")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", errors="replace")

    def _room(self, need: int, what: str) -> None:
        if self.at + need > self.end:
            raise self.bad(f"truncated or damaged: {what}, but the file has {self.end} bytes")

    def bad(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {reason}.")


def _nbytes(shape: tuple[int, ...], quant: Quant) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count // quant.block * quant.size
