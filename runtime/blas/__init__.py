"""Fast BLAS under MLX on Linux CPUs, without a compiler and without another build of MLX.

The CPU wheel of MLX calls a reference BLAS. `install()` points its three gemm imports at OpenBLAS:

swap.py   the policy: where it applies, the swap, the self-check against NumPy, the way back
slots.py  the mechanism: import slots of a mapped ELF library, read and written in place
gemm.py   the same library called directly: many small products in one call

`install()` is called once, before the first matmul, on the thread that will own MLX. It never raises:
where it does not apply it does nothing, and where it cannot be used one log line says why.
"""

from .swap import LOG, BlasReport, install

__all__ = ["LOG", "BlasReport", "install"]
