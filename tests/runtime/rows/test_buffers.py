"""Buffers are written where they are: addresses stay, memory stays flat, copies and resizes keep every bit."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ops import Allocate, CopyRows, Drop, ResizeLayer, Trim

LAYOUT = Layout((LayerLayout("attention", (RowTensor("k", 2, 8), RowTensor("v", 2, 4))),) * 2)
RNG = np.random.default_rng(1)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(LAYOUT)
    made.apply((Allocate(1, 0, 2 * BLOCK),))
    yield made
    made.segments.clear()
    mx.clear_cache()


def fill(pool: Pool, segment: int, at: int, n: int) -> dict[str, np.ndarray]:
    """Random rows written at buffer row `at` of every layer, keyed as views are."""
    rows = {}
    for i, layer in enumerate(pool.segments[segment].layers):
        for name, array in layer.arrays.items():
            rows[f"{i}.{name}"] = RNG.standard_normal((array.shape[0], n, array.shape[2]), dtype=np.float32)
            layer.write(name, at, mx.array(rows[f"{i}.{name}"]))
    mx.eval(pool.segments[segment].flat())
    return rows


def addresses(pool: Pool, segment: int) -> list[int]:
    return [np.array(a, copy=False).__array_interface__["data"][0] for a in pool.segments[segment].flat()]


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32])
def test_new_rows_are_zeros_though_their_memory_held_others(dtype: mx.Dtype) -> None:
    pool = Pool(LAYOUT, lambda _: dtype)
    for segment in range(4):
        pool.apply((Allocate(segment, 0, 2 * BLOCK),))
        arrays = pool.segments[segment].flat()
        assert not any(mx.any(array).item() for array in arrays)
        assert {array.dtype for array in arrays} == {dtype}
        for layer in pool.segments[segment].layers:
            for name, array in layer.arrays.items():
                layer.write(name, 0, mx.ones((array.shape[0], 300, array.shape[2]), dtype))
        mx.eval(arrays)
        pool.apply((Drop(segment), Trim()))


@pytest.mark.parametrize(("at", "n"), [(0, 1), (255, 2), (100, 300), (0, 2 * BLOCK)])
def test_a_write_lands_in_place(pool: Pool, at: int, n: int) -> None:
    before = addresses(pool, 1)
    rows = fill(pool, 1, at, n)
    assert addresses(pool, 1) == before
    assert same(pool.segments[1].row_views(at, at + n), rows)


def test_a_view_sees_rows_in_place_and_makes_no_write_copy(pool: Pool) -> None:
    fill(pool, 1, 0, 10)
    views = pool.segments[1].row_views(0, 20)
    before = addresses(pool, 1)
    held = mx.get_active_memory()
    later = fill(pool, 1, 10, 10)
    assert addresses(pool, 1) == before
    assert mx.get_active_memory() == held
    assert same({k: v[:, 10:] for k, v in views.items()}, later)


def test_copied_rows_are_the_sources_bits_at_their_absolute_positions(pool: Pool) -> None:
    rows = fill(pool, 1, 0, 2 * BLOCK)
    pool.apply((Allocate(2, BLOCK, BLOCK), CopyRows(1, 2, BLOCK, BLOCK + 77)))
    assert same(pool.segments[2].row_views(BLOCK, BLOCK + 77), {k: v[:, BLOCK : BLOCK + 77] for k, v in rows.items()})
    fill(pool, 2, 0, 5)
    assert same(pool.segments[1].row_views(0, 2 * BLOCK), rows)


@pytest.mark.parametrize("capacity", [BLOCK, 3 * BLOCK])
def test_a_resize_keeps_the_bits_layer_by_layer(pool: Pool, capacity: int) -> None:
    rows = fill(pool, 1, 0, 200)
    pool.apply((ResizeLayer(1, 0, capacity, 200),))
    assert [layer.arrays["k"].shape[1] for layer in pool.segments[1].layers] == [capacity, 2 * BLOCK]
    assert same(pool.segments[1].row_views(0, 200), rows)
    pool.apply((ResizeLayer(1, 1, capacity, 200),))
    assert pool.segments[1].capacity == capacity
    assert same(pool.segments[1].row_views(0, 200), rows)


def test_a_shrink_to_the_rows_kept_gives_the_rest_back(pool: Pool) -> None:
    rows = fill(pool, 1, 0, BLOCK)
    held = mx.get_active_memory()
    pool.apply((ResizeLayer(1, 0, BLOCK, BLOCK), ResizeLayer(1, 1, BLOCK, BLOCK)))
    assert held - mx.get_active_memory() == LAYOUT.capacity_bytes(BLOCK)
    assert same(pool.segments[1].row_views(0, BLOCK), rows)


def test_a_drop_frees_the_bytes_of_a_segment(pool: Pool) -> None:
    before = mx.get_active_memory()
    pool.apply((Allocate(2, 0, 4 * BLOCK),))
    assert mx.get_active_memory() - before == LAYOUT.capacity_bytes(4 * BLOCK)
    pool.apply((Drop(2), Drop(99)))
    assert mx.get_active_memory() == before


def test_a_trim_returns_what_the_allocator_pools(pool: Pool) -> None:
    pool.apply((Allocate(2, 0, 4 * BLOCK), Drop(2), Trim()))
    assert mx.get_cache_memory() == 0
