"""Compiled rounds: one graph for every round of a short strip over buffers of one fixed size. Device thread only.

A round's graph is what it was a moment ago, but for the position; building it again takes longer than many a device
needs to compute it. Where buffers come in whole buckets, positions are arrays, and `mx.compile` keeps the graph.
On a CPU no graph holds a round: NumPy and OpenBLAS compute in between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from .forward import Forward
from .rows.attention import RowTile
from .rows.buffers import LayerBuffers, Pool
from .rows.fixed import FixedRound, links_read
from .rows.layout import BLOCK, Layout
from .rows.ops import Chain
from .rows.plan import SHORT, Strip

Array = Any
Graph = Callable[..., list[Array]]
Key = tuple[int, tuple[tuple[int, ...], ...], int]
"""Rows, the tiles and sizes of the segments before the leaf, and the leaf's size."""

BUCKET = 4 * BLOCK
"""Rows in multiples of which leaves are wanted: few sizes to compile, and little of a long leaf read in vain."""

GRAPHS = 64
"""Graphs that are kept: five widths of a dozen conversations. The one used longest ago goes first."""


def why_not(layout: Layout, host: bool) -> str | None:
    """Why rounds of such layers are not compiled; None when they can be."""
    if host:
        return "on a CPU, NumPy and OpenBLAS compute parts of a round, which no graph holds"
    kinds = sorted({layer.kind for layer in layout.layers if layer.kind != "attention"})
    return f"{' and '.join(kinds)} layers read other rows each round" if kinds else None


class CompiledRounds:
    """Runs rounds of one strip that `takes` says it takes, as `forward` does. layers: how many are the model's."""

    def __init__(self, forward: Forward, pool: Pool, tile: RowTile, layers: int) -> None:
        self._forward, self._pool, self._tile, self._layers = forward, pool, tile, layers
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()

    def takes(self, strips: Sequence[Strip]) -> bool:
        """Whether a round is one reply's token and its drafts, in a leaf of whole buckets."""
        if len(strips) != 1 or not strips[0].wanted == len(strips[0].tokens) <= SHORT:
            return False
        return self._pool.segments[strips[0].chain.leaf].capacity % BUCKET == 0

    def __call__(self, strip: Strip) -> Array:
        """Lazy logits `[rows, vocab]`; puts the strip's rows into its leaf, lazily too.

        AssertionError when they do not fit: nothing is written then.
        """
        leaf = self._pool.segments[strip.chain.leaf]
        if not leaf.start <= strip.position <= strip.end <= leaf.start + leaf.capacity:
            raise AssertionError(f"rows {strip.position}..{strip.end} do not fit segment {strip.chain.leaf}")
        positions = mx.array(np.arange(strip.position, strip.end, dtype=np.int32))
        at = mx.array([strip.position - leaf.start], mx.int32)
        graph = self._graph(strip)
        # No list of the buffers outlives the call: one that somebody else holds is copied, not written in place.
        made = iter(graph(self._forward.tokens([strip]), positions, at, *self._arrays(strip.chain)))
        logits, shown = next(made), [next(made)] if self._forward.shows else []
        self._forward.show(shown)
        for layer in self.of(leaf.layers):
            for array in layer.arrays.values():
                array[...] = next(made)  # the same object: a save that reads it would keep the memory of another
        return logits

    def _graph(self, strip: Strip) -> Graph:
        key = self._key(strip)
        if key not in self._graphs:
            self._graphs[key] = self._compile(strip)
        self._graphs.move_to_end(key)
        while len(self._graphs) > GRAPHS:
            self._graphs.popitem(last=False)
        return self._graphs[key]

    def _key(self, strip: Strip) -> Key:
        *before, leaf = links_read(strip.chain)
        found = [(link.start - self._pool.segments[link.segment].start, link.stop - link.start) for link in before]
        sizes = [self._pool.segments[link.segment].capacity for link in before]
        read = tuple((*each, size) for each, size in zip(found, sizes, strict=True))
        return len(strip.tokens), read, self._pool.segments[leaf.segment].capacity

    def _compile(self, strip: Strip) -> Graph:
        wanted = mx.arange(strip.wanted)
        mx.eval(wanted)

        def graph(tokens: Array, positions: Array, at: Array, *arrays: Array) -> list[Array]:
            with self._lent(strip.chain, arrays) as leaf:
                now = FixedRound(strip, self._pool, self._tile, positions, at)
                out = self._forward.traced(now, tokens, wanted)
                return [*out, *(array for layer in leaf for array in layer.arrays.values())]

        return mx.compile(graph)

    @contextmanager
    def _lent(self, chain: Chain, arrays: Sequence[Array]) -> Iterator[list[LayerBuffers]]:
        """The layers of a chain's leaf, while all its segments have these arrays in place of their own."""
        layers = [layer for link in links_read(chain) for layer in self.of(self._pool.segments[link.segment].layers)]
        own = [array for layer in layers for array in layer.arrays.values()]
        _exchange(layers, iter(arrays))
        try:
            yield layers[-self._layers :]
        finally:
            _exchange(layers, iter(own))

    def _arrays(self, chain: Chain) -> Iterator[Array]:
        for link in links_read(chain):
            for layer in self.of(self._pool.segments[link.segment].layers):
                yield from layer.arrays.values()

    def of(self, layers: list[LayerBuffers]) -> list[LayerBuffers]:
        """Of a segment's layers the model's own."""
        return layers[: self._layers]

    def forget(self) -> None:
        """Drops all graphs."""
        self._graphs.clear()


def _exchange(layers: Sequence[LayerBuffers], arrays: Iterator[Array]) -> None:
    """Puts arrays, in order, where the layers' own were."""
    for layer in layers:
        for name in layer.arrays:
            layer.arrays[name] = next(arrays)
