"""Attention of short strips where NumPy sees the rows: each layer in two calls of OpenBLAS, with nothing to schedule.

The numbers are those of `attend_sheet`, with the same bits. Rows are read where they lie, by their addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.blas.gemm import Batch, Group, address
from onecopy.runtime.numerics.exponential import seen

from .attention import Group as SheetGroup
from .attention import RowTile, Sheet
from .layout import BLOCK
from .weights import row_sums

Host = NDArray[Any]
Ints = NDArray[Any]

ITEM = 4
"""Bytes of a number."""


@dataclass(frozen=True, slots=True)
class Widths:
    """KV heads of a layer, and the widths of a head's keys and values."""

    heads: int
    keys: int
    values: int


@dataclass(frozen=True, slots=True)
class Kept:
    """One segment's float32 keys and values of one layer: addresses, and the rows that it has room for."""

    keys: int
    values: int
    capacity: int


class HostSheet:
    """A sheet laid out for layers of one shape. Its numbers are written again for each layer. Device thread only.

    capacities: rows that the segments of the sheet's products have room for, in the products' order.
    """

    def __init__(self, sheet: Sheet, tile: RowTile, widths: Widths, capacities: Sequence[int]) -> None:
        self._order = seen(sheet.order)
        self._capacities = tuple(capacities)
        rows = sum(g.owner.size for g in sheet.groups)
        self._mixed = np.zeros((widths.heads, rows + 1, widths.values + 1), np.float32)
        self._nothing = np.full((widths.heads, 1), -math.inf, np.float32)
        self._parts: list[_Part] = []
        scores, mix = _Products(), _Products()
        first = at = 0
        for group in sheet.groups:
            own = self._capacities[first : first + len(group.products)]
            part = _Part(group, widths, self._mixed[:, at : at + group.owner.size])
            jobs = _Jobs(group, widths, np.array(own, np.int64), first)
            jobs.add_scores(scores, tile, part)
            jobs.add_mix(mix, tile, part, self._mixed.shape[1])
            self._parts.append(part)
            first, at = first + len(group.products), at + group.owner.size
        self._scores, self._mix = scores.made(), mix.made()

    def fits(self, kept: Sequence[Kept]) -> bool:
        """Whether a layer's rows lie as this was laid out for."""
        return self._capacities == tuple(k.capacity for k in kept)

    def attend(self, queries: Host, kept: Sequence[Kept], sinks: Host | None) -> Host:
        """`queries [kvh, R, d]`, scaled, to `[kvh, R, dv]`. kept: for each product. sinks: `[kvh, R]` or None."""
        for part in self._parts:
            np.take(queries, part.gather, axis=1, out=part.queries, mode="clip")
        self._scores.run([k.keys for k in kept])
        extra = self._weigh(sinks)
        self._mix.run([k.values for k in kept])
        total = np.take(self._mixed, self._order, axis=1)
        total = total[:, 0] if total.shape[1] == 1 else np.add.reduce(total, axis=1)
        over = total[..., -1:] if extra is None else total[..., -1:] + extra[..., None]
        out: Host = total[..., :-1] / over
        return out

    def _weigh(self, sinks: Host | None) -> Host | None:
        """Scores become weights, and their sums are noted; returns the weights of the sinks."""
        for part in self._parts:
            if part.bias is not None:
                part.scores += part.bias
        by_row = [p.scores.max(axis=-1).reshape(len(self._nothing), -1) for p in self._parts]
        top = np.take(np.concatenate([*by_row, self._nothing], axis=1), self._order, axis=1).max(axis=1)
        if sinks is not None:
            top = np.maximum(top, sinks)
        for part in self._parts:
            part.scores -= np.take(top, part.owner, axis=1)[..., None]
            np.exp(part.scores, out=part.scores)
            part.sums[:] = row_sums(part.scores).reshape(part.sums.shape)
        return None if sinks is None else np.exp(sinks - top)


class _Part:
    """One group's numbers. scores: `[kvh, tiles, kept, n]` of `whole`, whose other rows only fill products up."""

    def __init__(self, group: SheetGroup, widths: Widths, mixed: Host) -> None:
        (count, tall), (tiles, kept), n = group.gather.shape, group.owner.shape, group.products[0].n
        self.gather, self.owner = seen(group.gather).reshape(-1), seen(group.owner)
        self.bias = None if group.bias is None else seen(group.bias)
        self.queries = np.empty((widths.heads, count * tall, widths.keys), np.float32)
        self.whole = np.empty((widths.heads, tiles, tall, n), np.float32)
        self.scores = self.whole[:, :, :kept]
        self.mixed, self.sums = mixed, mixed[..., -1]


class _Jobs:
    """Where the products of a group find and put their numbers: one for each head and tile, tile by tile."""

    def __init__(self, group: SheetGroup, widths: Widths, capacities: Ints, first: int) -> None:
        tiles = [p.last - p.first for p in group.products]
        product = np.repeat(np.arange(len(tiles)), tiles)
        self._widths = widths
        self._kept, self._n = group.owner.shape[1], group.products[0].n
        self._tall = group.gather.shape[1]
        self._head = np.arange(widths.heads)[:, None]
        self._tile = np.arange(len(product))
        self._product, self._products = product, len(tiles)
        self._number = first + product
        self._row = np.concatenate([np.arange(p.first, p.last) for p in group.products]) * BLOCK
        self._row = self._row + self._head * capacities[product]

    def add_scores(self, to: _Products, tile: RowTile, part: _Part) -> None:
        """Queries by keys."""
        width, n = self._widths.keys, self._n
        queries = address(part.queries) + ITEM * width * self._tall * (self._head * self._products + self._product)
        for m, row in _rows(tile.scores.most, self._tall):
            shape = Group(self._row.size, m, n, width, width, width, n, True)
            to.add(shape, queries + ITEM * width * row, self._number, self._row * width, self._scores(part, row))

    def add_mix(self, to: _Products, tile: RowTile, part: _Part, stride: int) -> None:
        """Weights by values. stride: rows of mixed values from one head to the next."""
        width, n = self._widths.values, self._n
        rows = self._head * stride + self._tile * self._kept
        for m, row in _rows(tile.mix.most, self._kept):
            shape = Group(self._row.size, m, width, n, n, width, width + 1)
            result = address(part.mixed) + ITEM * (width + 1) * (rows + row)
            to.add(shape, self._scores(part, row), self._number, self._row * width, result)

    def _scores(self, part: _Part, row: int) -> Ints:
        """Where a row of each product's scores lies."""
        tiles = self._head * len(self._tile) + self._tile
        out: Ints = address(part.whole) + ITEM * self._n * (self._tall * tiles + row)
        return out


@dataclass(frozen=True, slots=True)
class _Call:
    """Products of rows of segments. number: of the product, for each; inside: bytes from where its rows begin."""

    batch: Batch
    first: Ints
    number: Ints
    inside: Ints
    results: Ints

    def run(self, bases: Sequence[int]) -> None:
        """bases: where the rows of each product's segment begin."""
        self.batch(self.first, np.array(bases, np.int64)[self.number] + self.inside, self.results)


class _Products:
    """Products of one kind as they are found, group by group."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._columns: list[tuple[Ints, ...]] = []

    def add(self, group: Group, first: Ints, number: Ints, at: Ints, results: Ints) -> None:
        """at: numbers from where a segment's rows begin. Arrays of one for each head and tile, or that spread to it."""
        self._groups.append(group)
        self._columns.append(
            tuple(np.broadcast_to(x, at.shape).reshape(-1) for x in (first, number, ITEM * at, results))
        )

    def made(self) -> _Call:
        first, number, inside, results = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        return _Call(Batch(self._groups), first, number, inside, results)


def _rows(most: int, rows: int) -> Iterator[tuple[int, int]]:
    """Rows of a product as an arrangement splits them: (how many, the first)."""
    step = most or rows
    for at in range(0, rows, step):
        yield min(step, rows - at), at
