"""The MLX streams that work is spread over. On a CPU each is one thread, and only a large product uses another."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx

from .exponential import on_host

_own = threading.local()


def streams() -> tuple[Any, ...]:
    """The default one of this thread, and on a CPU a second one: two share memory's speed and most caches."""
    here = mx.default_stream(mx.default_device())
    if not on_host():
        return (here,)
    if not hasattr(_own, "second"):
        _own.second = mx.new_stream(mx.cpu)
    return here, _own.second
