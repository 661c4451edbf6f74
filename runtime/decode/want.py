"""What one row of a round asks of the sampler, and the answer: `Want` in, `Pick` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.turn import Sampling

from .counts import Seen, TokenCounts, penalised

# Colder than this, exp((second - best) / temperature) is 0 in f32 for any gap that f32 logits can show.
_COLD = 1e-5

Mask = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Want:
    """One row of logits to pick from.

    position: absolute position of the token to be picked (a prompt of P tokens: the reply's first is P).
    counts: tokens before that position, None when no penalty is set.
    mask: what a grammar allows: bool [V], or 32-bit words [ceil(V / 32)], lowest bit first. Ids past its end are not
    allowed. A mask that allows nothing is a ValueError here, before it can fail a round of many.
    """

    sampling: Sampling
    position: int
    counts: Seen | None = None
    mask: Mask | None = None

    def __post_init__(self) -> None:
        if self.mask is not None and not self.mask.any():
            raise ValueError(f"a mask that allows no token at position {self.position}")

    @property
    def greedy(self) -> bool:
        """Takes the best token: no noise, no filter."""
        return self.sampling.temperature < _COLD or self.sampling.top_k == 1

    @property
    def penalised(self) -> bool:
        return self.counts is not None and penalised(self.sampling)

    @property
    def narrow(self) -> bool:
        """Needs an order of the tokens: top_k or top_p."""
        return self.sampling.top_k > 0 or self.sampling.top_p < 1.0

    @property
    def plain(self) -> bool:
        """The bare argmax of the logits, without logprobs."""
        sampling = self.sampling
        edited = self.mask is not None or sampling.logit_bias or self.penalised
        return self.greedy and not edited and sampling.logprobs is None


@dataclass(frozen=True, slots=True)
class Pick:
    """The token a row's want picked.

    logprob: its natural-log probability under the model's own distribution: log-softmax of the raw logits, before
    bias, penalties, mask and temperature (None: not asked). top: the n most likely (token, logprob), best first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def wants_for(
    sampling: Sampling,
    position: int,
    proposal: Sequence[int] = (),
    counts: TokenCounts | None = None,
    masks: Sequence[Mask | None] = (),
) -> tuple[Want, ...]:
    """The wants of one conversation's 1 + len(proposal) rows, the first of them for `position`.

    Row i is asked as if the first i proposed tokens were delivered. `counts` is left as it was.
    masks: one per row, or none at all.
    """
    rows = len(proposal) + 1
    return tuple(
        Want(sampling, position + row, seen, mask)
        for row, seen, mask in zip(range(rows), _ahead(counts, proposal), masks or [None] * rows, strict=True)
    )


def _ahead(counts: TokenCounts | None, proposal: Sequence[int]) -> list[Seen | None]:
    if counts is None:
        return [None] * (len(proposal) + 1)
    length = len(counts)
    ahead: list[Seen | None] = [counts.seen()]
    for token in proposal:
        counts.push(token)
        ahead.append(counts.seen())
    counts.rewind(length)
    return ahead


def unpacked(mask: Mask, vocab: int) -> NDArray[np.bool_]:
    """A mask as bool [vocab]."""
    bits = mask if mask.dtype == np.bool_ else np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)
    allowed = np.zeros(vocab, np.bool_)
    known = min(vocab, len(bits))
    allowed[:known] = bits[:known]
    return allowed
