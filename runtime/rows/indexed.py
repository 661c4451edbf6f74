"""A QSA layer's view of a round: keys, values and raw index keys per row, pooled index keys per `ratio` rows.

One object per layer speaks for all conversations of a round. Rows are written into leaves and read where they lie,
through each conversation's chain; only rows that a query selected are copied. Which pooled keys are valid is derived
from positions at every reading. Device thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .buffers import LayerBuffers, put
from .layout import BLOCK, round_up
from .plan import RoundRows

Array = Any

KEYS, VALUES, RAW, POOLED = "k", "v", "i", "p"
"""Names of the tensors: `[kv heads, rows, width]` twice, `[1, rows, index width]`, `[1, entries, index width]`."""


class IndexedCache:
    """What a QSA layer writes to and reads from in a round. offset, positions: as other caches have them."""

    def __init__(self, layer: int, ratio: int) -> None:
        self.layer = layer
        self.ratio = ratio
        self.round: RoundRows | None = None
        self.offset: Array = 0
        self.positions: Array = 0

    @property
    def _now(self) -> RoundRows:
        if self.round is None:
            raise AssertionError("a row cache is used outside a round")
        return self.round

    @property
    def starts(self) -> Sequence[int]:
        """Each conversation's frontier before the round."""
        return [s.position for s in self._now.strips]

    def write(self, keys: Array, values: Array, raw: Array) -> None:
        """Writes new rows into the leaves: `[batch, kv heads, length, width]`, raw keys `[batch, length, width]`."""
        for b, w in enumerate(self._now.writes):
            into = self._buffers(w.segment)
            into.write(KEYS, w.at, keys[b])
            into.write(VALUES, w.at, values[b])
            into.write(RAW, w.at, raw[b : b + 1])

    def raw(self, conversation: int, start: int, stop: int) -> Array:
        """Raw index keys of rows `[start, stop)`, `[rows, width]`; a copy only where they lie in two segments."""
        spans = self._spans(conversation, start, stop)
        return _joined([self._buffers(segment).arrays[RAW][0, a:b] for segment, a, b in spans])

    def write_pooled(self, conversation: int, first: int, pooled: Array) -> None:
        """Writes pooled keys `[n, width]` from entry `first` on, which the round's rows just completed."""
        leaf = self._now.strips[conversation].chain.leaf
        put(self._buffers(leaf).pooled[POOLED], first - self._first(leaf), pooled[None])

    def pooled(self, conversation: int, blocks: int) -> Sequence[Array]:
        """Pooled keys of the first `blocks` entries and perhaps some more, in pieces `[n, width]`, read in place.

        Where a ratio does not divide a block of rows, entries do not fill tiles: then they are joined, as a copy.
        """
        whole = BLOCK % self.ratio == 0
        wanted = round_up(blocks, BLOCK // self.ratio) if whole else blocks
        pieces = []
        for segment, start, end in self._links(conversation):
            first = self._first(segment)
            a, b = start // self.ratio, min(end // self.ratio, wanted)
            if a < b:
                pieces.append(self._buffers(segment).pooled[POOLED][0, a - first : b - first])
        return pieces if whole else [_joined(pieces)]

    def prefix(self, conversation: int, rows: int) -> Sequence[tuple[Array, Array]]:
        """Keys and values of the first `rows` rows up to a whole block, in pieces `[kv heads, n, width]`, in place."""
        spans = list(self._spans(conversation, 0, round_up(rows)))
        arrays = [self._buffers(segment).arrays for segment, _, _ in spans]
        return [(x[KEYS][:, a:b], x[VALUES][:, a:b]) for x, (_, a, b) in zip(arrays, spans, strict=True)]

    def gather(self, conversation: int, positions: Array) -> tuple[Array, Array]:
        """Copies of keys and values at `positions [n]`, each `[kv heads, n, width]`."""
        links = list(self._links(conversation))
        if len(links) == 1:
            segment, start, _ = links[0]
            return self._take(segment, positions - start if start else positions)
        return self._gather_over(links, np.array(positions))

    def _gather_over(self, links: Sequence[tuple[int, int, int]], positions: Any) -> tuple[Array, Array]:
        """Takes from each segment what lies in it, then puts rows into the order asked for."""
        order, taken = [], []
        for segment, start, end in links:
            here = np.flatnonzero((positions >= start) & (positions < end))
            if here.size:
                order.append(here)
                taken.append(self._take(segment, mx.array(positions[here] - start)))
        keys, values = (_joined(list(parts), axis=1) for parts in zip(*taken, strict=True))
        places = np.concatenate(order)
        if (places[:-1] < places[1:]).all():
            return keys, values
        back = mx.array(np.argsort(places).astype(np.int32))
        return mx.take(keys, back, axis=1), mx.take(values, back, axis=1)

    def _take(self, segment: int, at: Array) -> tuple[Array, Array]:
        arrays = self._buffers(segment).arrays
        return mx.take(arrays[KEYS], at, axis=1), mx.take(arrays[VALUES], at, axis=1)

    def _spans(self, conversation: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(segment, first, last) of buffer rows that hold rows `[start, stop)`, as far as there are buffers."""
        for segment, first, end in self._links(conversation):
            a, b = max(start, first), min(stop, end)
            if a < b:
                yield segment, a - first, b - first

    def _links(self, conversation: int) -> Iterator[tuple[int, int, int]]:
        """(segment, start, end) of a chain: ancestors up to where their child begins, the leaf with all its room."""
        chain = self._now.strips[conversation].chain
        for link in chain.links:
            end = chain.capacity_end if link.segment == chain.leaf else link.stop
            if link.start < end:
                yield link.segment, link.start, end

    def _first(self, segment: int) -> int:
        """The number of a segment's first pooled entry."""
        return self._now.pool.segments[segment].start // self.ratio

    def _buffers(self, segment: int) -> LayerBuffers:
        return self._now.pool.segments[segment].layers[self.layer]


def _joined(parts: list[Array], axis: int = 0) -> Array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)
