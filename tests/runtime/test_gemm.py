"""Many products in one call: their numbers, their places, and that any number of cores gives them the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from onecopy.runtime.blas import gemm
from onecopy.runtime.blas.gemm import Batch, Group, address
from onecopy.runtime.blas.swap import _find

pytestmark = pytest.mark.skipif(not gemm.ready(), reason="no OpenBLAS on this platform")
RNG = np.random.default_rng(4)


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The library in use; threads are as they were afterwards."""
    found = ctypes.CDLL(str(_find()))
    before = found.scipy_openblas_get_num_threads()
    yield found
    found.scipy_openblas_set_num_threads(before)


def test_products_of_several_shapes_land_where_they_are_asked_to() -> None:
    a, b = RNG.standard_normal((6, 64), dtype=np.float32), RNG.standard_normal((64, 100), dtype=np.float32)
    keys = RNG.standard_normal((2, 32, 64), dtype=np.float32)
    wide, scores = np.full((6, 200), 7.0, np.float32), np.zeros((2, 6, 32), np.float32)
    batch = Batch([Group(2, 3, 100, 64, 64, 100, 200), Group(2, 6, 32, 64, 64, 64, 32, True)])
    batch(
        np.array([address(a), address(a[3:]), address(a), address(a)]),
        np.array([address(b), address(b), address(keys), address(keys[1])]),
        np.array([address(wide), address(wide[3:, 100:]), address(scores), address(scores[1])]),
    )
    np.testing.assert_allclose(wide[:3, :100], a[:3] @ b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(wide[3:, 100:], a[3:] @ b, rtol=1e-4, atol=1e-5)
    assert (wide[:3, 100:] == 7.0).all()
    assert (wide[3:, :100] == 7.0).all()
    np.testing.assert_allclose(scores, a @ keys.swapaxes(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_one_core_and_several_give_the_same_bits(library: ctypes.CDLL, rows: int) -> None:
    a, b = RNG.standard_normal((rows, 448), dtype=np.float32), RNG.standard_normal((448, 1024), dtype=np.float32)
    found = []
    for threads in (1, 2, 3):
        library.scipy_openblas_set_num_threads(threads)
        c = np.zeros((rows, 1024), np.float32)
        batch = Batch([Group(16, rows, 64, 448, 448, 1024, 1024)])
        at = 4 * 64 * np.arange(16)
        batch(np.full(16, address(a)), address(b) + at, address(c) + at)
        found.append(c)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_a_library_that_is_off_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from onecopy.runtime.blas import swap

    entry = gemm._entry
    monkeypatch.setattr(gemm, "error", lambda: 0.5)
    try:
        swap._use_batches(ctypes.CDLL(str(_find())))
        assert not gemm.ready()
        assert "off by 5.0e-01" in caplog.text
        with pytest.raises(AssertionError, match="no OpenBLAS"):
            Batch([Group(1, 1, 1, 1, 1, 1, 1)])
    finally:
        gemm._entry = entry


def test_an_older_library_without_batches_is_left_alone() -> None:
    from onecopy.runtime.blas import swap

    entry = gemm._entry
    swap._use_batches(ctypes.CDLL(None))
    assert gemm._entry is entry


def test_what_is_measured_as_an_error_is_small() -> None:
    assert gemm.error() < 1e-5
