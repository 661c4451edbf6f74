"""The engine: a prepared model, its pool of rows, and one forward over strips of conversations. Device thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .numerics.linear import RoundShape
from .rows.attention import RowTile
from .rows.buffers import Pool
from .rows.caches import RoundRows, RowCache, Strip

Array = Any


class Engine:
    """Runs rounds. `pool` is changed by the bank's orders, `forward` writes rows past the leaves' frontiers only.

    pad: rows of the flat batch for a number of real rows, so that no linear has to pad again.
    """

    def __init__(self, model: Any, pool: Pool, shape: RoundShape, tile: RowTile, pad: Any) -> None:
        self.model = model
        self.pool = pool
        self.caches = [RowCache(i, layer.window) for i, layer in enumerate(pool.layout.layers)]
        self._shape = shape
        self._tile = tile
        self._pad = pad

    def forward(self, strips: Sequence[Strip]) -> Array:
        """Lazy logits `[wanted rows, vocab]` of the strips' wanted rows in order; evaluate with `settle`."""
        real = sum(len(s.tokens) for s in strips)
        rows = self._pad(real)
        now = RoundRows(strips, self.pool, rows, self._tile)
        self._shape.real = real
        wanted = _wanted_rows(strips)
        self._shape.wanted = mx.array(np.array(wanted, dtype=np.int32))
        tokens = [t for s in strips for t in s.tokens] + [0] * (rows - real)
        for cache in self.caches:
            cache.round = now
        try:
            logits = self.model(mx.array(np.array(tokens, dtype=np.int32))[:, None], cache=self.caches)
        finally:
            for cache in self.caches:
                cache.round = None
        return logits.reshape(-1, logits.shape[-1])

    def settle(self, strips: Sequence[Strip], *outputs: Array) -> None:
        """Evaluates outputs and every buffer the strips wrote, so that no pending graph keeps a buffer shared."""
        mx.eval(*outputs, *(a for s in strips for a in self.pool.segments[s.chain.leaf].flat()))


def _wanted_rows(strips: Sequence[Strip]) -> list[int]:
    out, at = [], 0
    for s in strips:
        at += len(s.tokens)
        out += range(at - s.wanted, at)
    return out or [0]  # the head is lazy: a row nobody reads is never computed
