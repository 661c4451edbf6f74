"""A drafter's own layers: kept in the leaves beside the model's, so that forks, rewinds and saves carry them along."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
from onecopy.runtime.rows.attention import RowTile
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.caches import RowCache
from onecopy.runtime.rows.indexed import IndexedCache
from onecopy.runtime.rows.layout import LayerLayout
from onecopy.runtime.rows.ops import Chain
from onecopy.runtime.rows.plan import RoundRows, Strip

Array = mx.array
Cache = RowCache | IndexedCache

OUTPUT = "out"
"""The tensor `[1, rows, width]` of a layer whose output is kept, because another layer reads it a row later."""


class HeadRows:
    """Caches over the layers from number `first` on."""

    def __init__(self, pool: Pool, tile: RowTile, layers: Sequence[LayerLayout], first: int) -> None:
        self._pool, self._tile = pool, tile
        self._lanes = (mx.default_stream(mx.default_device()),)
        self._numbers = range(first, first + len(layers))
        self._kept = [i for i, x in zip(self._numbers, layers, strict=True) if any(t.name == OUTPUT for t in x.rows)]
        self._caches: list[Cache] = [_cache(i, layer) for i, layer in zip(self._numbers, layers, strict=True)]

    @contextmanager
    def over(self, strips: Sequence[Strip], together: bool = False) -> Iterator[list[Cache]]:
        """The caches as they are while these strips of one length are computed as `[strips, length]`.

        together: every row sees all rows of its strip, not only those before it.
        """
        now = RoundRows(strips, self._pool, self._tile, self._lanes, together)
        positions = now.positions()
        for cache in self._caches:
            cache.round, cache.positions = now, positions
            cache.offset = positions if len(strips[0].tokens) == 1 else now.starts()
        try:
            yield self._caches
        finally:
            for cache in self._caches:
                cache.round = None

    def before(self, strips: Sequence[Strip]) -> list[Array]:
        """Per layer whose output is kept, that of the row before each strip: `[strips, 1, width]`, 0 before row 0.

        Evaluated copies: a view of a buffer would keep it from being written in place.
        """
        found = [mx.stack([self._output(i, s.chain, s.position - 1) for s in strips]) for i in self._kept]
        mx.eval(found)
        return found

    def _output(self, number: int, chain: Chain, row: int) -> Array:
        for link in chain.links:
            if link.start <= row < link.stop:
                segment = self._pool.segments[link.segment]
                return mx.take(segment.layers[number].arrays[OUTPUT], mx.array([row - segment.start]), axis=1)[0]
        kept = self._pool.segments[chain.leaf].layers[number].arrays[OUTPUT]
        return mx.zeros((1, kept.shape[2]), kept.dtype)

    def keep(self, layer: int, outputs: Array) -> None:
        """Writes outputs `[strips, length, width]` of one of these layers into the leaves of the strips under way."""
        now = self._caches[layer].round
        assert now is not None
        for w, rows in zip(now.writes, outputs, strict=True):
            self._pool.segments[w.segment].layers[self._numbers[layer]].write(OUTPUT, w.at, rows[None])

    def settle(self, strips: Iterable[Strip], *outputs: mx.array) -> None:
        """Evaluates outputs and these layers' buffers in the strips' leaves."""
        leaves = {s.chain.leaf for s in strips}
        buffers = [a for leaf in leaves for i in self._numbers for a in self._pool.segments[leaf].layers[i].flat()]
        mx.eval(*outputs, *buffers)


def _cache(i: int, layer: LayerLayout) -> Cache:
    return IndexedCache(i, layer.ratio) if layer.kind == "qsa" else RowCache(i, layer.window)


def onward(strip: Strip, position: int, tokens: tuple[int, ...]) -> Strip:
    """Tokens of the same conversation from a later position on, in the same leaf."""
    *before, leaf = strip.chain.links
    return Strip(Chain((*before, replace(leaf, stop=position)), strip.chain.capacity_end), position, tokens)


def room(strip: Strip, position: int) -> int:
    """Rows that the strip's leaf has from `position` on."""
    return strip.chain.capacity_end - position
