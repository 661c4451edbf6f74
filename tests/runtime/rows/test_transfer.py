"""Rows to the disk and back: views that show the buffers themselves, fills that change nothing else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ops import Allocate, SaveAnchor
from onecopy.runtime.rows.states import StateSpec
from onecopy.runtime.rows.transfer import fill, read_rows, read_state, row_slots, split_state, write_rows, write_state

K, V = RowTensor("k", 2, 4), RowTensor("v", 2, 8)
LAYOUT = Layout((LayerLayout("attention", (K, V)), LayerLayout("recurrent", anchor_bytes=16)))
SPECS = ((), (None, StateSpec((2, 2), mx.float32)))


def pool_of(dtype: Any = mx.float32, start: int = 0) -> Pool:
    pool = Pool(LAYOUT, lambda _: dtype, SPECS)
    pool.apply((Allocate(1, start, 2 * BLOCK),))
    return pool


def some(pool: Pool, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of the shapes and dtypes that the pool keeps."""
    draw = np.random.default_rng(seed)
    like = read_rows(pool, 1, pool.segments[1].start, pool.segments[1].start + rows)
    return {key: draw.integers(1, 1000, array.shape).astype(array.dtype) for key, array in like.items()}


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rows_come_back_bit_for_bit_whatever_their_dtype(dtype: Any) -> None:
    pool = pool_of(dtype, start=BLOCK)
    rows = some(pool, 100)
    write_rows(pool, 1, BLOCK + 56, rows)
    assert equal(read_rows(pool, 1, BLOCK + 56, BLOCK + 156), rows)
    assert not any(array.any() for array in read_rows(pool, 1, BLOCK, BLOCK + 56).values())


def test_a_fill_writes_its_rows_into_the_buffers_themselves_and_no_others() -> None:
    pool = pool_of()
    slots = row_slots(pool, 1)
    assert slots is not None
    rows = some(pool, 100)
    fill(slots, 56, rows)
    assert equal(read_rows(pool, 1, 56, 156), rows)
    assert not any(array.any() for array in read_rows(pool, 1, 0, 56).values())
    assert not any(array.any() for array in read_rows(pool, 1, 156, 2 * BLOCK).values())


def test_views_neither_copy_nor_make_the_next_write_copy() -> None:
    pool = pool_of()
    before = read_rows(pool, 1, 0, 10)
    write_rows(pool, 1, 300, some(pool, 5))
    after = read_rows(pool, 1, 0, 10)
    assert [a.ctypes.data for a in before.values()] == [a.ctypes.data for a in after.values()]


def test_what_numpy_has_no_type_for_has_no_slots() -> None:
    assert row_slots(pool_of(mx.bfloat16), 1) is None


@pytest.mark.parametrize("spoil", [lambda a: a[:, :, :2], lambda a: a.astype("f2"), lambda a: a[:1]])
def test_rows_of_another_shape_or_dtype_are_refused(spoil: Any) -> None:
    pool = pool_of()
    slots = row_slots(pool, 1)
    assert slots is not None
    rows = some(pool, 10)
    with pytest.raises(ValueError, match=r"0\.v"):
        fill(slots, 0, {**rows, "0.v": spoil(rows["0.v"])})
    with pytest.raises(ValueError, match="other tensors"):
        fill(slots, 0, {"0.k": rows["0.k"]})


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_state_comes_back_from_its_anchor_and_is_told_apart_from_rows(dtype: Any) -> None:
    pool = pool_of()
    state = mx.arange(4).reshape(2, 2).astype(dtype)
    pool.segments[1].layers[1].state = (None, state)
    pool.apply((SaveAnchor(1, 7),))
    found = read_state(pool, 7)
    assert list(found) == ["1.state.1"]
    rows, states = split_state({**some(pool, 3), **found})
    assert (set(rows), set(states)) == ({"0.k", "0.v"}, {"1.state.1"})
    pool.segments[1].layers[1].state = None
    write_state(pool, 1, states)
    back = pool.segments[1].layers[1].state
    assert back is not None
    assert back[0] is None
    assert mx.array_equal(back[1], state)
