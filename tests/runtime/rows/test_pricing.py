"""Prices are pure arithmetic; what the allocator really does never goes past them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onecopy.runtime.rows import ops
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.pricing import (
    FILL,
    PAGE,
    Allocate,
    Copy,
    Fork,
    Merge,
    Resize,
    adoptable,
    bill,
    clamp_pooled,
    classes,
    conversation_bytes,
    conversations_that_fit,
    exact,
    fill_bytes,
    gain,
    largest_prompt,
    layer_bytes,
    pages,
    reuse_waste,
    segment_bytes,
)

from tests.support.pooled import QsaPool

DENSE = Layout((LayerLayout("attention", (RowTensor("k", 3, 64), RowTensor("v", 3, 64))),) * 4)
QSA = LayerLayout(
    "qsa", (RowTensor("k", 2, 16), RowTensor("v", 2, 16), RowTensor("i", 1, 8)), (RowTensor("p", 1, 8),), 4
)
STATE = LayerLayout("recurrent", anchor_bytes=4096)


# --- tables


@pytest.mark.parametrize(
    ("held", "planned", "fits"),
    [
        (1024, 1024, True),
        (1280, 1024, True),
        (1536, 1024, False),
        (1100, 1024, False),
        (1024, 1000, False),
        (768, 1024, False),
        (0, 0, True),
    ],
)
def test_an_exact_fit_and_one_bucket_more_are_adopted_and_nothing_else(held: int, planned: int, fits: bool) -> None:
    assert adoptable(held, planned, BLOCK) is fits


@pytest.mark.parametrize(
    ("claim", "frontier", "ratio", "kept"),
    [
        (42_593, 32_768 * 4, 4, 32_768),
        (42_593, 50_000, 4, 12_500),
        (12_000, 50_000, 4, 12_000),
        (42_593, 3, 4, 0),
        (0, 50_000, 4, 0),
        (-1, 50_000, 4, 0),
    ],
)
def test_a_foreign_pooled_claim_is_cut_down_to_what_its_rows_support(
    claim: int, frontier: int, ratio: int, kept: int
) -> None:
    assert clamp_pooled(claim, frontier, ratio) == kept


@pytest.mark.parametrize(
    ("capacity", "frontier", "held", "possible"),
    [(1024, 1000, 1024, True), (1024, 1025, 0, False), (1024, 100, 1025, False), (1024, 1024, 0, True)],
)
def test_a_layer_that_would_be_cut_has_no_price(capacity: int, frontier: int, held: int, possible: bool) -> None:
    price = layer_bytes(QSA, capacity, frontier, held)
    assert price == (QSA.capacity_bytes(capacity) if possible else None)
    assert (bill(Layout((QSA,)), Resize(4096, capacity, frontier, held)) is not None) is possible


def test_a_stale_pooled_claim_does_not_make_a_resize_impossible() -> None:
    target = 32_768 * 4
    frontier = 42_593 * 4 - 41_000
    assert layer_bytes(QSA, target, frontier, 0) == QSA.capacity_bytes(target)


@pytest.mark.parametrize("way", [Copy(1025, 1024), Fork(257, 256), Merge((512, 512), 1025, 1024)])
def test_rows_that_do_not_fit_the_new_buffers_make_a_way_impossible(way: Copy | Fork | Merge) -> None:
    assert bill(DENSE, way) is None


def test_a_fork_costs_its_leaf_and_a_merge_gives_back_what_it_joined() -> None:
    block = DENSE.block_bytes
    assert gain(DENSE, Fork(100, 512)) == 2 * block
    assert gain(DENSE, Merge((256, 256, 512), 900, 1024)) == 0
    assert gain(DENSE, Resize(2048, 512, 300)) == -6 * block
    assert gain(DENSE, Allocate(768)) == gain(DENSE, Copy(700, 768)) == 3 * block


def test_the_peak_of_a_resize_is_what_was_gained_and_one_buffer() -> None:
    grown = bill(DENSE, Resize(256, 1024, 200))
    buffer = 3 * 64 * 4 * 1024
    assert grown == 7 * (buffer - buffer // 4) + buffer + FILL
    assert bill(DENSE, Resize(1024, 256, 200)) == buffer // 4 + FILL


def test_a_resize_peaks_far_below_a_copy() -> None:
    copy, resize = bill(DENSE, Copy(1024, 2048)), bill(DENSE, Resize(1024, 2048, 1024))
    assert copy is not None
    assert resize is not None
    assert resize < 0.6 * copy


def test_a_fixed_size_state_is_in_every_segment_and_never_resized() -> None:
    layout = Layout((*DENSE.layers, STATE))
    assert segment_bytes(layout, 256) == DENSE.block_bytes + 4096
    assert bill(layout, Resize(256, 512, 0)) == bill(DENSE, Resize(256, 512, 0))
    assert gain(layout, Resize(256, 512, 0)) == DENSE.block_bytes


@pytest.mark.parametrize(
    ("rule", "asked", "given"),
    [
        (exact, 100_001, 100_001),
        (pages, 100, 100),
        (pages, PAGE, PAGE),
        (pages, PAGE + 1, 2 * PAGE),
        (classes, 0, 0),
        (classes, 3, 8),
        (classes, 1000, 1024),
        (classes, PAGE, PAGE),
        (classes, PAGE + 1, 2 * PAGE),
    ],
)
def test_what_an_allocator_hands_out(rule: Callable[[int], int], asked: int, given: int) -> None:
    assert rule(asked) == given


def test_rounding_is_part_of_every_price() -> None:
    thin = Layout((LayerLayout("attention", (RowTensor("k", 1, 17),)),))
    assert segment_bytes(thin, 256, pages) == 2 * PAGE > segment_bytes(thin, 256)
    assert bill(thin, Resize(256, 512, 0), pages) == 3 * PAGE + FILL


@given(st.integers(0, 40), st.sampled_from([exact, pages, classes]), st.booleans())
def test_the_largest_prompt_fits_and_one_block_more_does_not(
    blocks: int, rule: Callable[[int], int], recurrent: bool
) -> None:
    layout = Layout((QSA, STATE)) if recurrent else Layout((QSA,))
    nbytes = segment_bytes(layout, blocks * BLOCK, rule) + 100
    prompt = largest_prompt(layout, nbytes, rule)
    if prompt:
        assert conversation_bytes(layout, prompt + 1, rule) <= nbytes
    assert conversation_bytes(layout, prompt + 2, rule) > nbytes


def test_how_many_conversations_fit_shares_nothing_between_them() -> None:
    assert conversations_that_fit(DENSE, 1000, 10 * 4 * DENSE.block_bytes) == 10
    assert conversations_that_fit(DENSE, 1025, 10 * 4 * DENSE.block_bytes) == 8
    assert conversations_that_fit(DENSE, 1000, -1) == 0


# --- against the allocator


TENSOR = st.builds(RowTensor, st.just("k"), st.integers(1, 4), st.integers(1, 48))


def _named(tensors: list[RowTensor], prefix: str) -> tuple[RowTensor, ...]:
    return tuple(RowTensor(f"{prefix}{i}", t.heads, t.width) for i, t in enumerate(tensors))


LAYER = st.one_of(
    st.lists(TENSOR, min_size=1, max_size=3).map(lambda ts: LayerLayout("attention", _named(ts, "k"))),
    st.tuples(st.lists(TENSOR, min_size=1, max_size=3), TENSOR, st.sampled_from([2, 4, 16, 64])).map(
        lambda x: LayerLayout("qsa", _named(x[0], "k"), _named([x[1]], "p"), x[2])
    ),
    st.tuples(st.lists(TENSOR, min_size=1, max_size=2), st.integers(1, 4096)).map(
        lambda x: LayerLayout("window", _named(x[0], "k"), window=x[1])
    ),
    st.integers(1, 20_000).map(lambda n: LayerLayout("recurrent", anchor_bytes=4 * n)),
)
LAYOUT = st.lists(LAYER, min_size=1, max_size=4).map(lambda layers: Layout(tuple(layers)))
BLOCKS = st.integers(1, 8)


@contextmanager
def uncached() -> Iterator[None]:
    """No buffer comes from the allocator's cache, so each is as large as it was asked for."""
    before = mx.set_cache_limit(0)
    mx.clear_cache()
    try:
        yield
    finally:
        mx.set_cache_limit(before)


def measured(pool: QsaPool, *orders: ops.RowOp) -> tuple[int, int]:
    """Peak and lasting bytes of orders beyond what was held before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pool.apply(orders)
    return max(0, mx.get_peak_memory() - before), mx.get_active_memory() - before


def pool_with(layout: Layout, capacities: Sequence[int]) -> QsaPool:
    """A pool with segments 1, 2, … of so many rows, one behind the other, each with its states."""
    pool, start = QsaPool(layout), 0
    for segment, rows in enumerate(capacities, 1):
        pool.apply((ops.Allocate(segment, start, rows),))
        settle_states(pool, segment)
        start += rows
    return pool


def settle_states(pool: QsaPool, segment: int) -> None:
    """What the first round over a segment leaves in it: the states of its recurrent layers."""
    for kept, layer in zip(pool.layout.layers, pool.segments[segment].layers, strict=True):
        if kept.anchor_bytes:
            layer.state = (mx.zeros(kept.anchor_bytes // 4),)
    mx.eval(pool.segments[segment].flat())


def run_with_states(pool: QsaPool, orders: Sequence[ops.RowOp], *segments: int) -> tuple[int, int]:
    """Peak and lasting bytes of orders and of the states that come into new segments."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pool.apply(tuple(orders))
    for segment in segments:
        settle_states(pool, segment)
    return max(0, mx.get_peak_memory() - before), mx.get_active_memory() - before


def within(price: int | None, peak: int, layout: Layout) -> bool:
    assert price is not None
    return peak <= price <= 1.02 * peak + max(layout.block_bytes, fill_bytes(layout))


@settings(max_examples=60, deadline=None)
@given(LAYOUT, BLOCKS)
def test_an_allocation_costs_its_bill(layout: Layout, blocks: int) -> None:
    with uncached():
        peak, held = run_with_states(QsaPool(layout), [ops.Allocate(1, 0, blocks * BLOCK)], 1)
    assert within(bill(layout, Allocate(blocks * BLOCK)), peak, layout)
    assert held == segment_bytes(layout, blocks * BLOCK) == gain(layout, Allocate(blocks * BLOCK))


def resized(layout: Layout, have: int, want: int, frontier: int) -> None:
    way = Resize(have, want, frontier)
    orders = (ops.ResizeLayer(1, i, want, frontier) for i in range(len(layout.layers)))
    with uncached():
        peak, held = measured(pool_with(layout, [have]), *orders)
    assert within(bill(layout, way), peak, layout)
    assert held == gain(layout, way)


@settings(max_examples=60, deadline=None)
@given(LAYOUT, BLOCKS, BLOCKS, st.integers(0, 2048))
def test_a_resize_costs_its_bill(layout: Layout, have: int, want: int, written: int) -> None:
    resized(layout, have * BLOCK, want * BLOCK, min(written, have * BLOCK, want * BLOCK - 1))


def test_a_shrink_to_exactly_the_rows_written_gives_the_rest_back() -> None:
    resized(DENSE, 4 * BLOCK, 2 * BLOCK, 2 * BLOCK)


@settings(max_examples=60, deadline=None)
@given(LAYOUT, BLOCKS, st.integers(1, 2048))
def test_a_copy_costs_its_bill(layout: Layout, blocks: int, written: int) -> None:
    rows = blocks * BLOCK
    frontier = min(written, rows - 1)
    with uncached():
        orders = [ops.Allocate(2, 0, rows), ops.CopyRows(1, 2, 0, frontier)]
        peak, held = run_with_states(pool_with(layout, [rows]), orders, 2)
    assert within(bill(layout, Copy(frontier, rows)), peak, layout)
    assert held == gain(layout, Copy(frontier, rows))


@settings(max_examples=60, deadline=None)
@given(LAYOUT, st.integers(1, 4), st.integers(1, 4), st.integers(0, BLOCK - 1))
def test_a_fork_costs_its_bill(layout: Layout, parent: int, leaf: int, tail: int) -> None:
    start, rows = (parent - 1) * BLOCK, leaf * BLOCK
    copied = [ops.CopyRows(1, 2, start, start + tail)] if tail else []
    with uncached():
        peak, held = run_with_states(pool_with(layout, [parent * BLOCK]), [ops.Allocate(2, start, rows), *copied], 2)
    assert within(bill(layout, Fork(tail, rows)), peak, layout)
    assert held == gain(layout, Fork(tail, rows))


@settings(max_examples=60, deadline=None)
@given(LAYOUT, st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(1, BLOCK))
def test_a_merge_costs_its_bill_and_gives_the_joined_segments_back(
    layout: Layout, blocks: list[int], short: int
) -> None:
    have = [n * BLOCK for n in blocks]
    rows, written = sum(have), sum(have) - short
    stops = [sum(have[: i + 1]) for i in range(len(have) - 1)] + [written]
    starts = [0, *stops[:-1]]
    made = len(have) + 1
    copies = [ops.CopyRows(i, made, a, b) for i, (a, b) in enumerate(zip(starts, stops, strict=True), 1) if a < b]
    way = Merge(tuple(have), written, rows)
    with uncached():
        pool = pool_with(layout, have)
        peak, _ = run_with_states(pool, [ops.Allocate(made, 0, rows), *copies], made)
        assert within(bill(layout, way), peak, layout)
        before = mx.get_active_memory()
        pool.apply(tuple(map(ops.Drop, range(1, made))))
        given_back = before - mx.get_active_memory()
    assert segment_bytes(layout, rows) - given_back == gain(layout, way)


@settings(max_examples=60, deadline=None)
@given(LAYOUT, BLOCKS, BLOCKS)
def test_buffers_from_the_allocators_cache_are_larger_by_a_bounded_waste(layout: Layout, first: int, then: int) -> None:
    pool = QsaPool(layout)
    pool.apply((ops.Allocate(1, 0, first * BLOCK), ops.Drop(1)))
    before = mx.get_active_memory()
    pool.apply((ops.Allocate(2, 0, then * BLOCK),))
    asked = [n for layer in layout.layers for n in buffers(layer, then * BLOCK)]
    held = mx.get_active_memory() - before
    assert sum(asked) <= held <= sum(n + reuse_waste(n) for n in asked)


def buffers(layer: LayerLayout, rows: int) -> list[int]:
    return [t.row_bytes * rows for t in layer.rows] + [t.row_bytes * (rows // layer.ratio) for t in layer.pooled]
