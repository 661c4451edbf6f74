"""e to the power of x, by whoever is fast at it.

MLX computes exponentials of float32 one by one on a CPU, and NumPy many at a time; in long prompts and wide rounds they
are most of what is not a product. NumPy gives a number the same bits wherever it stands in an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

Array = Any


def exp(x: Array) -> Array:
    """e to the power of each number of `x`, of its shape and dtype. See `exp_all`."""
    return exp_all([x])[0]


def exp_all(parts: Sequence[Array]) -> list[Array]:
    """e to the power of each number of each array. Uses the arrays up: on a CPU their memory becomes the results'.

    Each must be the fresh result of an operation that nothing else reads, because MLX does not know that it changes.
    Evaluates float32 on a CPU; lazy otherwise. Device thread only.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return [mx.exp(x) for x in parts]
    mx.eval([x for x in parts if x.dtype == mx.float32])
    return [_in_place(x) if x.dtype == mx.float32 else mx.exp(x) for x in parts]


def _in_place(x: Array) -> Array:
    seen = np.array(x, copy=False)
    with np.errstate(over="ignore"):  # infinite is what it is
        np.exp(seen, out=seen)
    return x
