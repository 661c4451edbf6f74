"""What a change of memory costs before it is made. Pure arithmetic on layouts: no MLX, no trio, no state.

A `Way` is a change that admission may choose. `bill` is the most memory it needs beyond what is held now, at its worst
moment; `gain` is what it holds more afterwards. Both count what the allocator hands out, which may be more than was
asked for. `None` means that this way is impossible and the next one is to be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .layout import BLOCK, LayerLayout, Layout, round_up

Rounding = Callable[[int], int]
"""Bytes asked for to bytes handed out, for one buffer."""

PAGE = 16384
"""Bytes of a page where the allocator rounds to pages."""

FILL = 8
"""Bytes of the scalar beside a buffer in the making: what it is filled with."""


def exact(nbytes: int) -> int:
    """The CPU's rule: what was asked for."""
    return nbytes


def pages(nbytes: int) -> int:
    """Metal's rule: above a page, whole pages."""
    return nbytes if nbytes <= PAGE else round_up(nbytes, PAGE)


def classes(nbytes: int) -> int:
    """CUDA's rule: powers of two below a page, eight bytes at least, whole pages above."""
    if nbytes >= PAGE:
        return round_up(nbytes, PAGE)
    return max(8, 1 << (nbytes - 1).bit_length()) if nbytes else 0


ROUNDING: Mapping[str, Rounding] = {"cpu": exact, "metal": pages, "cuda": classes}
"""The rule by backend. Source: mlx/backend/*/allocator.cpp of MLX."""


def reuse_waste(nbytes: int, page: int = PAGE) -> int:
    """Bytes at most by which a buffer taken from the allocator's cache is larger than asked for.

    A cached buffer serves again when it is below twice the size and below two pages more. Those bytes were in the
    process before, so bills leave them out; a trimmed cache has none. Source: MLX's buffer cache.
    """
    return max(0, min(nbytes, 2 * page))


# --- layers


def layer_bytes(layer: LayerLayout, capacity: int, frontier: int, held: int) -> int | None:
    """Bytes of one layer's new buffers at `capacity` rows; None when written or held rows would be cut.

    All three are rows of one segment, counted from its start. A pooled length is derived from the frontier, so no
    claim about pooled entries can make a resize impossible.
    """
    return None if capacity < max(frontier, held) else layer.capacity_bytes(capacity)


def clamp_pooled(claim: int, frontier: int, ratio: int) -> int:
    """The pooled entries of a foreign state that are kept: no more than its frontier has complete groups."""
    return max(0, min(claim, frontier // ratio))


def layer_buffers(layer: LayerLayout, rows: int) -> list[int]:
    """Bytes of each of a layer's buffers in the order they are made, before rounding. The fixed-size state is last."""
    pooled = [t.row_bytes * layer.entries(rows) for t in layer.pooled]
    state = [layer.anchor_bytes] if layer.anchor_bytes else []
    return [*(t.row_bytes * rows for t in layer.rows), *pooled, *state]


def segment_bytes(layout: Layout, rows: int, rounding: Rounding = exact) -> int:
    """Bytes a segment of that many rows holds."""
    return sum(rounding(n) for layer in layout.layers for n in layer_buffers(layer, rows))


def fill_bytes(layout: Layout) -> int:
    """Bytes of the fill values while all buffers of a segment are made at once."""
    return FILL * sum(len(layer_buffers(layer, BLOCK)) for layer in layout.layers)


# --- ways


@dataclass(frozen=True, slots=True)
class Allocate:
    """A new segment of `rows` rows."""

    rows: int


@dataclass(frozen=True, slots=True)
class Copy:
    """`frontier` rows of a segment into a whole new one of `rows`, with the old one kept: a cold, padded copy."""

    frontier: int
    rows: int


@dataclass(frozen=True, slots=True)
class Fork:
    """A leaf of `rows` rows that copies the `tail` rows of a partial block and shares what lies before."""

    tail: int
    rows: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Segments that hold `have` rows of capacity copied into one of `rows`; then they go, if nobody else reads them."""

    have: tuple[int, ...]
    written: int
    rows: int


@dataclass(frozen=True, slots=True)
class Resize:
    """A segment's buffers from `have` to `rows`, one layer at a time. frontier, held: rows from its start."""

    have: int
    rows: int
    frontier: int
    held: int = 0


Way = Allocate | Copy | Fork | Merge | Resize


def bill(layout: Layout, way: Way, rounding: Rounding = exact) -> int | None:
    """Bytes that must be available for `way`: its peak beyond what is held before. None: impossible this way."""
    priced: int | None = _BILLS[type(way)](layout, way, rounding)
    return priced


def gain(layout: Layout, way: Way, rounding: Rounding = exact) -> int:
    """Bytes held more once `way` is done; negative when memory comes back."""
    after = segment_bytes(layout, way.rows, rounding)
    if isinstance(way, Resize):
        return after - segment_bytes(layout, way.have, rounding)
    if isinstance(way, Merge):
        return after - sum(segment_bytes(layout, rows, rounding) for rows in way.have)
    return after


def peak(layout: Layout, way: Resize, rounding: Rounding = exact) -> int:
    """The most a resize holds beyond the old buffers: what was gained so far and the buffer being made.

    Within a layer each buffer moves on its own, so this is never more than gained plus one layer's new buffers.
    """
    gained, most = 0, 0
    for old, new in _moves(layout, way):
        most = max(most, gained + rounding(new) + FILL)
        gained += rounding(new) - rounding(old)
    return most


def _moves(layout: Layout, way: Resize) -> Iterator[tuple[int, int]]:
    for layer in layout.layers:
        buffers = len(layer.rows) + len(layer.pooled)  # a fixed-size state stays where it is
        yield from zip(layer_buffers(layer, way.have)[:buffers], layer_buffers(layer, way.rows)[:buffers], strict=True)


def _new_segment(layout: Layout, way: Allocate, rounding: Rounding) -> int:
    return segment_bytes(layout, way.rows, rounding) + fill_bytes(layout)


def _copy(layout: Layout, way: Copy, rounding: Rounding) -> int | None:
    return None if way.frontier > way.rows else _new_segment(layout, Allocate(way.rows), rounding)


def _fork(layout: Layout, way: Fork, rounding: Rounding) -> int | None:
    return _copy(layout, Copy(way.tail, way.rows), rounding)


def _merge(layout: Layout, way: Merge, rounding: Rounding) -> int | None:
    return _copy(layout, Copy(way.written, way.rows), rounding)


def _resize(layout: Layout, way: Resize, rounding: Rounding) -> int | None:
    if any(layer_bytes(layer, way.rows, way.frontier, way.held) is None for layer in layout.layers):
        return None
    return peak(layout, way, rounding)


_BILLS: Mapping[type, Callable[[Layout, Any, Rounding], int | None]] = {
    Allocate: _new_segment,
    Copy: _copy,
    Fork: _fork,
    Merge: _merge,
    Resize: _resize,
}


# --- sizes


def adoptable(held: int, planned: int, bucket: int) -> bool:
    """Whether buffers of `held` rows serve a plan of `planned`: as large or one bucket more, both whole buckets."""
    aligned = held % bucket == 0 == planned % bucket
    return aligned and 0 <= held - planned <= bucket


def conversation_bytes(layout: Layout, length: int, rounding: Rounding = exact) -> int:
    """Bytes of a conversation of `length` rows on its own."""
    return segment_bytes(layout, round_up(max(1, length)), rounding)


def conversations_that_fit(layout: Layout, length: int, budget: int, rounding: Rounding = exact) -> int:
    """How many conversations of `length` rows fit into `budget` bytes when they share nothing."""
    return max(0, budget) // max(1, conversation_bytes(layout, length, rounding))


def largest_prompt(layout: Layout, nbytes: int, rounding: Rounding = exact) -> int:
    """Tokens of the longest prompt whose rows, with one of its answer, fit into `nbytes` bytes; 0 when none does."""
    per_block = max(1, layout.block_bytes)
    blocks = max(0, nbytes - layout.state_bytes) // per_block
    while blocks and segment_bytes(layout, blocks * BLOCK, rounding) > nbytes:
        blocks -= 1
    return max(0, blocks * BLOCK - 1)
