"""Safetensors images in memory: the payload of every record, so that any tool can open an exported block.

Source: the safetensors format: u64 header length, JSON header, tensor bytes back to back.
bfloat16 and float8 values travel as integer arrays whose dtype carries the name (`BF16`, `F8_E4M3`, `F8_E5M2`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec
import numpy as np

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

MAX_HEADER = 16 * 1024 * 1024
"""Bytes of the largest JSON header read; ours stay far below, and a hostile length is refused before it is used."""
_MAX_RANK = 32


class BadImage(ValueError):
    """Not a well-formed safetensors image. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Image:
    """Named arrays and string metadata. Arrays from `decode` are read-only views of the decoded buffer."""

    tensors: Tensors
    metadata: Mapping[str, str] = field(default_factory=dict)


class _Info(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def encode(image: Image) -> bytes:
    """The image as bytes. Strided arrays are made contiguous one at a time. Raises BadImage for a foreign dtype."""
    header: dict[str, Any] = {"__metadata__": dict(image.metadata)} if image.metadata else {}
    at = 0
    for name, array in image.tensors.items():
        end = at + array.nbytes
        header[name] = {"dtype": _dtype_name(array), "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(_bytes(array) for array in image.tensors.values())])


def decode(buffer: bytes | memoryview) -> Image:
    """Reads an image; arrays are views of `buffer`. Raises BadImage for anything malformed, and nothing else."""
    view = memoryview(buffer).toreadonly().cast("B")
    header, data = _split(view)
    metadata = _metadata(header.pop("__metadata__", None))
    infos = {name: _info(name, raw) for name, raw in header.items()}
    _check_cover(infos, len(data))
    return Image({name: _array(info, data) for name, info in infos.items()}, metadata)


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view("u1").data


def _dtype_name(array: Array) -> str:
    named = (array.dtype.metadata or {}).get("safetensors") or _NAMES.get(array.dtype.str)
    if named is None:
        raise BadImage(f"dtype {array.dtype} has no safetensors name")
    return str(named)


def _split(view: memoryview) -> tuple[dict[str, msgspec.Raw], memoryview]:
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or not 2 <= size <= min(len(view) - 8, MAX_HEADER):
        raise BadImage("header length out of bounds")
    try:
        return msgspec.json.decode(view[8 : 8 + size], type=dict[str, msgspec.Raw]), view[8 + size :]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadImage(f"header is not JSON: {error}") from None


def _metadata(raw: msgspec.Raw | None) -> dict[str, str]:
    try:
        return {} if raw is None else msgspec.json.decode(raw, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadImage(f"metadata: {error}") from None


def _info(name: str, raw: msgspec.Raw) -> _Info:
    try:
        info = msgspec.json.decode(raw, type=_Info)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadImage(f"tensor {name!r}: {error}") from None
    start, end = info.data_offsets
    dtype = DTYPES.get(info.dtype)
    if dtype is None or len(info.shape) > _MAX_RANK or any(side < 0 for side in info.shape) or start < 0:
        raise BadImage(f"tensor {name!r}: unknown dtype or impossible shape")
    if end - start != prod(info.shape) * dtype.itemsize:
        raise BadImage(f"tensor {name!r}: offsets do not fit its shape")
    return info


def _check_cover(infos: Mapping[str, _Info], size: int) -> None:
    """Tensors lie back to back over the whole data: no gap, no overlap, nothing left over."""
    at = 0
    for start, end in sorted(info.data_offsets for info in infos.values()):
        if start != at:
            raise BadImage("tensors overlap or leave a gap")
        at = end
    if at != size:
        raise BadImage("tensors do not cover the data")


def _array(info: _Info, data: memoryview) -> Array:
    start, end = info.data_offsets
    try:
        return np.frombuffer(data[start:end], dtype=DTYPES[info.dtype]).reshape(info.shape)
    except ValueError as error:
        raise BadImage(f"impossible shape: {error}") from None
