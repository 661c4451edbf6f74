"""A GGUF file's tensors as MLX arrays, packed ones as (weight, scales, biases) in groups of 32.

`mx.load` reads them, but opens the file for writing. A model that belongs to another user (a shared or read-only
install) is read here instead, to the same arrays bit for bit, for the types that need no k-quant arithmetic.
Block layouts: ggml's quantization formats. Packed layout: MLX's, first weight in the lowest bits of a 32-bit word.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.errors import ModelLoadError

from .gguf_header import Header, TensorInfo

PLAIN: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "I16": np.int16, "I32": np.int32}


def read_tensors(header: Header) -> dict[str, mx.array]:
    """Every tensor of the file. Packed tensor `x.weight` also yields `x.scales` and `x.biases` (f16)."""
    try:
        return dict(mx.load(str(header.path)).items())  # type: ignore[union-attr]
    except (RuntimeError, ValueError):
        return read_only(header)


def read_only(header: Header) -> dict[str, mx.array]:
    """The same, without write access to the file. ModelLoadError for a k-quant, which only `mx.load` unpacks."""
    data: NDArray[np.uint8] = np.memmap(header.path, np.uint8, mode="r")
    arrays: dict[str, mx.array] = {}
    for tensor in header.tensors.values():
        arrays |= _arrays(header, tensor, data[tensor.offset : tensor.offset + tensor.nbytes])
    return arrays


def _arrays(header: Header, tensor: TensorInfo, raw: NDArray[np.uint8]) -> dict[str, mx.array]:
    kind = tensor.quant.name
    if kind in PLAIN:
        return {tensor.name: mx.array(raw.view(PLAIN[kind]).reshape(tensor.shape))}
    if kind == "BF16":
        return {tensor.name: mx.array(raw.view(np.uint16).reshape(tensor.shape)).view(mx.bfloat16)}
    if kind not in UNPACK:
        raise ModelLoadError(
            f"{header.path}: MLX cannot read this file; for type {kind} (tensor {tensor.name!r}) it needs write access."
        )
    words, scales, biases = UNPACK[kind](raw.reshape(-1, tensor.quant.size))
    stem = tensor.name.removesuffix(".weight")
    return {
        tensor.name: _rows(words, tensor),
        f"{stem}.scales": _rows(scales, tensor),
        f"{stem}.biases": _rows(biases, tensor),
    }


def _rows(blocks: NDArray[Any], tensor: TensorInfo) -> mx.array:
    """One entry per block, put together to the tensor's rows."""
    return mx.array(np.ascontiguousarray(blocks).reshape(*tensor.shape[:-1], -1))


def _q4_0(blocks: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    scales = _half(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scales, scales * np.float16(-8)


def _q4_1(blocks: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    return _nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    """Signed bytes: the sign bit is flipped and 128 scales are taken off again by the bias."""
    scales = _half(blocks[:, :2])
    return np.ascontiguousarray(blocks[:, 2:] ^ 0x80).view(np.uint32), scales, scales * np.float16(-128)


def _nibbles(half_blocks: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """16 bytes a block, weights 0-15 in the low and 16-31 in the high halves, to neighbours in one byte."""
    weights = np.concatenate([half_blocks & 0x0F, half_blocks >> 4], axis=1)
    return np.ascontiguousarray(weights[:, 0::2] | weights[:, 1::2] << 4).view(np.uint32)


def _half(pairs: NDArray[np.uint8]) -> NDArray[np.float16]:
    return np.ascontiguousarray(pairs).view(np.float16)


UNPACK = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
