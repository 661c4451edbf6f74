"""Log probabilities of a round: log-softmax of the raw logits, before bias, penalties, mask and temperature.

So a number means the same whatever the sampling was: how likely the model itself held the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .want import Pick, Want

_MOST_ALTERNATIVES = 20


class Logprobs:
    """Lazy log probabilities of one round's rows; `arrays` are evaluated with the round, `of` reads them."""

    __slots__ = ("_best", "_chosen", "_ids", "_rows")

    def __init__(self, logits: mx.array, wants: Sequence[Want], tokens: mx.array) -> None:
        self._rows = {
            row: want.sampling.logprobs for row, want in enumerate(wants) if want.sampling.logprobs is not None
        }
        rows, vocab = mx.array(list(self._rows)), logits.shape[1]
        logs = logits[rows] - mx.logsumexp(logits[rows], axis=-1, keepdims=True)
        self._chosen = mx.take_along_axis(logs, tokens[rows][:, None], axis=-1)[:, 0]
        # Always as many as anyone may ask: which of two equal logits makes the cut is then the row's own affair.
        most = min(_MOST_ALTERNATIVES, vocab)
        self._ids = mx.argpartition(logs, vocab - most, axis=-1)[:, vocab - most :]
        self._best = mx.take_along_axis(logs, self._ids, axis=-1)

    @property
    def arrays(self) -> list[mx.array]:
        return [self._chosen, self._ids, self._best]

    def of(self, tokens: list[int]) -> list[Pick]:
        """The picks of all rows [R], with the log probabilities of those that asked for them."""
        picks = [Pick(token) for token in tokens]
        columns: list[Any] = [array.tolist() for array in self.arrays]
        for (row, most), chosen, ids, best in zip(self._rows.items(), *columns, strict=True):
            top = sorted(zip(ids, best, strict=True), key=lambda pair: (-pair[1], pair[0]))[:most]
            picks[row] = Pick(tokens[row], chosen, tuple(top))
        return picks
