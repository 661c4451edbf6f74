"""e to the power of x, by whoever is fast at it.

MLX computes exponentials of float32 one by one on a CPU, and NumPy many at a time; in long prompts and wide rounds they
are most of what is not a product. NumPy gives a number the same bits wherever it stands in an array.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

Array = Any

HOST = mx.DeviceType.cpu
"""The device whose memory NumPy reads and writes."""


def on_host() -> bool:
    """Whether arrays are in memory that NumPy reads and writes, because MLX computes on a CPU."""
    return mx.default_device().type == HOST


def seen(x: Array) -> np.ndarray[Any, Any]:
    """An evaluated array's memory. MLX does not know that it changes: who writes must be the only one who reads."""
    return np.array(x, copy=False)


def exp(x: Array) -> Array:
    """e to the power of each number of `x`, of its shape and dtype.

    Uses x up: on a CPU its memory becomes the result's. It must be the fresh result of an operation that nothing else
    reads. Evaluates float32 on a CPU; lazy otherwise. Device thread only.
    """
    if not on_host() or x.dtype != mx.float32:
        return mx.exp(x)
    mx.eval(x)
    numbers = seen(x)
    with np.errstate(over="ignore"):  # infinite is what it is
        np.exp(numbers, out=numbers)
    return x
