"""QSA attention: softmax over the selected rows only, in tiles of fixed shape, read where the rows lie.

Within the budget every earlier row is selected and tiles are read in place; past it the selected rows alone are
gathered, so a token's cost stops growing with the context. A query's slots, hence its tiles, depend on its own
position and selection and on nothing that runs beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from onecopy.runtime.numerics.exponential import exp

from .cache import IndexedRows
from .config import Config
from .indexer import Indexer, Selection
from .layers import Norm, Span, rotate, total

# Gathered keys and values of the queries handled together stay under this many bytes.
_GATHER_BYTES = 64 << 20


class Attention(nn.Module):
    """One indexed layer: projections, norms, rotation, selection, attention, output gate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c, bias = config, config.bias
        self.q_proj = nn.Linear(c.hidden_size, 2 * c.heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden_size, bias=bias)
        self.q_norm = Norm(c.head_dim, c.eps)
        self.k_norm = Norm(c.head_dim, c.eps)
        self.indexer = Indexer(c)
        self._c = config

    def __call__(self, x: mx.array, span: Span, rows: IndexedRows) -> mx.array:
        """x [B, W, d] -> [B, W, d]. Writes the new rows and the pooled keys they complete."""
        queries, gate = self._queries(x, span)
        index_queries, raw = self.indexer.project(x, span)
        rows.write(*self._keys_values(x, span), raw)
        attended = [self._attend(b, queries[b], index_queries[b], span, rows) for b in range(len(span.starts))]
        return self.o_proj(mx.stack(attended).flatten(-2) * mx.sigmoid(gate))

    def _queries(self, x: mx.array, span: Span) -> tuple[mx.array, mx.array]:
        """Rotated queries [B, W, H, Dh] and the output gate [B, W, H·Dh]."""
        both = mx.unflatten(self.q_proj(x), -1, (self._c.heads, 2, self._c.head_dim))
        cos, sin = span.angles
        return rotate(self.q_norm(both[..., 0, :]), cos[..., None, :], sin[..., None, :]), both[..., 1, :].flatten(-2)

    def _keys_values(self, x: mx.array, span: Span) -> tuple[mx.array, mx.array]:
        """Rotated keys and values, each [B, kv_heads, W, Dh]."""
        heads = (self._c.kv_heads, self._c.head_dim)
        keys = self.k_norm(mx.unflatten(self.k_proj(x), -1, heads)).swapaxes(1, 2)
        cos, sin = span.angles
        values = mx.unflatten(self.v_proj(x), -1, heads).swapaxes(1, 2)
        return rotate(keys, cos[:, None], sin[:, None]), values

    def _attend(self, b: int, q: mx.array, index_q: mx.array, span: Span, rows: IndexedRows) -> mx.array:
        """One conversation's rows: q [W, H, Dh], index_q [W, heads, Di] -> [W, H, Dh]."""
        self.indexer.close_blocks(b, span, rows)
        c, outs = self._c, []
        for first, stop in _groups(span.starts[b], span.width, c):
            selection = self.indexer.select(b, index_q[first:stop], span.starts[b] + first, rows)
            tiles = _tiles(b, selection, rows, c)
            outs.append(softmax_over(_by_kv_head(q[first:stop], c), tiles, selection.counts))
        return mx.concatenate(outs)


def _groups(start: int, width: int, c: Config) -> Iterator[tuple[int, int]]:
    """Cuts W new rows into runs: those within the budget, then runs small enough to gather for."""
    dense = min(max((c.selected_blocks + 1) * c.ratio - 1 - start, 0), width)
    if dense:
        yield 0, dense
    bytes_per_query = 8 * c.kv_heads * c.head_dim * (c.budget + c.ratio)
    step = max(1, _GATHER_BYTES // bytes_per_query)
    for first in range(dense, width, step):
        yield first, min(first + step, width)


def _by_kv_head(q: mx.array, c: Config) -> mx.array:
    """q [n, H, Dh] -> f32 [n, kv_heads, 1, H / kv_heads, Dh], scaled; the third axis is the tile's."""
    grouped = mx.unflatten(q.astype(mx.float32), 1, (c.kv_heads, -1))
    return (grouped * c.head_dim**-0.5)[:, :, None]


def _tiles(b: int, picked: Selection, rows: IndexedRows, c: Config) -> list[tuple[mx.array, mx.array]]:
    """Keys and values in pieces [n or 1, kv_heads, tiles, tile, Dh], in slot order."""
    if picked.blocks is None:
        pieces = rows.prefix(b, max(picked.counts))
        return [(cut(k, c.tile)[None], cut(v, c.tile)[None]) for k, v in pieces]
    slots = -(-max(picked.counts) // c.tile) * c.tile
    positions = _positions(picked, slots, c.ratio)
    gathered = rows.gather(b, positions.flatten())
    return [tuple(cut(mx.unflatten(g, 1, (-1, slots)), c.tile).swapaxes(0, 1) for g in gathered)]  # type: ignore[list-item]


def cut(rows: mx.array, tile: int) -> mx.array:
    """[…, n, Dh] -> […, tiles, tile, Dh], the last tile padded with zeros when it is short."""
    if short := -rows.shape[-2] % tile:
        rows = mx.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, short), (0, 0)])
    return mx.unflatten(rows, -2, (-1, tile))


def _positions(picked: Selection, slots: int, ratio: int) -> mx.array:
    """Which row each slot reads, int32 [n, slots]: picked blocks' rows ascending, then the open block's, then row 0."""
    assert picked.blocks is not None
    slot = np.arange(slots, dtype=np.int32)
    in_blocks = picked.blocks.shape[1] * ratio
    blocks = ((picked.blocks * ratio)[..., None] + mx.arange(ratio, dtype=mx.int32)).flatten(1)
    ends = picked.start + 1 + np.arange(len(picked.counts))[:, None]
    tail = ends // ratio * ratio + slot[in_blocks:] - in_blocks
    return mx.concatenate([blocks, mx.array(np.where(tail < ends, tail, 0).astype(np.int32))], axis=1)


def softmax_over(q: mx.array, tiles: Sequence[tuple[mx.array, mx.array]], counts: tuple[int, ...]) -> mx.array:
    """Attention of q [n, kv, 1, g, Dh] over tiled keys; query i sees its first counts[i] slots. -> [n, H, Dh].

    Tile sums are added in order, so tiles that a query does not reach add exact zeros.
    """
    scores = mx.concatenate([q @ keys.astype(mx.float32).swapaxes(-1, -2) for keys, _ in tiles], axis=2)
    slots = np.arange(scores.shape[2] * scores.shape[4]).reshape(scores.shape[2], 1, -1)
    seen = mx.array(slots < np.array(counts).reshape(-1, 1, 1, 1))[:, None]
    scores = mx.where(seen, scores, -mx.inf)
    weights = exp(scores - scores.max(axis=(2, 4), keepdims=True))
    sums = total(_each(weights.sum(axis=-1, keepdims=True)))
    return (total(_each(_weigh(weights, tiles))) / sums).flatten(1, 2)


def _weigh(weights: mx.array, tiles: Sequence[tuple[mx.array, mx.array]]) -> mx.array:
    """weights [n, kv, tiles, g, tile] times values -> [n, kv, tiles, g, Dh]."""
    cuts = np.cumsum([values.shape[2] for _, values in tiles])[:-1].tolist()
    parts = mx.split(weights, cuts, axis=2) if cuts else [weights]
    return mx.concatenate([w @ v.astype(mx.float32) for w, (_, v) in zip(parts, tiles, strict=True)], axis=2)


def _each(tiled: mx.array) -> list[mx.array]:
    return [tiled[:, :, i] for i in range(tiled.shape[2])]
