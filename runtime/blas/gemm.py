"""Many small matrix products in one call of the OpenBLAS that MLX was pointed at, spread over all cores.

A product that OpenBLAS calls small reads its factors where they lie, and gives a row the same bits whether it is called
alone or with others. Source: the BLAS-like extension `?gemm_batch`, as OpenBLAS's interface/gemm_batch.c has it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[Any]

SMALL = 1_000_000
"""Multiplications of a product up to which OpenBLAS's kernels for small products take it, where it has some."""

_ROW_MAJOR, _AS_IS, _TURNED = 101, 111, 112

_entry: Any = None
"""`cblas_sgemm_batch` of the library in use, once there is one."""

_single: Any = None
"""Its `cblas_sgemm`."""


@dataclass(frozen=True, slots=True)
class Group:
    """`count` products `[m, k] @ [k, n]` of float32. lda, ldb, ldc: numbers from one row to the next.

    turned: the second factor lies as `[n, k]`.
    """

    count: int
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int
    turned: bool = False


class Batch:
    """A call that computes all products of some groups; made once, run on other numbers each time."""

    __slots__ = ("_arguments", "_kept")

    def __init__(self, groups: Sequence[Group]) -> None:
        if _entry is None:
            raise AssertionError("no OpenBLAS is in use")

        def ints(*values: int) -> Any:
            return (ctypes.c_int * len(values))(*values)

        as_is, turned = ints(*[_AS_IS] * len(groups)), ints(*[_TURNED if g.turned else _AS_IS for g in groups])
        sizes = [ints(*(getattr(g, name) for g in groups)) for name in ("m", "n", "k", "lda", "ldb", "ldc", "count")]
        ones, zeros = ((ctypes.c_float * len(groups))(*[x] * len(groups)) for x in (1.0, 0.0))
        self._kept = (as_is, turned, *sizes, ones, zeros)
        m, n, k, lda, ldb, ldc, count = (ctypes.addressof(x) for x in sizes)
        first = (_ROW_MAJOR, ctypes.addressof(as_is), ctypes.addressof(turned), m, n, k, ctypes.addressof(ones))
        self._arguments = first, lda, ldb, ctypes.addressof(zeros), ldc, (len(groups), count)

    def __call__(self, a: Addresses, b: Addresses, c: Addresses) -> None:
        """Addresses of the first factors, the second ones and the results, one each for a product, group by group.

        Results are overwritten; they must not overlap each other or a factor. Nothing is checked: who calls keeps the
        memory alive.
        """
        first, lda, ldb, zeros, ldc, last = self._arguments
        _entry(*first, a.ctypes.data, lda, b.ctypes.data, ldb, zeros, c.ctypes.data, ldc, *last)


def use(library: ctypes.CDLL) -> None:
    """From now on batches run on `library`, a `scipy_openblas32`. AttributeError when it has no such entry."""
    global _entry, _single
    entry, single = library.scipy_cblas_sgemm_batch, library.scipy_cblas_sgemm
    number, where, factor = ctypes.c_int, ctypes.c_void_p, ctypes.c_float
    entry.restype = single.restype = None
    entry.argtypes = [number, *[where] * 13, number, where]
    single.argtypes = [*[number] * 6, factor, where, number, where, number, factor, where, number]
    _entry, _single = entry, single


def forget() -> None:
    """From now on no batch can be made."""
    global _entry
    _entry = None


def ready() -> bool:
    """Whether a `Batch` can be made."""
    return _entry is not None


def multiply(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any], turned: bool = False) -> None:
    """`out [m, n] = a [m, k] @ b [k, n]` as one product, float32 in rows that lie together. turned: `b` is `[n, k]`."""
    (m, n), k, way = out.shape, a.shape[1], _TURNED if turned else _AS_IS
    first, second, result = address(a), address(b), address(out)
    _single(_ROW_MAJOR, _AS_IS, way, m, n, k, 1.0, first, k, second, b.shape[1], 0.0, result, n)


def address(x: NDArray[Any]) -> int:
    """Where an array's first number lies."""
    return int(x.ctypes.data)


def error() -> float:
    """Largest relative error of batches of small and large products, against NumPy in double precision."""
    return max(_error_of(m, n, k, turned) for m, n, k in _TRIED for turned in (False, True))


_TRIED = ((5, 48, 64), (40, 130, 300))


def _error_of(m: int, n: int, k: int, turned: bool) -> float:
    b_shape = (n, k) if turned else (k, n)
    a, b = (np.sin(np.arange(3.0 * x * y) ** 2).astype(np.float32).reshape(3, x, y) for x, y in ((m, k), b_shape))
    c = np.zeros((3, m, n), np.float32)
    each = [np.array([address(x) for x in part], np.int64) for part in (a, b, c)]
    Batch([Group(3, m, n, k, k, b_shape[1], n, turned)])(*each)
    exact = a.astype(np.float64) @ (b.swapaxes(1, 2) if turned else b).astype(np.float64)
    return float(np.abs(c - exact).max()) / math.sqrt(k)
