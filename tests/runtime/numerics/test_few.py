"""Few rows go through weights in pieces: the product, whatever its sizes, and the bits that MLX gives more rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.blas import gemm
from onecopy.runtime.blas.gemm import SMALL
from onecopy.runtime.numerics.arrange import Cut
from onecopy.runtime.numerics.few import FEW, WIDTHS, Few, cut
from onecopy.runtime.numerics.probe import exact_linear

pytestmark = pytest.mark.skipif(not gemm.ready(), reason="no OpenBLAS on this platform")
RNG = np.random.default_rng(8)


@pytest.mark.parametrize("rows", [1, 2, 7, 31, FEW])
@pytest.mark.parametrize("outputs", [5, 64, 300, 1025])
@pytest.mark.parametrize("runs", [[(90, 1)], [(30, 3)], [(40, 2), (10, 1)]], ids=str)
def test_pieces_add_up_to_the_product(rows: int, outputs: int, runs: list[tuple[int, int]]) -> None:
    w, x = RNG.standard_normal((90, outputs), dtype=np.float32), RNG.standard_normal((rows, 90), dtype=np.float32)
    few = Few(w, runs)
    first = few(x)
    kept = first.copy()
    np.testing.assert_allclose(first, x @ w, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(few(2 * x), 2 * first, rtol=1e-4, atol=1e-4)
    assert np.array_equal(first, kept)  # a result is not the memory of the next


def test_rows_that_do_not_lie_together_are_taken_as_they_are() -> None:
    w, x = RNG.standard_normal((64, 64), dtype=np.float32), RNG.standard_normal((3, 128), dtype=np.float32)
    few = Few(w, [(64, 1)])
    assert np.array_equal(few(x[:, ::2]), few(x[:, ::2].copy()))


@pytest.mark.parametrize("outputs", [1, 63, 64, 100, 960, 49152])
@pytest.mark.parametrize("each", [100, 1_800, 14_000])
def test_columns_are_cut_without_gap_or_overlap_and_small_enough(outputs: int, each: int) -> None:
    taken: list[int] = []
    for first, width, count in cut(outputs, each):
        assert width * each <= SMALL or width <= WIDTHS[-1]
        for i in range(count):
            taken += range(first + i * width, first + (i + 1) * width)
    assert taken == list(range(outputs))


def test_where_pieces_are_exact_a_row_has_one_value_in_any_company() -> None:
    how = exact_linear(320, 600, False)
    w, x = (mx.array(RNG.standard_normal((n, 600), dtype=np.float32)) for n in (320, 200))
    assert how is not None
    whole = np.array(how.product(x, w))
    for rows in (1, 3, FEW, FEW + 1, 100):
        assert np.array_equal(np.array(how.product(x[:rows], w)), whole[:rows])
    if isinstance(how, Cut):
        few = how.hold(w).few
        assert few is not None
        assert np.array_equal(few(np.array(x[:5])), whole[:5])
