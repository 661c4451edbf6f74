"""The QSA indexer: scores complete blocks of keys through their pooled index key and picks the best few.

Source: the public qwen4_exp reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .cache import IndexedRows
from .config import Config
from .layers import Norm, Span, angles, rotate
from .topk import best


@dataclass(frozen=True, slots=True)
class Selection:
    """What the queries at positions start … start + n - 1 of one conversation attend to.

    blocks: int32 [n, picked] ascending complete blocks, or None when every earlier row is selected. A query at p
    also attends to its open block's rows; `counts` says how many rows that makes in all, per query.
    """

    start: int
    counts: tuple[int, ...]
    blocks: mx.array | None


class Indexer(nn.Module):
    """Queries and raw keys from the layer's input, pooled keys from raw keys, selections from scores."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size = (config.index_heads + 1) * config.index_dim
        self.index_qk_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.q_layernorm = Norm(config.index_dim, config.eps)
        self.k_layernorm = Norm(config.index_dim, config.eps)
        self._c = config

    def project(self, x: mx.array, span: Span) -> tuple[mx.array, mx.array]:
        """x [B, W, d] -> rotated queries [B, W, heads, Di] and raw keys [B, W, Di]."""
        c = self._c
        q, raw = mx.split(self.index_qk_proj(x), [c.index_heads * c.index_dim], axis=-1)
        cos, sin = span.angles
        q = self.q_layernorm(mx.unflatten(q, -1, (c.index_heads, c.index_dim)))
        return rotate(q, cos[..., None, :], sin[..., None, :]), raw

    def close_blocks(self, conversation: int, span: Span, rows: IndexedRows) -> None:
        """Pools the blocks that the new rows complete and writes their keys. Nothing is written when none closes."""
        ratio, start = self._c.ratio, span.starts[conversation]
        first, stop = start // ratio, (start + span.width) // ratio
        if first < stop:
            raw = mx.unflatten(rows.raw(conversation, first * ratio, stop * ratio), 0, (stop - first, ratio))
            rows.write_pooled(conversation, first, self.pool(raw, first))

    def pool(self, raw: mx.array, first: int) -> mx.array:
        """raw [n, ratio, Di] of blocks first … -> pooled [n, Di]: mean, norm, rotation at each block's first row.

        A function of the raw keys alone, so rows restored or copied without their pooled keys can have them again.
        """
        mean = raw.astype(mx.float32).mean(axis=1).astype(raw.dtype)
        cos, sin = angles(self._c, (first + np.arange(raw.shape[0])) * self._c.ratio)
        return rotate(self.k_layernorm(mean), cos, sin)

    def select(self, conversation: int, queries: mx.array, start: int, rows: IndexedRows) -> Selection:
        """queries [n, heads, Di] at positions start … start + n - 1, all past the budget or all within it."""
        c = self._c
        ends = [start + 1 + i for i in range(queries.shape[0])]
        counts = tuple(min(c.selected_blocks, end // c.ratio) * c.ratio + end % c.ratio for end in ends)
        if ends[-1] // c.ratio <= c.selected_blocks:
            return Selection(start, counts, None)
        complete = np.array([end // c.ratio for end in ends])
        pieces = rows.pooled(conversation, int(complete[-1]))
        return Selection(start, counts, best(scores(queries, pieces, c), complete, c.selected_blocks))


def scores(queries: mx.array, pieces: Sequence[mx.array], c: Config) -> mx.array:
    """queries [n, heads, Di] against every pooled key -> [n, blocks]; one fixed-shape product per tile."""
    q = queries.astype(mx.float32)[:, None]
    tiles = [_tiled(piece.astype(mx.float32), c.pool_tile) for piece in pieces]
    by_piece = [mx.maximum(q @ tile, 0.0).sum(axis=-2).flatten(1) for tile in tiles]
    return mx.concatenate(by_piece, axis=1) / c.index_dim**0.5


def _tiled(keys: mx.array, tile: int) -> mx.array:
    """keys [n, Di] -> [tiles, Di, tile], the last tile padded with zeros when it is short."""
    if short := -keys.shape[0] % tile:
        keys = mx.pad(keys, [(0, short), (0, 0)])
    return mx.unflatten(keys, 0, (-1, tile)).swapaxes(-1, -2)
