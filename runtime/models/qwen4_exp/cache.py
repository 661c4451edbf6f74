"""What a layer needs from whoever keeps its rows: two protocols, one per kind of layer, over a whole batch.

The model never owns rows and never stores a length. One object per layer and forward speaks for all B
conversations of the round; conversation b's new rows sit at positions starts[b] … starts[b] + W - 1.
Pooled keys are derived: block i of `ratio` rows is complete once the frontier reaches (i + 1) · ratio, so the
valid pooled length is always frontier // ratio, whatever the buffers hold beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One fixed-size array of a recurrent layer: its shape per conversation, and the value a fresh one is full of."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    fill: int = 0


class Trail(Protocol):
    """A state after any number of this forward's rows, so that rejected rows can be taken back."""

    def after(self, conversation: int, kept: int) -> mx.array:
        """The state of one conversation once `kept` of its new rows are committed. Shape: the spec's."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """A state that is the last `keep` rows: rows [B, keep + W, …], the old state first."""

    rows: mx.array
    keep: int

    def after(self, conversation: int, kept: int) -> mx.array:
        return self.rows[conversation, kept : kept + self.keep]


@dataclass(frozen=True, slots=True)
class Steps:
    """A state known at chosen row counts: states[n] is [B, …] after n rows. Other counts raise KeyError."""

    states: dict[int, mx.array]

    def after(self, conversation: int, kept: int) -> mx.array:
        return self.states[kept][conversation]


@runtime_checkable
class RecurrentRows(Protocol):
    """A recurrent layer's state. It cannot be trimmed, so it is read before and written after each forward."""

    @property
    def trail(self) -> bool:
        """True when the state after every row is wanted (a verify round); False keeps the last one only."""
        ...

    def get(self, name: str) -> mx.array:
        """The state before the first new row, [B, *spec.shape]; full of spec.fill for a fresh conversation."""
        ...

    def put(self, name: str, trail: Trail) -> None:
        """Takes the state after the new rows; which one is kept is decided when the round commits."""
        ...


@runtime_checkable
class IndexedRows(Protocol):
    """A QSA layer's rows. Writes land past each frontier; rows under a frontier never change."""

    @property
    def starts(self) -> Sequence[int]:
        """Each conversation's frontier before this forward: the position of its first new row."""
        ...

    def write(self, keys: mx.array, values: mx.array, raw: mx.array) -> None:
        """Writes the new rows. keys, values [B, kv_heads, W, head_dim]; raw index keys [B, W, index_dim]."""
        ...

    def raw(self, conversation: int, start: int, stop: int) -> mx.array:
        """Raw index keys of rows start … stop - 1, [stop - start, index_dim]; may include rows just written."""
        ...

    def write_pooled(self, conversation: int, first: int, pooled: mx.array) -> None:
        """Writes the pooled keys [n, index_dim] of blocks first … first + n - 1, which just became complete."""
        ...

    def pooled(self, conversation: int, blocks: int) -> Sequence[mx.array]:
        """Pooled keys of at least the first `blocks` blocks as pieces [n, index_dim], in order, read in place.

        Every piece but the last has a multiple of `Config.pool_tile` keys. Keys past `blocks` are ignored but finite.
        """
        ...

    def prefix(self, conversation: int, rows: int) -> Sequence[tuple[mx.array, mx.array]]:
        """Keys and values of at least the first `rows` rows as pieces [kv_heads, n, head_dim], read in place.

        Every piece but the last has a multiple of `Config.tile` rows. Rows past `rows` are ignored but finite.
        """
        ...

    def gather(self, conversation: int, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values at `positions` [N] (int32, each already written): two [kv_heads, N, head_dim] copies."""
        ...


LayerRows = RecurrentRows | IndexedRows
