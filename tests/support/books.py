"""A pool of rows made of token ids: carries out a ledger's orders so that a test can read what a chain would read."""

from __future__ import annotations

from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ledger import Ledger
from onecopy.runtime.rows.ops import Allocate, Chain, CopyRows, Drop, ResizeLayer, RowOp
from onecopy.runtime.rows.segments import Lease

SMALL = Layout((LayerLayout("attention", (RowTensor("k", 1, 1), RowTensor("v", 1, 1))),) * 2)
"""Two attention layers of 8 bytes a row each: 16 bytes a row, 4,096 a block."""


class TokenPool:
    """Segments as lists of token ids (None = never written), for a layout of any number of layers."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int | None]] = {}
        self.starts: dict[int, int] = {}

    def apply(self, orders: tuple[RowOp, ...]) -> None:
        for op in orders:
            match op:
                case Allocate(segment, start, capacity):
                    assert segment not in self.rows
                    assert start % BLOCK == 0 == capacity % BLOCK
                    self.rows[segment] = [None] * capacity
                    self.starts[segment] = start
                case CopyRows(source, target, start, stop):
                    moved = self.rows[source][start - self.starts[source] : stop - self.starts[source]]
                    assert len(moved) == stop - start
                    self.rows[target][start - self.starts[target] : stop - self.starts[target]] = moved
                case ResizeLayer(segment, layer, capacity, keep):
                    if layer == 0:
                        kept = self.rows[segment][: keep - self.starts[segment]]
                        self.rows[segment] = kept + [None] * (capacity - len(kept))
                case Drop(segment):
                    del self.rows[segment]
                case _:
                    pass

    def write(self, lease: Lease, position: int, tokens: tuple[int, ...]) -> None:
        while tokens:
            leaf, n = lease.chain(position).leaf, lease.room(position)
            at = position - self.starts[leaf]
            self.rows[leaf][at : at + len(tokens[:n])] = tokens[:n]
            position, tokens = position + n, tokens[n:]

    def read(self, chain: Chain) -> list[int | None]:
        out: list[int | None] = []
        for link in chain.links:
            assert link.start == len(out)
            out += self.rows[link.segment][
                link.start - self.starts[link.segment] : link.stop - self.starts[link.segment]
            ]
        return out


def bytes_held(pool: TokenPool, ledger: Ledger) -> int:
    """Bytes of all buffers in the pool, counted from the buffers themselves."""
    return sum(ledger.layout.capacity_bytes(len(rows)) for rows in pool.rows.values())
