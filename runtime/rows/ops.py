"""What the bank orders the device to do with buffers. Orders run in the order they are given, before later rounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocate:
    """New zeroed buffers for rows `[start, start + capacity)`; both multiples of a block."""

    segment: int
    start: int
    capacity: int


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Rows `[start, stop)` (absolute positions) of one segment written into another that has room for them."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ResizeLayer:
    """One layer of a segment moves to buffers of `capacity` rows; the rows below `keep` are kept bit for bit."""

    segment: int
    layer: int
    capacity: int
    keep: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The buffers and the state of a segment go back to the allocator."""

    segment: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Freed buffers that the allocator still pools go back to the system."""


@dataclass(frozen=True, slots=True)
class SaveAnchor:
    """A segment's recurrent state, which is the one at its frontier, is kept under an anchor's id. Copies nothing."""

    segment: int
    anchor: int


@dataclass(frozen=True, slots=True)
class LoadAnchor:
    """A segment's recurrent state becomes the anchor's: also how a fork or a new leaf comes by its state."""

    anchor: int
    segment: int


@dataclass(frozen=True, slots=True)
class DropAnchor:
    """An anchor's state goes back to the allocator once no segment has it."""

    anchor: int


RowOp = Allocate | CopyRows | ResizeLayer | Drop | Trim | SaveAnchor | LoadAnchor | DropAnchor


@dataclass(frozen=True, slots=True)
class Link:
    """One segment of a chain and the rows read from it: absolute positions `[start, stop)`."""

    segment: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A conversation's rows from root to leaf. The last link's segment is the leaf, the only one written to.

    `capacity_end` is the absolute position the leaf's buffers end at.
    """

    links: tuple[Link, ...]
    capacity_end: int

    @property
    def leaf(self) -> int:
        return self.links[-1].segment

    @property
    def frontier(self) -> int:
        return self.links[-1].stop
