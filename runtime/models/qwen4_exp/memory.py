"""The plain keeper: conversations whose rows live in ordinary growing buffers, and rounds over several of them.

It shows what the protocols of `cache.py` mean. A server keeps rows elsewhere; tests, benchmarks and offline use
need no more than this. Growing copies a buffer; everything else is written and read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .cache import LayerRows, StateSpec, Trail
from .config import INDEXED, Config

_GROW = 1024


@dataclass(slots=True)
class Buffers:
    """One indexed layer of one conversation. keys, values [kv, cap, Dh]; raw [cap, Di]; pooled [cap // ratio, Di]."""

    keys: mx.array
    values: mx.array
    raw: mx.array
    pooled: mx.array

    @classmethod
    def empty(cls, config: Config) -> Buffers:
        heads = mx.zeros((config.kv_heads, 0, config.head_dim))
        flat = mx.zeros((0, config.index_dim))
        return cls(heads, heads, flat, flat)

    def shared(self) -> Buffers:
        """Handles of its own on the same memory; whoever writes first copies."""
        return Buffers(self.keys[:], self.values[:], self.raw[:], self.pooled[:])

    def reserve(self, rows: int, config: Config) -> None:
        """Grows every buffer so that `rows` rows and their blocks fit, by whole tiles."""
        have = self.raw.shape[0]
        if rows <= have:
            return
        step = _GROW * config.ratio
        cap = -(-max(rows, have * 3 // 2) // step) * step
        self.keys, self.values = _grown(self.keys, cap, 1), _grown(self.values, cap, 1)
        self.raw, self.pooled = _grown(self.raw, cap, 0), _grown(self.pooled, cap // config.ratio, 0)


def _grown(old: mx.array, size: int, axis: int) -> mx.array:
    shape = list(old.shape)
    shape[axis] = size - shape[axis]
    return mx.concatenate([old, mx.zeros(shape, old.dtype)], axis=axis)


class Conversation:
    """Rows and states of one conversation, for every layer; `length` is its frontier."""

    def __init__(self, config: Config, specs: Sequence[tuple[StateSpec, ...]], kinds: Sequence[str]) -> None:
        self.config, self.length, self.kinds = config, 0, tuple(kinds)
        self.rows = [Buffers.empty(config) if kind == INDEXED else None for kind in kinds]
        self.states = [{s.name: mx.full(s.shape, s.fill, s.dtype) for s in layer} for layer in specs]

    def rewind(self, length: int, states: Sequence[dict[str, mx.array]]) -> None:
        """Back to an earlier length, with the states taken there: rows need nothing, pooled keys are derived."""
        self.length, self.states = length, [dict(layer) for layer in states]

    def anchor(self) -> list[dict[str, mx.array]]:
        """A copy of the states at the current length."""
        return [dict(layer) for layer in self.states]

    def fork(self) -> Conversation:
        """A conversation with the same past; its buffers are copied by the first write."""
        child = Conversation(self.config, [() for _ in self.kinds], self.kinds)
        child.rows = [b.shared() if b else None for b in self.rows]
        child.rewind(self.length, self.states)
        return child

    def arrays(self) -> list[mx.array]:
        """Everything kept, to evaluate after a round."""
        rows = [a for b in self.rows if b for a in (b.keys, b.values, b.raw, b.pooled)]
        return rows + [a for layer in self.states for a in layer.values()]


@dataclass(slots=True)
class MemoryIndexed:
    """`IndexedRows` over plain buffers."""

    buffers: list[Buffers]
    starts: list[int]
    config: Config

    def write(self, keys: mx.array, values: mx.array, raw: mx.array) -> None:
        for b, (kept, start) in enumerate(zip(self.buffers, self.starts, strict=True)):
            stop = start + raw.shape[1]
            kept.reserve(stop, self.config)
            kept.keys[:, start:stop] = keys[b]
            kept.values[:, start:stop] = values[b]
            kept.raw[start:stop] = raw[b]

    def raw(self, conversation: int, start: int, stop: int) -> mx.array:
        return self.buffers[conversation].raw[start:stop]

    def write_pooled(self, conversation: int, first: int, pooled: mx.array) -> None:
        self.buffers[conversation].pooled[first : first + pooled.shape[0]] = pooled

    def pooled(self, conversation: int, blocks: int) -> list[mx.array]:
        return [_head(self.buffers[conversation].pooled, blocks, self.config.pool_tile, 0)]

    def prefix(self, conversation: int, rows: int) -> list[tuple[mx.array, mx.array]]:
        kept, tile = self.buffers[conversation], self.config.tile
        return [(_head(kept.keys, rows, tile, 1), _head(kept.values, rows, tile, 1))]

    def gather(self, conversation: int, positions: mx.array) -> tuple[mx.array, mx.array]:
        kept = self.buffers[conversation]
        return mx.take(kept.keys, positions, axis=1), mx.take(kept.values, positions, axis=1)


def _head(buffer: mx.array, count: int, tile: int, axis: int) -> mx.array:
    """The first `count` rows of a buffer, rounded up to whole tiles where the buffer reaches that far."""
    stop = -(-count // tile) * tile
    return buffer[:stop] if axis == 0 else buffer[:, :stop]


@dataclass(slots=True)
class MemoryRecurrent:
    """`RecurrentRows` over the states of several conversations; trails wait for the commit."""

    states: list[dict[str, mx.array]]
    trail: bool
    trails: dict[str, Trail] = field(default_factory=dict)

    def get(self, name: str) -> mx.array:
        return mx.stack([state[name] for state in self.states])

    def put(self, name: str, trail: Trail) -> None:
        self.trails[name] = trail

    def commit(self, kept: Sequence[int]) -> None:
        for b, count in enumerate(kept):
            for name, trail in self.trails.items():
                self.states[b][name] = trail.after(b, count)


class Round:
    """One forward over several conversations: hand `layers` to the model, then commit what stays."""

    def __init__(self, conversations: Sequence[Conversation], *, trail: bool = False) -> None:
        self.conversations = list(conversations)
        self.layers: list[LayerRows] = [self._layer(i, trail) for i in range(len(conversations[0].kinds))]

    def _layer(self, i: int, trail: bool) -> LayerRows:
        first = self.conversations[0]
        if first.kinds[i] == INDEXED:
            buffers = [b for c in self.conversations if (b := c.rows[i]) is not None]
            return MemoryIndexed(buffers, [c.length for c in self.conversations], first.config)
        return MemoryRecurrent([c.states[i] for c in self.conversations], trail)

    def commit(self, kept: Sequence[int]) -> None:
        """Moves each frontier by `kept` rows (the forward's width unless drafts were rejected) and evaluates."""
        for layer in self.layers:
            if isinstance(layer, MemoryRecurrent):
                layer.commit(kept)
        for conversation, count in zip(self.conversations, kept, strict=True):
            conversation.length += count
        mx.eval([c.arrays() for c in self.conversations])
