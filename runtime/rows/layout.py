"""What a model keeps for every row, as sizes. Pure arithmetic: no MLX, no trio.

A `Layout` is derived once from a loaded model and then prices everything: capacity, copies, saves, anchors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK = 256
"""Rows of a block: the quantum of capacity, sharing, disk records and attention tiles."""

Kind = Literal["attention", "window", "qsa", "recurrent"]

ATTENDED: frozenset[Kind] = frozenset({"attention", "window"})
"""Of layers whose rows are attended to as they are kept."""


def blocks_for(rows: int) -> int:
    """Blocks needed for that many rows."""
    return -(-rows // BLOCK)


def round_up(rows: int, quantum: int = BLOCK) -> int:
    """The smallest multiple of `quantum` that is at least `rows`."""
    return -(-rows // quantum) * quantum


@dataclass(frozen=True, slots=True)
class RowTensor:
    """One per-row array of a layer: `[heads, rows, width]` of `itemsize`-byte elements."""

    name: str
    heads: int
    width: int
    itemsize: int = 4

    @property
    def row_bytes(self) -> int:
        return self.heads * self.width * self.itemsize


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer keeps.

    rows: arrays with one entry per token. pooled: arrays with one entry per `ratio` complete tokens (QSA).
    anchor_bytes: fixed-size state that cannot be trimmed (recurrent). window: rows a query can see, None = all.
    bits: of a value of the rows, which are quantized (rows/quantized.py); None = as the model computes them.
    """

    kind: Kind
    rows: tuple[RowTensor, ...] = ()
    pooled: tuple[RowTensor, ...] = ()
    ratio: int = 1
    anchor_bytes: int = 0
    window: int | None = None
    bits: int | None = None

    @property
    def row_bytes(self) -> int:
        return sum(t.row_bytes for t in self.rows)

    def pooled_length(self, frontier: int) -> int:
        """Valid pooled entries at a frontier: derived, never stored."""
        return frontier // self.ratio if self.pooled else 0

    def completed(self, start: int, stop: int) -> tuple[int, int]:
        """Pooled entries `[first, last)`, counted from position 0, whose last row lies in rows `[start, stop)`."""
        return start // self.ratio, stop // self.ratio

    def entries(self, capacity: int) -> int:
        """Pooled entries that buffers for `capacity` rows have room for, wherever the rows begin."""
        return -(-capacity // self.ratio) if self.pooled else 0

    def capacity_bytes(self, capacity: int) -> int:
        """Bytes of buffers that hold `capacity` rows."""
        return self.row_bytes * capacity + sum(t.row_bytes for t in self.pooled) * self.entries(capacity)


@dataclass(frozen=True, slots=True)
class Layout:
    """All layers of a model, in order."""

    layers: tuple[LayerLayout, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes one token leaves over all layers, pooled entries not counted."""
        return sum(layer.row_bytes for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        return self.capacity_bytes(BLOCK)

    @property
    def state_bytes(self) -> int:
        """Bytes of one anchor: the fixed-size state of all recurrent layers."""
        return sum(layer.anchor_bytes for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        """Whether some layer's state cannot be trimmed, so that resume happens at anchors."""
        return self.state_bytes > 0

    def capacity_bytes(self, capacity: int) -> int:
        """Bytes of one segment's buffers at that capacity in rows."""
        return sum(layer.capacity_bytes(capacity) for layer in self.layers)

    def anchor_bytes(self, at: int) -> int:
        """Bytes of an anchor at position `at` with its trailer: the state and the partial block's rows and entries."""
        return self.state_bytes + self.capacity_bytes(at % BLOCK)
