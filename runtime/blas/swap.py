"""Point MLX's gemm imports at OpenBLAS, prove it on numbers, or leave everything as it was and say so."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import math
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from . import gemm
from .slots import RELOCATIONS, Slot, library, slots

LOG = logging.getLogger("onecopy.blas")
SYMBOLS = frozenset({"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"})
SHAPES = ((1, 64, 48), (5, 33, 17), (64, 64, 64), (96, 256, 80), (130, 1, 7), (257, 129, 65))
"""(M, K, N) of the self-check: one row, odd, square, wide, K = 1, past a kernel's block edges."""


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What MLX's matmul runs on. name: the library. active: OpenBLAS took over. reason: why not, "" when active."""

    name: str
    active: bool
    reason: str = ""
    threads: int = 0


def install(openblas: Path | None = None) -> BlasReport:
    """Make MLX's f32, f64 and complex matmul use OpenBLAS. Call once, before the first matmul; again changes nothing.

    openblas: the shared library; None looks into the `scipy_openblas32` package. Mutates libmlx's import pointers in
    this process. Never raises: the report (and, where it should have worked, one log line) says why it was not used.
    """
    if not _applies():
        return BlasReport("mlx", False, "not a Linux CPU build of MLX")
    try:
        return _swap(openblas or _find())
    except (OSError, LookupError, ValueError, AttributeError) as error:
        LOG.warning("OpenBLAS cannot be used, matmul stays on MLX's own BLAS and is slow: %s", error)
        return BlasReport("mlx", False, str(error))


def _applies() -> bool:
    cpu = mx.default_device().type == mx.DeviceType.cpu
    return sys.platform == "linux" and cpu and platform.machine() in RELOCATIONS


def _find() -> Path:
    """The library file of `scipy_openblas32`, found without running that package's code."""
    spec = importlib.util.find_spec("scipy_openblas32")
    for root in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(root, "lib").glob("libscipy_openblas*.so")):
            return path
    raise LookupError("the package scipy-openblas32 is not installed")


def _swap(path: Path) -> BlasReport:
    blas = ctypes.CDLL(str(path))
    found = _gemm_slots()
    report = BlasReport(_describe(blas), True, threads=blas.scipy_openblas_get_num_threads())
    before = [slot.read() for slot in found]
    targets = [_address(blas, f"scipy_{slot.symbol}") for slot in found]
    if before == targets:
        return report
    try:
        _write(found, targets)
        _check(found, targets)
    except BaseException:
        _write(found, before)
        raise
    _use_batches(blas)
    LOG.info("matmul runs on %s, %d threads", report.name, report.threads)
    return report


def _use_batches(blas: ctypes.CDLL) -> None:
    """Small products go through the library directly where it can take many at once: an older one cannot."""
    if not hasattr(blas, "scipy_cblas_sgemm_batch"):
        return
    gemm.use(blas)
    worst = gemm.error()
    if not worst < 1e-5:
        gemm.forget()
        LOG.warning("OpenBLAS is off by %.1e when it takes many products in one call: they go one by one", worst)


def _gemm_slots() -> list[Slot]:
    mlx = library("/libmlx.so")
    found = slots(mlx, SYMBOLS) if mlx else []
    missing = SYMBOLS - {slot.symbol for slot in found}
    if missing:
        raise LookupError(f"this build of MLX does not import {', '.join(sorted(missing))}")
    return found


def _describe(blas: ctypes.CDLL) -> str:
    """Version and kernel set: with other kernels the same product has other bits."""
    for entry in (blas.scipy_openblas_get_config, blas.scipy_openblas_get_corename):
        entry.restype = ctypes.c_char_p
    version = " ".join(blas.scipy_openblas_get_config().decode().split()[:2])
    return f"{version} ({blas.scipy_openblas_get_corename().decode()})"


def _address(blas: ctypes.CDLL, symbol: str) -> int:
    return ctypes.cast(getattr(blas, symbol), ctypes.c_void_p).value or 0


def _write(found: list[Slot], targets: Iterable[int]) -> None:
    for slot, target in zip(found, targets, strict=True):
        slot.write(target)


def _check(found: list[Slot], targets: list[int]) -> None:
    if [slot.read() for slot in found] != targets:
        raise ValueError("the new pointers did not stay in MLX's import table")
    worst = max(_error(shape, dtype) for shape in SHAPES for dtype in (np.float32, np.complex64))
    if not worst < 1e-5:
        raise ValueError(f"the self-check against NumPy is off by {worst:.1e}")


def _error(shape: tuple[int, int, int], dtype: type[np.generic]) -> float:
    """Largest relative error over plain, both transposes, and a batch of two, against NumPy in double precision."""
    m, k, n = shape
    a, b = _values(2 * m * k, dtype).reshape(2, m, k), _values(2 * k * n, dtype).reshape(2, k, n)
    x, y = mx.array(a), mx.array(b)
    xt, yt = mx.array(a.swapaxes(1, 2).copy()).swapaxes(1, 2), mx.array(b.swapaxes(1, 2).copy()).swapaxes(1, 2)
    results = [x[0] @ y[0], xt[0] @ y[0], x[0] @ yt[0], xt[0] @ yt[0], x @ y]
    wide = np.complex128 if dtype is np.complex64 else np.float64
    exact = a.astype(wide) @ b.astype(wide)
    wanted = [exact[0]] * 4 + [exact]
    errors = [np.abs(np.array(r) - w).max() for r, w in zip(results, wanted, strict=True)]
    return float(max(errors)) / math.sqrt(k)


def _values(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Fixed values in [-1, 1] with no pattern a wrong stride would repeat."""
    real = np.sin(np.arange(1, count + 1, dtype=np.float64) ** 2)
    return (real + 1j * np.cos(np.arange(count) * 1.7) if dtype is np.complex64 else real).astype(dtype)
