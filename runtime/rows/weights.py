"""From scores to softmax weights and their sums: less the row's maximum, and e to the power of that.

On a CPU NumPy does it in the scores' own memory, many numbers at a time; elsewhere MLX does it, lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.numerics.exponential import on_host, seen

Array = Any

HALF = 128
"""Numbers that NumPy sums in eight running sums. More than these it halves, and where depends on how many there are."""

Tops = Callable[[Any, Sequence[Any], Any], tuple[Sequence[Any], Any]]
"""From NumPy or MLX, the scores and the sinks as its arrays: what to take from each part, and from the sinks."""


@dataclass(frozen=True, slots=True)
class Scores:
    """parts: float32 scores, each the fresh result of an operation and used up here. sinks: logits without a value."""

    parts: Sequence[Array]
    sinks: Array | None
    tops: Tops

    def all(self) -> list[Array]:
        return [*self.parts, *([] if self.sinks is None else [self.sinks])]


@dataclass(frozen=True, slots=True)
class Weights:
    """parts: of each part of the scores. sums: over the keys of a row, with that axis as one. extra: of the sinks."""

    parts: list[Array]
    sums: list[Array]
    extra: Array | None


def weigh(scores: Scores) -> Weights:
    """The weights of each part, and of the sinks where there are some. Evaluates the scores on a CPU."""
    if not on_host():
        tops, top = scores.tops(mx, scores.parts, scores.sinks)
        extra = None if scores.sinks is None else mx.exp(scores.sinks - top)
        weights = [mx.exp(s - t) for s, t in zip(scores.parts, tops, strict=True)]
        return Weights(weights, [w.sum(axis=-1, keepdims=True) for w in weights], extra)
    mx.eval(scores.all())
    parts, sinks = [seen(s) for s in scores.parts], None if scores.sinks is None else seen(scores.sinks)
    tops, top = scores.tops(np, parts, sinks)
    for part, t in zip(parts, tops, strict=True):
        np.subtract(part, t, out=part)
        np.exp(part, out=part)
    sums = [mx.array(row_sums(part)) for part in parts]
    return Weights(list(scores.parts), sums, None if sinks is None else mx.array(np.exp(sinks - top)))


def row_sums(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sums over the last axis, kept as one, of up to two times `HALF` numbers: keys not read count as zeros would."""
    first = np.add.reduce(weights[..., :HALF], axis=-1, keepdims=True)
    rest = weights[..., HALF:]
    return first + np.add.reduce(rest, axis=-1, keepdims=True) if rest.shape[-1] else first
