"""Rows kept as small integers: a value is its integer times the scale of its group, plus the group's bias.

A group is 64 values of one head of one row, or 32 where the head width is no multiple of 64. So what a row becomes
depends on that row alone, and rows are copied, saved and restored like any others. The format is MLX's affine one
(`mx.quantize`), chosen because every device has kernels that write it; the packed integers are kept as bytes, which no
type of unquantized rows has, scales and biases in the type that the model computes rows in.

Rows are always read as they are kept, also by the round that wrote them. What is read becomes floats a part at a time,
in the product that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from onecopy.runtime.numerics.arrange import Arrangement
from onecopy.runtime.numerics.exponential import on_host

from .layout import BLOCK, LayerLayout, RowTensor

Array = Any

BITS = (8, 4)
"""Bits of a value, as offered."""

GROUPS = (64, 32)
"""Values with one scale and bias: the larger where it divides the head width."""

SCALES, BIASES = ".scales", ".biases"
"""Behind the name of a row tensor: those of its groups."""

PART_BYTES = 2 << 20
"""Most bytes of floats that a product makes of rows at once, a tile at least. They stay in the cache of a CPU."""


def group_of(width: int) -> int | None:
    """Values of a group in heads of that width; None where no group divides it."""
    return next((group for group in GROUPS if width % group == 0), None)


def quantized_layer(layer: LayerLayout, bits: int) -> LayerLayout:
    """The layer with its rows kept in `bits` bits a value. Every width must have a group."""
    return replace(layer, rows=tuple(t for kept in layer.rows for t in packed(kept, bits)), bits=bits)


def packed(tensor: RowTensor, bits: int) -> tuple[RowTensor, RowTensor, RowTensor]:
    """What a tensor is kept as: integers packed into bytes, scales, and biases. ValueError without a group."""
    group = group_of(tensor.width)
    if group is None:
        raise ValueError(f"no group divides a head width of {tensor.width}")
    name, heads, groups = tensor.name, tensor.heads, tensor.width // group
    scales, biases = (RowTensor(name + part, heads, groups, tensor.itemsize) for part in (SCALES, BIASES))
    return RowTensor(name, heads, tensor.width * bits // 8, 1), scales, biases


def stored(name: str, rows: Array, bits: int | None) -> Sequence[tuple[str, Array]]:
    """Rows `[heads, n, width]` as the tensors that they are kept in: themselves where `bits` is None. Lazy."""
    if bits is None:
        return [(name, rows)]
    ints, scales, biases = mx.quantize(rows, group_size=group_of(rows.shape[-1]), bits=bits)
    return [(name, ints.view(mx.uint8)), (name + SCALES, scales), (name + BIASES, biases)]


def floats(ints: Array, scales: Array, biases: Array, bits: int) -> Array:
    """Packed rows `[..., bytes]` with `[..., groups]` scales and biases as `[..., width]` of their type. Lazy.

    The bits of `mx.dequantize`, which on a CPU takes three times as long.
    """
    group = ints.shape[-1] * 8 // bits // scales.shape[-1]
    if not on_host():
        return mx.dequantize(ints.view(mx.uint32), scales, biases, group_size=group, bits=bits)
    numbers = mx.unflatten(ints if bits == 8 else _halves(ints), -1, (-1, group)).astype(scales.dtype)
    return (numbers * scales[..., None] + biases[..., None]).flatten(-2)


def _halves(ints: Array) -> Array:
    """The lower and the upper four bits of each byte, as a byte each."""
    pairs = ints.astype(mx.uint16)
    return ((pairs | (pairs << 4)) & 0x0F0F).view(mx.uint8)


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """Stands where `Tiles` has keys or values, for tiles `tiles` and heads `heads` of a segment's quantized rows.

    arrays: whole buffers of integers, scales and biases. n: keys of each tile; fewer than BLOCK of a single one.
    turned: as `Tiles` has keys.
    """

    arrays: tuple[Array, Array, Array]
    bits: int
    heads: tuple[int, int]
    tiles: tuple[int, int]
    n: int
    turned: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What the floats' shape would be."""
        width = self.arrays[0].shape[-1] * 8 // self.bits
        each = (width, self.n) if self.turned else (self.n, width)
        return (self.heads[1] - self.heads[0], self.tiles[1] - self.tiles[0], *each)

    @property
    def dtype(self) -> Any:
        return self.arrays[1].dtype

    def parts(self) -> Iterator[tuple[int, int]]:
        """Tiles `[a, b)`, counted from the first, that become floats together."""
        heads, count, height, width = self.shape
        step = max(1, PART_BYTES // (heads * height * width * self.dtype.size))
        yield from ((a, min(a + step, count)) for a in range(0, count, step))

    def unpacked(self, a: int, b: int) -> Array:
        """Floats of some of the tiles, in the shape that they have in `Tiles`. Lazy."""
        (low, high), start = self.heads, (self.tiles[0] + a) * BLOCK
        rows = [array[low:high, start : start + (b - a) * self.n] for array in self.arrays]
        tiles = mx.unflatten(floats(rows[0], rows[1], rows[2], self.bits), 1, (b - a, self.n))
        return tiles.swapaxes(-1, -2) if self.turned else tiles


def packed_tiles(
    arrays: Mapping[str, Array], bits: int, kvh: int, tiles: tuple[int, int], n: int
) -> tuple[PackedTiles, PackedTiles]:
    """Keys and values of some tiles of a layer's buffers."""
    together = "kv" in arrays
    parts = (("kv", 0, True), ("kv", kvh, False)) if together else (("k", 0, True), ("v", 0, False))
    keys, values = (
        PackedTiles(_of(arrays, name), bits, (head, head + kvh), tiles, n, turned) for name, head, turned in parts
    )
    return keys, values


def _of(arrays: Mapping[str, Array], name: str) -> tuple[Array, Array, Array]:
    return arrays[name], arrays[name + SCALES], arrays[name + BIASES]


def product(how: Arrangement, rows: Array, tiles: Array | PackedTiles) -> Array:
    """`how.batched(rows, tiles)`, of packed tiles part by part, with the same bits however they are parted. Lazy."""
    if not isinstance(tiles, PackedTiles):
        return how.batched(rows, tiles)
    same = rows.shape[1] == 1
    done = [how.batched(rows if same else rows[:, a:b], tiles.unpacked(a, b)) for a, b in tiles.parts()]
    return done[0] if len(done) == 1 else mx.concatenate(done, axis=1)
