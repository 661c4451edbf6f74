"""Safetensors images in memory: the payload of every record, so that any tool can open an exported block.

Source: the safetensors format: u64 header length, JSON header, tensor bytes back to back.
bfloat16 and float8 values travel as integer arrays whose dtype carries the name (`BF16`, `F8_E4M3`, `F8_E5M2`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]

BF16 = np.dtype("<u2", metadata={"safetensors": "BF16"})
F8_E4M3 = np.dtype("u1", metadata={"safetensors": "F8_E4M3"})
F8_E5M2 = np.dtype("u1", metadata={"safetensors": "F8_E5M2"})

_PLAIN = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}
DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(code) for name, code in _PLAIN.items()},
    "BF16": BF16,
    "F8_E4M3": F8_E4M3,
    "F8_E5M2": F8_E5M2,
}
_NAMES = {np.dtype(code).str: name for name, code in _PLAIN.items()}

MAX_HEADER = 100_000_000
"""Bytes of the largest JSON header read, as the format's own readers have it."""
_MAX_RANK = 32


class BadImage(ValueError):
    """Not a well-formed safetensors image. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Image:
    """Named arrays and string metadata. Arrays from `decode` are read-only views of the decoded buffer."""

    tensors: Tensors
    metadata: Mapping[str, str] = field(default_factory=dict)


class Info(msgspec.Struct, forbid_unknown_fields=True):
    """One tensor of a header. data_offsets: [start, end) in bytes behind the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Head:
    """What an image's header says, checked against the size of its data. size: bytes before the data."""

    infos: Mapping[str, Info]
    metadata: Mapping[str, str]
    size: int


def encode(image: Image) -> bytes:
    """The image as bytes. Strided arrays are made contiguous one at a time. Raises BadImage for a foreign dtype."""
    head = encode_head({name: info_of(array) for name, array in image.tensors.items()}, image.metadata)
    return b"".join([head, *(array_bytes(array) for array in image.tensors.values())])


def encode_into(room: memoryview, head: bytes, arrays: Iterable[Array]) -> None:
    """Writes an image: its head, then each array. Other threads run while an array is copied."""
    room[: len(head)] = head
    at, flat = len(head), np.frombuffer(room, "u1")
    for array in arrays:
        flat[at : at + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        at += array.nbytes


def decode(buffer: bytes | memoryview) -> Image:
    """Reads an image; arrays are views of `buffer`. Raises BadImage for anything malformed, and nothing else."""
    view = memoryview(buffer).toreadonly().cast("B")
    head = decode_head(view, len(view))
    data = view[head.size :]
    tensors = {name: array_of(info, data[slice(*info.data_offsets)]) for name, info in head.infos.items()}
    return Image(tensors, head.metadata)


def info_of(array: Array) -> Info:
    """What a header says of an array, its place left open. Raises BadImage for a foreign dtype."""
    return Info(dtype_name(array), list(array.shape), (0, array.nbytes))


def encode_head(infos: Mapping[str, Info], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON of tensors that follow back to back in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, info in infos.items():
        end = at + info.data_offsets[1] - info.data_offsets[0]
        header[name] = Info(info.dtype, info.shape, (at, end))
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode_head(start: memoryview, total: int) -> Head:
    """Reads the header of an image of `total` bytes that begins with `start`. Raises BadImage.

    `start` must reach to the header's end: `head_bytes` tells how far that is.
    """
    size = head_bytes(start[:8], total)
    header = _json(start[8:size], dict[str, msgspec.Raw], "header")
    metadata = _json(header.pop("__metadata__", msgspec.Raw(b"{}")), dict[str, str], "metadata")
    infos = {name: _info(name, raw) for name, raw in header.items()}
    _check_cover(infos, total - size)
    return Head(infos, metadata, size)


def head_bytes(start: bytes | memoryview, total: int) -> int:
    """Bytes before the data, from an image's first eight. Raises BadImage when they cannot be true."""
    size = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= size <= min(total - 8, MAX_HEADER):
        raise BadImage("header length out of bounds")
    return 8 + size


def array_bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view("u1").data


def array_of(info: Info, data: memoryview) -> Array:
    """An array over its bytes. Raises BadImage for a shape NumPy cannot have."""
    try:
        return np.frombuffer(data, dtype=DTYPES[info.dtype]).reshape(info.shape)
    except ValueError as error:
        raise BadImage(f"impossible shape: {error}") from None


def dtype_name(array: Array) -> str:
    """What a header calls an array's dtype. Raises BadImage for a foreign one."""
    named = (array.dtype.metadata or {}).get("safetensors") or _NAMES.get(array.dtype.str)
    if named is None:
        raise BadImage(f"dtype {array.dtype} has no safetensors name")
    return str(named)


def _json(raw: memoryview | msgspec.Raw, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadImage(f"{what}: {error}") from None


def _info(name: str, raw: msgspec.Raw) -> Info:
    info = _json(raw, Info, f"tensor {name!r}")
    start, end = info.data_offsets
    dtype = DTYPES.get(info.dtype)
    if dtype is None or len(info.shape) > _MAX_RANK or any(side < 0 for side in info.shape) or start < 0:
        raise BadImage(f"tensor {name!r}: unknown dtype or impossible shape")
    if end - start != prod(info.shape) * dtype.itemsize:
        raise BadImage(f"tensor {name!r}: offsets do not fit its shape")
    return info


def _check_cover(infos: Mapping[str, Info], size: int) -> None:
    """Tensors lie back to back over the whole data: no gap, no overlap, nothing left over."""
    at = 0
    for start, end in sorted(info.data_offsets for info in infos.values()):
        if start != at:
            raise BadImage("tensors overlap or leave a gap")
        at = end
    if at != size:
        raise BadImage("tensors do not cover the data")
