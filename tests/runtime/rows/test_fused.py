"""Strips whose rows lie in one segment, taken by MLX's fused kernel; on a CPU MLX computes the same without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.rows import fused
from onecopy.runtime.rows.fused import ANY, attend_whole, fused_rows, mask_of
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ops import Chain, Link
from onecopy.runtime.rows.plan import RoundRows, Strip

from .test_attention import FUSED, GROUP, IN_GRAPHS, KVH, D, Rows, queries

SHAPE = (KVH, GROUP, D, D)


def strip(segment: int, at: int, rows: int) -> Strip:
    return Strip(Chain((Link(segment, 0, at),), 3 * BLOCK), at, (0,) * rows)


@pytest.mark.parametrize("window", [None, 100])
def test_strips_of_one_segment_and_forks_go_through_side_by_side(window: int | None) -> None:
    made = Rows(window)
    for number, start, blocks in ((1, 0, 2), (2, 512, 1), (3, 512, 1), (4, 0, 3)):
        made.segment(number, start, blocks)
    forks = [
        Strip(Chain((Link(1, 0, 512), Link(n, 512, 512 + at)), 768), 512 + at, (0,) * 2) for n, at in ((2, 9), (3, 30))
    ]
    strips = [forks[0], strip(4, 600, 1), forks[1], strip(1, 300, 5)]
    q = queries(10)
    kinds = [u.whole is not None for u in made.round(strips, FUSED).reading(window, GROUP, KVH).units]
    assert kinds == [True, True, False]
    np.testing.assert_allclose(made.attend(strips, q, None, FUSED), made.in_graphs(strips, q), atol=2e-5)


def test_a_fork_that_a_window_keeps_within_its_own_segment_is_taken_too() -> None:
    made = Rows(50)
    made.segment(1, 0, 2)
    made.segment(2, 512, 1)
    chain = Chain((Link(1, 0, 512), Link(2, 512, 600)), 768)
    for at, whole in ((600, True), (520, False)):
        one = Strip(Chain((chain.links[0], Link(2, 512, at)), 768), at, (0,))
        (unit,) = made.round([one], FUSED).reading(50, GROUP, KVH).units
        assert (unit.whole is not None) == whole
        q = queries(1)
        np.testing.assert_allclose(made.attend([one], q, None, FUSED), made.in_graphs([one], q), atol=2e-5)


def test_a_block_that_is_filled_at_once_sees_all_of_itself() -> None:
    made = Rows()
    made.segment(1, 0, 1)
    q, one = queries(4), [strip(1, 20, 4)]
    lanes = (mx.default_stream(mx.default_device()),)
    outs = []
    for tile in (FUSED, IN_GRAPHS):
        made.cache.round = RoundRows(one, made.pool, tile, lanes, together=True)
        outs.append(np.array(made.cache.attend(mx.array(q))))
    np.testing.assert_allclose(*outs, atol=2e-5)


def test_longer_strips_than_the_kernel_takes_go_by_tiles() -> None:
    made = Rows()
    made.segment(1, 0, 2)
    tile = replace(IN_GRAPHS, fused=4)
    for rows, whole in ((4, True), (5, False)):
        (unit,) = made.round([strip(1, 100, rows)], tile).reading(None, GROUP, KVH).units
        assert (unit.whole is not None) == whole


def test_quantized_rows_go_by_tiles() -> None:
    made = Rows()
    made.segment(1, 0, 1)
    made.pool.packed = True
    (unit,) = made.round([strip(1, 100, 1)], FUSED).reading(None, GROUP, KVH).units
    assert unit.whole is None


@pytest.mark.parametrize(
    ("seen", "first", "window", "want"),
    [([7], 0, None, "all"), ([7, 7, 7], 0, 3, "all"), ([5, 6], 0, None, "causal"), ([5, 6], 0, 7, "causal")],
)
def test_a_mask_is_only_made_where_no_simpler_one_says_it(
    seen: list[int], first: int, window: int | None, want: str
) -> None:
    found = mask_of(np.array(seen), first, max(seen) + 1, window)
    assert found is None if want == "all" else found == want


def test_a_window_hides_what_lies_before_it_for_each_query() -> None:
    found = np.array(mask_of(np.array([5, 6]), 3, 7, 3))
    assert found.tolist() == [[True, True, True, False], [False, True, True, True]]


def test_a_cpu_has_no_fused_kernel() -> None:
    assert fused_rows([SHAPE], [mx.float32], False) == 0


@pytest.mark.parametrize(("most", "want"), [(64, ANY), (8, 8), (10, 8), (0, 0)])
def test_kernels_are_found_by_trying_them(most: int, want: int) -> None:
    def device(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        if q.shape[0] > most:
            raise ValueError("no fused kernel")
        return attend_whole(q, k, v, *rest[:-1])

    with mock.patch.object(fused, "attend_whole", device):
        assert fused_rows([SHAPE], [mx.float32, mx.float16], True) == want
        assert fused_rows([], [], False) == 0
