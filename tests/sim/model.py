"""A model whose next token is a hash of every row it can see, and the same answers computed by one request alone.

Two layers. A row of the first depends on its token and position; a row of the second on all first-layer rows up to it,
as a transformer's does; the answer on all rows of both. So one wrong, stale or foreign row changes the answer, and so
does a right row in a wrong place. In a recurrent model the first layer keeps no rows, but their sum so far as a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.decode.counts import TokenCounts
from onecopy.runtime.rows.layout import LayerLayout, Layout, RowTensor
from onecopy.runtime.turn import Sampling

Words = NDArray[np.uint64]

VOCAB = 61
STARTS = 7
"""The token that messages start with, where that matters."""
EOS = 0
CONTEXT = 8192
RATIO = 8
WINDOW = 100

_MASK = (1 << 64) - 1
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LAYER, _STATE, _SEED, _COUNT = (0x9E3779B97F4A7C15 * k & _MASK for k in (1, 3, 5, 7))


def scramble(x: int) -> int:
    """Mixes 64 bits (the finaliser of splitmix64)."""
    x ^= x >> 30
    x = x * _A & _MASK
    x ^= x >> 27
    x = x * _B & _MASK
    return x ^ (x >> 31)


def scrambled(x: Words) -> Words:
    """`scramble` of every element, in a new array."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(_A)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_B)
    x ^= x >> np.uint64(31)
    return x


WEIGHTS: Words = scrambled(np.arange(1, CONTEXT + 1, dtype=np.uint64)) | np.uint64(1)
"""What the row at each position counts for in a sum over rows: a row out of its place changes the sum."""
_WEIGHTS: list[int] = WEIGHTS.tolist()
_TOKENS: Words = scrambled(np.arange(1, VOCAB + 1, dtype=np.uint64) * np.uint64(_SEED))

ATTENTION = Layout((LayerLayout("attention", (RowTensor("k", 1, 1, 8),)),) * 2)
QSA = Layout(
    (
        LayerLayout("attention", (RowTensor("k", 1, 1, 8),)),
        LayerLayout("qsa", (RowTensor("k", 1, 1, 8),), (RowTensor("pooled", 1, 1, 8),), RATIO),
    )
)
SLIDING = Layout(
    (
        LayerLayout("attention", (RowTensor("k", 1, 1, 8),)),
        LayerLayout("window", (RowTensor("k", 1, 1, 8),), window=WINDOW),
    )
)
RECURRENT = Layout(
    (LayerLayout("recurrent", anchor_bytes=16), LayerLayout("attention", (RowTensor("k", 1, 1, 8),))),
)
"""Its state: the sum over the first layer's rows so far, and how many they are."""

LAYOUTS = {"attention": ATTENTION, "qsa": QSA, "sliding": SLIDING, "recurrent": RECURRENT}


def first_rows(tokens: Sequence[int], start: int, weights: int = 0) -> Words:
    """First-layer rows of tokens at positions `start`, `start + 1`, … by a model with these weights."""
    n = len(tokens)
    return scrambled(_TOKENS[np.asarray(tokens, np.int64)] + WEIGHTS[start : start + n] + np.uint64(weights))


def second_rows(first: Words, before: int, start: int) -> tuple[Words, Words]:
    """Second-layer rows of first-layer rows at `start`, …; and the running sums that they were made from."""
    sums = np.cumsum(first * WEIGHTS[start : start + len(first)], dtype=np.uint64) + np.uint64(before)
    return scrambled(sums ^ np.uint64(_LAYER)), sums


def weighed(rows: Words, start: int) -> int:
    """The sum that rows at positions `start`, … add to what a later row sees."""
    return int(np.dot(rows, WEIGHTS[start : start + len(rows)]))


def pooled(rows: Words, start: int) -> Words:
    """One entry for each `RATIO` rows; `start` and the number of rows are multiples of it."""
    return scrambled((rows * WEIGHTS[start : start + len(rows)]).reshape(-1, RATIO).sum(axis=1, dtype=np.uint64))


def pick(first: int, second: int, sampling: Sampling, position: int, counted: int = 0) -> int:
    """The token for `position`, from the sums over both layers' visible rows."""
    state = scramble((first + 3 * second + _STATE + counted) & _MASK)
    if sampling.temperature:
        state = scramble(state ^ (sampling.seed & _MASK) ^ (position * _SEED & _MASK))
    return state % VOCAB


def counted(ids: Sequence[int], replies: Sequence[int]) -> int:
    """A number for a set of token counts, whatever their order."""
    return sum(scramble((i * _COUNT + n + 1) & _MASK) for i, n in zip(ids, replies, strict=True)) & _MASK


class Alone:
    """One request on rows of its own: the reference. Rows live in plain arrays, without segments, chains or rounds."""

    def __init__(self, kind: str, tokens: Sequence[int], weights: int) -> None:
        self._kind = kind
        self._weights = weights
        first = first_rows(tokens, 0, weights)
        second, sums = second_rows(first, 0, 0)
        self.length = len(tokens)
        self.first = int(sums[-1])
        self._second: list[int] = second.tolist()

    def seen(self) -> int:
        """The sum over the second layer's visible rows."""
        rows, n = self._second, self.length
        if self._kind == "sliding":
            low = max(0, n - WINDOW)
            return _sum(rows, low, n)
        if self._kind == "qsa":
            whole = n // RATIO * RATIO
            groups = np.array(rows[:whole], np.uint64)
            return (int(pooled(groups, 0).sum(dtype=np.uint64)) + _sum(rows, whole, n)) & _MASK
        return _sum(rows, 0, n)

    def push(self, token: int) -> None:
        """The row of one more token."""
        at = self.length
        row = scramble((int(_TOKENS[token]) + _WEIGHTS[at] + self._weights) & _MASK)
        self.first = (self.first + row * _WEIGHTS[at]) & _MASK
        self._second.append(scramble(self.first ^ _LAYER))
        self.length += 1


def _sum(rows: list[int], low: int, high: int) -> int:
    if high - low > 64:
        return weighed(np.array(rows[low:high], np.uint64), low)
    return sum(rows[i] * _WEIGHTS[i] for i in range(low, high)) & _MASK


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request alone delivers, and why it ends."""

    tokens: tuple[int, ...]
    reason: str


@lru_cache(maxsize=4096)
def alone(
    kind: str, tokens: tuple[int, ...], max_new: int, sampling: Sampling, ignore_eos: bool, weights: int = 0
) -> Answer:
    """The whole reply to `tokens`, computed by itself."""
    rows = Alone(kind, tokens, weights)
    counts = TokenCounts.wanted(sampling, tokens)
    out: list[int] = []
    while True:
        token = pick(rows.first, rows.seen(), sampling, rows.length, counts_of(counts))
        out.append(token)
        if token == EOS and not ignore_eos:
            return Answer(tuple(out), "stop")
        if len(out) >= max_new:
            return Answer(tuple(out), "length")
        if counts is not None:
            counts.push(token)
        rows.push(token)


def counts_of(counts: Any) -> int:
    """`counted` of a `TokenCounts`, of a `Seen`, or 0 for None."""
    if counts is None:
        return 0
    seen = counts.seen() if isinstance(counts, TokenCounts) else counts
    return counted(seen.ids.tolist(), seen.replies.tolist())
