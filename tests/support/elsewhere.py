"""A CPU that stands for a device whose memory NumPy does not see: everything stays in MLX's graphs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import mlx.core as mx
import pytest
from onecopy.runtime.numerics import exponential
from onecopy.runtime.numerics.probe import exact_linear, exact_tile

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU, MLX compiles graphs with g++")


@contextmanager
def elsewhere(device: mx.DeviceType = mx.DeviceType.gpu) -> Iterator[None]:
    """In the block only `device` would be the host: by default none that is here, and NumPy computes nothing.

    What a self-check found is found again, inside and behind it.
    """
    _forget()
    with mock.patch.object(exponential, "HOST", device):
        yield
    _forget()


def _forget() -> None:
    exact_linear.cache_clear()
    exact_tile.cache_clear()
