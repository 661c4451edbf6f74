"""Products of few rows and large weights: in pieces that a BLAS takes as they lie, on all cores at once.

Such a product is as fast as its weights come from memory. A large one copies them together first, and runs on one core
where it has few rows; pieces of it do neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.blas.gemm import SMALL, Batch, Group, address

Host = NDArray[Any]

FEW = 32
"""Rows up to which a product is computed in such pieces, and what lies between products by NumPy: with more, computing
takes longer than reading the weights or than starting operations."""

WIDTHS = (256, 128, 64)
"""Columns of a piece, most first: fewer than the last are not worth a call."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One number of rows: the call, its addresses less those of the input, and where the pieces' results lie."""

    batch: Batch
    inputs: NDArray[np.int64]
    weights: NDArray[np.int64]
    results: NDArray[np.int64]
    parts: Host


class Few:
    """`x @ w` for weights `w [inputs, outputs]`, float32 in rows, which must stay where they are.

    runs: the inputs in pieces `(inputs, how many)`, whose products are added in order. Device thread only.
    """

    def __init__(self, weights: Host, runs: Sequence[tuple[int, int]]) -> None:
        self._weights = weights
        self._runs = tuple(runs)
        self._plans: dict[int, _Plan] = {}

    def __call__(self, x: Host) -> Host:
        """`x [rows, inputs]` to a new array `[rows, outputs]`, for at most `FEW` rows."""
        x = np.ascontiguousarray(x)
        plan = self._plans.get(len(x)) or self._planned(len(x))
        plan.batch(plan.inputs + address(x), plan.weights, plan.results)
        out: Host = plan.parts[0].copy() if len(plan.parts) == 1 else np.add.reduce(plan.parts, axis=0)
        return out

    def _planned(self, rows: int) -> _Plan:
        inputs, outputs = self._weights.shape
        groups, a, b, c = [], [], [], []
        pieces = [depth for depth, count in self._runs for _ in range(count)]
        starts = [0, *itertools.accumulate(pieces)]
        parts = np.empty((len(pieces), rows, outputs), np.float32)
        columns = cut(outputs, rows * max(pieces))
        for part, (at, depth) in enumerate(zip(starts, pieces, strict=False)):
            for first, width, count in columns:
                groups.append(Group(count, rows, width, depth, inputs, outputs, outputs))
                where = first + width * np.arange(count)
                a.append(np.full(count, at))
                b.append(at * outputs + where)
                c.append(part * rows * outputs + where)
        plan = _Plan(
            Batch(groups),
            _bytes(a),
            _bytes(b) + address(self._weights),
            _bytes(c) + address(parts),
            parts,
        )
        self._plans[rows] = plan
        return plan


@cache
def cut(outputs: int, each: int) -> tuple[tuple[int, int, int], ...]:
    """Columns `(first, width, how many)` of pieces small enough, when a column takes `each` multiplications."""
    width = next((w for w in WIDTHS if w * each <= SMALL), WIDTHS[-1])
    whole = outputs // width
    rest = outputs - whole * width
    return tuple(x for x in ((0, width, whole), (whole * width, rest, 1)) if x[1] and x[2])


def _bytes(elements: Sequence[Any]) -> NDArray[np.int64]:
    return np.concatenate(elements).astype(np.int64) * 4
