"""Pooled entries to the disk and back: each travels with the row that completes it, and no claim beyond that enters."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ops import Allocate, CopyRows, ResizeLayer
from onecopy.runtime.rows.transfer import (
    Slots,
    believed,
    fill,
    place_of,
    read_rows,
    row_ratios,
    row_slots,
    write_rows,
)

K, P = RowTensor("k", 1, 2), RowTensor("p", 1, 3)
RATIOS = [3, 4, 100]


def pool_of(ratio: int, start: int = 0, dtype: Any = mx.float32) -> Pool:
    pool = Pool(Layout((LayerLayout("qsa", (K,), (P,), ratio),)), lambda _: dtype)
    pool.apply((Allocate(1, start, 2 * BLOCK),))
    return pool


def filled(ratio: int, start: int = 0, dtype: Any = mx.float32) -> Pool:
    """Rows and entries that say their own numbers, counted from position 0."""
    pool = pool_of(ratio, start, dtype)
    layer = pool.segments[1].layers[0]
    rows = np.arange(start, start + 2 * BLOCK, dtype=np.float32)
    entries = np.arange(start // ratio, start // ratio + layer.pooled["p"].shape[1], dtype=np.float32)
    layer.arrays["k"][:] = mx.array(np.tile(rows[:, None], (1, 1, 2))).astype(dtype)
    layer.pooled["p"][:] = mx.array(np.tile(entries[:, None], (1, 1, 3))).astype(dtype)
    mx.eval(layer.flat())
    return pool


def numbers(array: Any) -> list[int]:
    return [int(x) for x in array[0, :, 0]]


def entries_of(pool: Pool, segment: int = 1) -> list[int]:
    return numbers(np.array(pool.segments[segment].layers[0].pooled["p"]))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("start", [0, BLOCK])
def test_blocks_and_a_trailer_carry_each_entry_once(ratio: int, start: int) -> None:
    pool, end = filled(ratio, start), start + BLOCK + 77
    parts = [read_rows(pool, 1, start, start + BLOCK), read_rows(pool, 1, start + BLOCK, end)]
    assert [n for part in parts for n in numbers(part["0.k"])] == list(range(start, end))
    assert [n for part in parts for n in numbers(part["0.p"])] == list(range(start // ratio, end // ratio))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("ratio", RATIOS)
def test_records_come_back_to_where_they_were(ratio: int, dtype: Any) -> None:
    pool, other = filled(ratio, BLOCK, dtype), pool_of(ratio, BLOCK, dtype)
    for start, stop in ((BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 77)):
        record = {key: array.copy() for key, array in read_rows(pool, 1, start, stop).items()}
        slots = row_slots(other, 1)
        if slots is None:
            write_rows(other, 1, start, record)
        else:
            fill(slots, start - BLOCK, record)
    end = 2 * BLOCK + 77
    back, right = read_rows(other, 1, BLOCK, end), read_rows(pool, 1, BLOCK, end)
    assert all(np.array_equal(back[key], right[key]) for key in right)
    assert not any(array.any() for array in read_rows(other, 1, end, 3 * BLOCK).values())


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("start", [0, BLOCK])
def test_a_blocks_place_is_its_own_memory_as_arrays_and_as_bytes(ratio: int, start: int) -> None:
    slots = row_slots(filled(ratio, start), 1)
    assert slots is not None
    for block in (start // BLOCK, start // BLOCK + 1):
        place, first = place_of(slots, block), block * BLOCK
        assert numbers(place.arrays["0.k"]) == list(range(first, first + BLOCK))
        assert numbers(place.arrays["0.p"]) == list(range(first // ratio, (first + BLOCK) // ratio))
        for name, array in place.arrays.items():
            assert b"".join(place.pieces[name]) == array.tobytes()
            place.pieces[name][0][:4] = np.float32(-1).tobytes()
            assert array[0, 0, 0] == slots.arrays[name][0, :, 0].min() == -1


def test_a_claim_of_more_entries_than_rows_is_cut_down_where_it_enters() -> None:
    pool, stale = pool_of(4), {"0.k": np.ones((1, 100, 2), np.float32), "0.p": np.full((1, 60, 3), 7, np.float32)}
    slots = row_slots(pool, 1)
    assert slots is not None
    fill(slots, 0, stale)
    write_rows(pool, 1, 100, {"0.k": stale["0.k"], "0.p": stale["0.p"]})
    assert entries_of(pool) == [7] * 50 + [0] * 78


def test_a_claim_of_fewer_entries_than_rows_is_no_record() -> None:
    slots = row_slots(pool_of(4), 1)
    assert slots is not None
    with pytest.raises(ValueError, match=r"0\.p has fewer entries than its rows complete"):
        fill(slots, 0, {"0.k": np.ones((1, 100, 2), np.float32), "0.p": np.ones((1, 24, 3), np.float32)})


@pytest.mark.parametrize("ratio", RATIOS)
def test_what_lies_before_the_frontier_is_left_out_with_the_entries_it_completed(ratio: int) -> None:
    record = read_rows(filled(ratio), 1, 0, BLOCK)
    for frontier in (0, 1, 99, 100, 101, BLOCK):
        found = believed(record, row_ratios(pool_of(ratio).layout), 0, frontier)
        assert numbers(found["0.k"]) == list(range(frontier, BLOCK))
        assert numbers(found["0.p"]) == list(range(frontier // ratio, BLOCK // ratio))


@pytest.mark.parametrize("ratio", RATIOS)
def test_copies_and_resizes_move_the_entries_of_the_rows_they_keep(ratio: int) -> None:
    pool = filled(ratio)
    pool.apply((Allocate(2, BLOCK, BLOCK), CopyRows(1, 2, BLOCK, BLOCK + 90), ResizeLayer(1, 0, BLOCK, 200)))
    assert entries_of(pool)[: 200 // ratio] == list(range(200 // ratio))
    assert not any(entries_of(pool)[200 // ratio :])
    kept = (BLOCK + 90) // ratio - BLOCK // ratio
    assert entries_of(pool, 2)[:kept] == list(range(BLOCK // ratio, BLOCK // ratio + kept))
    assert not any(entries_of(pool, 2)[kept:])


def test_slots_of_rows_alone_take_no_entries() -> None:
    slots = Slots(0, {"0.k": np.zeros((1, 8, 2), np.float32)}, {"0.k": 1})
    with pytest.raises(ValueError, match="other tensors"):
        fill(slots, 0, {"0.k": np.ones((1, 4, 2), np.float32), "0.p": np.ones((1, 1, 3), np.float32)})
