"""Which blocks win: the `count` best scores of a row, ties included.

ReLU scores tie at exactly zero, and then the winner is whatever the selection routine leaves in front. The public
reference runs `torch.topk`, whose CPU routine is the C++ library's `nth_element` (introselect, median of three), so
the host path walks a tied row the same way. Either path is a function of the row's own scores alone.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Blocks = NDArray[np.int64]

# A score's bits stand above any block id in one 64-bit key.
_ABOVE_ID = 1 << 32


def best(scores: mx.array, complete: Blocks, count: int) -> mx.array:
    """Ascending ids of the `count` best of each row's first `complete[i]` blocks: int32 [n, count].

    scores [n, blocks] f32, none negative; complete [n], each at least `count`. On a CPU the scores are read by the
    host, which costs nothing there; elsewhere they stay on the device and ties go to the earlier block.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return mx.array(best_on_host(np.array(scores), complete, count))
    return best_on_device(scores, complete, count)


def best_on_device(scores: mx.array, complete: Blocks, count: int) -> mx.array:
    """`best` without leaving the device: not negative, so bits order like numbers; the id below makes keys differ."""
    ids = mx.arange(scores.shape[1], dtype=mx.int64)
    bits = (scores.astype(mx.float32) + 0.0).view(mx.int32).astype(mx.int64)
    keys = mx.where(ids < mx.array(complete)[:, None], ids - bits * _ABOVE_ID, ids + _ABOVE_ID)
    return mx.sort(mx.argpartition(keys, count - 1, axis=-1)[:, :count].astype(mx.int32), axis=-1)


def best_on_host(scores: Scores, complete: Blocks, count: int) -> NDArray[np.int32]:
    """`best` in NumPy, tied rows decided as the reference decides them."""
    rows = [_row(row[:n], count) for row, n in zip(scores, complete, strict=True)]
    return np.sort(np.stack(rows), axis=1).astype(np.int32)


def _row(scores: Scores, count: int) -> Blocks:
    first: Blocks = np.argpartition(-scores, count - 1)[:count]
    if np.count_nonzero(scores >= scores[first].min()) == count:
        return first
    return np.array(introselect(scores.tolist(), count))


def introselect(scores: list[float], count: int) -> list[int]:
    """Indices of the `count` largest scores, ties as `std::nth_element(begin, begin + count - 1, end, greater)`."""
    items = list(enumerate(scores))
    first, last = 0, len(items)
    while last - first > 3:
        cut = _partition(items, first, last)
        first, last = (cut, last) if cut <= count - 1 else (first, cut)
    items[first:last] = sorted(items[first:last], key=lambda item: -item[1])
    return [index for index, _ in items[:count]]


def _partition(items: list[tuple[int, float]], first: int, last: int) -> int:
    """Moves scores above the pivot to the front and says where the rest begins; the pivot is a median of three."""
    trio = (first + 1, first + (last - first) // 2, last - 1)
    middle = _median(trio, [items[i][1] for i in trio])
    items[first], items[middle] = items[middle], items[first]
    pivot, low, high = items[first][1], first + 1, last
    while True:
        while items[low][1] > pivot:
            low += 1
        high -= 1
        while pivot > items[high][1]:
            high -= 1
        if low >= high:
            return low
        items[low], items[high] = items[high], items[low]
        low += 1


def _median(places: tuple[int, int, int], values: list[float]) -> int:
    """The place of the middle value, comparing in the C++ library's order so that equal values pick alike."""
    (i, j, k), (a, b, c) = places, values
    if a > b:
        return j if b > c else (k if a > c else i)
    return i if a > c else (k if b > c else j)
