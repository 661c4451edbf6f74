"""Every way computes the same product; what differs is only which products the machine is given."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.blas.gemm import ready
from onecopy.runtime.numerics import arrange
from onecopy.runtime.numerics.arrange import BODY, CANDIDATES, Arrangement, Cut, Turned, Way, constant, pad_rows
from onecopy.runtime.numerics.linear import host_rows

RNG = np.random.default_rng(2)
W = RNG.standard_normal((40, 24), dtype=np.float32)
X = RNG.standard_normal((300, 24), dtype=np.float32)


@pytest.mark.parametrize("how", BODY, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8, 9, 16, 17, 31, 256, 257, 300])
def test_a_way_gives_the_rows_of_the_product(how: Way, rows: int) -> None:
    found = np.array(how.product(mx.array(X[:rows]), mx.array(W)))
    assert found.shape == (rows, 40)
    np.testing.assert_allclose(found, X[:rows] @ W.T, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not ready(), reason="no OpenBLAS on this platform")
@pytest.mark.parametrize("how", BODY, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 8, 9, 16, 17, 32])
def test_rows_that_numpy_has_get_the_bits_of_the_product(how: Way, rows: int) -> None:
    w, x = mx.array(W), X[40 : 40 + rows]
    held = how.hold(w)
    found = how.rows(x, held if isinstance(how, Cut) else W)
    assert (found is None) == (isinstance(how, Turned) and rows > 16)
    if found is not None:
        assert np.array_equal(found, np.array(how.product(mx.array(x), w, held)))
        assert np.array_equal(host_rows(how, x, w, held), found)
    turned = mx.array(W.T.copy()).T  # weights that do not lie in rows
    assert np.array_equal(host_rows(how, x, turned, how.hold(turned)), np.array(how.product(mx.array(x), w, held)))


@pytest.mark.parametrize("how", CANDIDATES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 19, 40])
def test_a_batch_of_products_is_laid_out_the_same_way(how: Arrangement, rows: int) -> None:
    x, b = RNG.standard_normal((2, 1, rows, 6), dtype=np.float32), RNG.standard_normal((2, 3, 6, 5), dtype=np.float32)
    padded = pad_rows(mx.array(x), how.padded(rows))
    assert padded.shape[2] == how.padded(rows)
    np.testing.assert_allclose(np.array(how.batched(padded, mx.array(b)))[:, :, :rows], x @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("how", "rows", "padded"),
    [
        (Arrangement(), 5, 5),
        (Arrangement(least=8), 5, 8),
        (Arrangement(least=8), 9, 9),
        (Arrangement(least=8, multiple=8, most=16), 17, 24),
        (Arrangement(least=8, multiple=8, most=16), 16, 16),
        (Arrangement(least=4, multiple=4, most=8), 22, 24),
        (Arrangement(most=1), 7, 7),
    ],
)
def test_rows_are_padded_to_heights_the_arrangement_allows(how: Arrangement, rows: int, padded: int) -> None:
    assert how.padded(rows) == padded


@pytest.mark.parametrize(
    ("inputs", "runs"),
    [
        (448, [(448, 1)]),
        (576, [(288, 2)]),
        (900, [(448, 1), (240, 1), (212, 1)]),
        (1000, [(448, 1), (288, 1), (264, 1)]),
        (1536, [(448, 2), (320, 2)]),
    ],
)
def test_a_row_is_cut_as_a_large_product_sums_it(inputs: int, runs: list[tuple[int, int]]) -> None:
    assert Cut(448).runs(inputs) == runs


@pytest.mark.parametrize("inputs", [20, 64, 70, 100, 333])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_cut_product_is_the_product(inputs: int, rows: int) -> None:
    w, x = (RNG.standard_normal((n, inputs), dtype=np.float32) for n in (40, rows))
    how = Cut(32, unit=4)
    held = how.hold(mx.array(w))
    assert np.array_equal(np.array(held.whole), w.T)
    for kept in (None, held):
        np.testing.assert_allclose(np.array(how.product(mx.array(x), mx.array(w), kept)), x @ w.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [7, 16, 17, 100, 256, 300])
def test_columns_stay_columns_through_several_products(rows: int) -> None:
    second = RNG.standard_normal((24, 40), dtype=np.float32)
    found = Turned().by_columns(mx.array(X[:rows]), lambda c: mx.matmul(mx.array(second), mx.matmul(mx.array(W), c)))
    np.testing.assert_allclose(np.array(found), X[:rows] @ W.T @ second.T, rtol=1e-3, atol=1e-3)


def test_a_tall_product_has_spare_rows_at_both_ends_and_whole_multiples_between() -> None:
    heights: list[int] = []

    def compute(columns: mx.array) -> mx.array:
        heights.append(columns.shape[1])
        assert not np.array(columns[:, :8]).any()
        assert not np.array(columns[:, -8:]).any()
        return columns

    assert np.array_equal(np.array(Turned().by_columns(mx.array(X), compute)), X)
    assert heights == [256 + 16, 48 + 16]


def test_constants_are_made_once() -> None:
    assert constant((2, 3), 1.5) is constant((2, 3), 1.5)
    assert np.array(constant((1, 2), -np.inf)).tolist() == [[-np.inf, -np.inf]]


@pytest.mark.parametrize("rows", [16, 17, 40, 43])
@pytest.mark.parametrize("reach", [1, 2 * 5 * 7, 3 * 5 * 7])
def test_tiles_beyond_the_reach_of_offsets_go_through_in_several_batches(rows: int, reach: int) -> None:
    how, x, w = Arrangement(8, 8, 8), mx.random.normal((rows, 7)), mx.random.normal((5, 7))
    whole = how.product(x, w)
    q, b = mx.random.normal((2, 3, how.padded(rows), 7)), mx.random.normal((2, 3, 7, 5))
    batch = how.batched(q, b)
    with mock.patch.object(arrange, "REACH", reach):
        assert mx.array_equal(how.product(x, w), whole)
        assert mx.array_equal(how.batched(q, b), batch)


def test_the_last_tile_of_a_product_with_large_weights_is_its_own() -> None:
    inputs, outputs = 2048, 4096
    rows = 8 * (arrange.REACH // (inputs * outputs) + 3)
    x, w = mx.random.normal((rows, inputs)), mx.random.normal((outputs, inputs))
    how = Arrangement(8, 8, 8)
    assert mx.array_equal(how.product(x, w)[-8:], how.product(x[-8:], w))
