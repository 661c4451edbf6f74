"""Quantized rows: the format is MLX's, a row is its own, and attention over them is attention over their floats."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.numerics.arrange import Arrangement
from onecopy.runtime.rows import quantized
from onecopy.runtime.rows.attention import RowTile
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.caches import RowCache
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ops import Allocate, Chain, Link
from onecopy.runtime.rows.plan import RoundRows, Strip
from onecopy.runtime.rows.quantized import BIASES, SCALES, PackedTiles, floats, packed, quantized_layer, stored

KVH, GROUP = 2, 3
TILE = RowTile(Arrangement(least=4, multiple=4, most=8), Arrangement(least=4, multiple=4, most=8), 64, hosted=False)
"""Rows that are kept as floats are read in graphs here as well, because a host's small products may have other bits."""
RNG = np.random.default_rng(16)


def values(*shape: int, dtype: Any = mx.float32) -> mx.array:
    return mx.array(RNG.standard_normal(shape, dtype=np.float32)).astype(dtype)


def kept(rows: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    (_, ints), (_, scales), (_, biases) = stored("kv", rows, bits)
    return ints, scales, biases


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_come_back_as_mlx_dequantizes_them(bits: int, width: int, dtype: Any) -> None:
    rows = values(4, 7, width, dtype=dtype)
    group = quantized.group_of(width)
    own = mx.quantize(rows, group_size=group, bits=bits)
    found = floats(*kept(rows, bits), bits)
    assert mx.array_equal(found, mx.dequantize(*own, group_size=group, bits=bits))
    with mock.patch.object(quantized, "on_host", return_value=False):
        assert mx.array_equal(found, floats(*kept(rows, bits), bits))
    assert found.dtype == dtype
    rounding = 0.4 if bits == 4 else 0.06 if dtype == mx.bfloat16 else 0.03
    assert float(mx.abs(found - rows).max()) <= rounding


@pytest.mark.parametrize(
    ("width", "group"), [(32, 32), (64, 64), (96, 32), (128, 64), (256, 64), (80, None), (16, None)]
)
def test_groups_are_64_values_or_32_where_64_does_not_divide(width: int, group: int | None) -> None:
    assert quantized.group_of(width) == group


@pytest.mark.parametrize(
    ("width", "bits", "nbytes"), [(64, 8, 72), (64, 4, 40), (96, 8, 120), (128, 8, 144), (128, 4, 80)]
)
def test_a_row_takes_its_bits_and_eight_bytes_a_group(width: int, bits: int, nbytes: int) -> None:
    tensor = RowTensor("kv", 6, width)
    assert sum(t.row_bytes for t in packed(tensor, bits)) == 6 * nbytes
    made = dict(stored("kv", values(6, 3, width), bits))
    assert {t.name: (t.heads, 3, t.width) for t in packed(tensor, bits)} == {k: a.shape for k, a in made.items()}
    assert sum(a.nbytes for a in made.values()) == 3 * 6 * nbytes


def test_a_width_without_a_group_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="head width of 80"):
        packed(RowTensor("k", 1, 80), 8)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_the_same_alone_and_among_others(bits: int) -> None:
    rows = values(4, 50, 64) * mx.array(np.geomspace(0.01, 100, 50, dtype=np.float32))[:, None]
    whole = kept(rows, bits)
    for first, last in ((0, 1), (7, 20), (49, 50)):
        for part, all_rows in zip(kept(rows[:, first:last], bits), whole, strict=True):
            assert mx.array_equal(part, all_rows[:, first:last])


class Twins:
    """The same rows twice: quantized in one pool, and in the other the floats that those are."""

    def __init__(self, bits: int, joint: bool = True, window: int | None = None) -> None:
        names = [("kv", 2 * KVH, 64)] if joint else [("k", KVH, 64), ("v", KVH, 32)]
        rows = tuple(RowTensor(*each) for each in names)
        self.layer = LayerLayout("window" if window else "attention", rows, window=window)
        layout = Layout((quantized_layer(self.layer, bits),))
        self.small = Pool(layout, lambda t: mx.uint8 if t.itemsize == 1 else mx.float32)
        self.large = Pool(Layout((self.layer,)))
        self.bits, self.window = bits, window

    def segment(self, number: int, start: int, blocks: int) -> None:
        order = (Allocate(number, start, blocks * BLOCK),)
        self.small.apply(order)
        self.large.apply(order)
        small, large = (pool.segments[number].layers[0] for pool in (self.small, self.large))
        for t in self.layer.rows:
            made = dict(stored(t.name, values(t.heads, blocks * BLOCK, t.width), self.bits))
            for name, array in made.items():
                small.write(name, 0, array)
            large.write(t.name, 0, floats(made[t.name], made[t.name + SCALES], made[t.name + BIASES], self.bits))
        mx.eval(small.flat(), large.flat())

    def attend(self, pool: Pool, strips: list[Strip], queries: mx.array) -> np.ndarray[Any, Any]:
        cache = RowCache(0, self.window)
        cache.round = RoundRows(strips, pool, TILE, (mx.default_stream(mx.default_device()),))
        return np.array(cache.attend(queries))


@pytest.mark.parametrize("part", [1, quantized.PART_BYTES])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_attention_over_quantized_rows_is_attention_over_their_floats(
    bits: int, joint: bool, window: int | None, part: int
) -> None:
    twins = Twins(bits, joint, window)
    twins.segment(1, 0, 2)
    twins.segment(2, 2 * BLOCK, 1)
    twins.segment(3, 0, 3)
    shared = Chain((Link(1, 0, 2 * BLOCK), Link(2, 2 * BLOCK, 2 * BLOCK + 90)), 3 * BLOCK)
    long, short = Strip(shared, 2 * BLOCK + 90, (0,) * 30), Strip(Chain((Link(3, 0, 20),), 3 * BLOCK), 20, (0,) * 2)
    far = Strip(Chain((Link(3, 0, 600),), 3 * BLOCK), 600, (0,) * 2)
    with mock.patch.object(quantized, "PART_BYTES", part):
        for strips in ([long], [short], [long, short], [short, far], [far, short, Strip(shared, long.position, (0,))]):
            queries = values(sum(len(s.tokens) for s in strips), KVH * GROUP, 64)
            found = twins.attend(twins.small, strips, queries)
            assert np.array_equal(found, twins.attend(twins.large, strips, queries))


def test_tiles_become_floats_a_bounded_part_at_a_time() -> None:
    twins = Twins(8)
    twins.segment(1, 0, 5)
    arrays = twins.small.segments[1].layers[0].arrays
    tiles = PackedTiles((arrays["kv"], arrays["kv.scales"], arrays["kv.biases"]), 8, (0, KVH), (0, 5), BLOCK, True)
    tile = KVH * BLOCK * 64 * 4
    for limit, parts in ((2 * tile, [(0, 2), (2, 4), (4, 5)]), (1, [(i, i + 1) for i in range(5)])):
        with mock.patch.object(quantized, "PART_BYTES", limit):
            assert list(tiles.parts()) == parts
    assert tiles.unpacked(1, 3).shape == (KVH, 2, 64, BLOCK)
    assert tiles.shape == (KVH, 5, 64, BLOCK)
