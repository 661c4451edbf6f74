"""What quantized rows do to a model's output, measured before it is served: the same tokens on rows of either kind.

Both sides read the given tokens, not what they would say themselves, so every position is compared on its own. Device
thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import ModelLoadError
from .forward import Forward
from .models.loaded import Loaded
from .rows.attention import RowTile
from .rows.buffers import Pool
from .rows.layout import Layout, round_up
from .rows.ops import Allocate, Chain, Drop, Link, Trim
from .rows.plan import Strip

Host = np.ndarray[Any, Any]

ROWS = 320
"""Tokens of the check: more than a block, so that it reads over a border of tiles."""

STEP = 64
"""Tokens of one forward."""

LEAST = 0.5
"""The least share of positions with the same most likely token. Below it, every second greedy token is another one
than the model's own: that is no longer the model's output with some noise, but another output."""

SCRATCH = -1
"""The check's segment in each pool; the bank's begin at 1."""

TEXT = """\
The lighthouse at the end of the bay was built in 1871, after three ships had been lost on the rocks within a winter.
Its keeper, a quiet man called Amos Reed, wrote down every evening what he had seen: the wind, the height of the water,
and how many boats came home. When he was asked why he counted them, he answered that somebody had to know.

def mean(values: list[float]) -> float:
    \"\"\"The arithmetic mean. ValueError when there are no values.\"\"\"
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

Question: A train leaves at 9:40 and arrives at 12:15. How long does the journey take? Answer: From 9:40 to 12:00 are
two hours and twenty minutes, and fifteen more make two hours and thirty-five minutes.

{"name": "kettle", "price": 24.5, "tags": ["kitchen", "steel"], "in_stock": true}

Der Zug nach Hamburg hat heute leider etwas Verspätung. La biblioteca cierra a las ocho de la tarde. First, wash the
rice until the water stays clear. Second, let it rest for twenty minutes. Third, cook it with the lid closed, and do
not open the pot before the time is over. Whoever is hungry may set the table meanwhile.
"""
"""Prose, code, arithmetic, data and other languages, for models with a tokenizer."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What quantized rows changed over `rows` positions of a fixed text.

    bits: of a value. layers, of: how many layers are quantized, of how many. same_token: share of positions with the
    same most likely next token. mean_kl: mean Kullback-Leibler divergence from the model's own distribution, in nats.
    largest_difference: of any logit.
    """

    bits: int
    layers: int
    of: int
    rows: int
    same_token: float
    mean_kl: float
    largest_difference: float

    @property
    def figures(self) -> dict[str, float]:
        """The figures as JSON values."""
        return asdict(self)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.mean_kl) and math.isfinite(self.largest_difference)

    def __str__(self) -> str:
        return (
            f"{self.bits} bits in {self.layers} of {self.of} layers; over {self.rows} tokens the most likely next token"
            f" is the same at {self.same_token:.1%}, mean KL divergence {self.mean_kl:.2g} nats, largest difference of"
            f" a logit {self.largest_difference:.2g}"
        )


def sample(loaded: Loaded, vocab: int, context: int) -> tuple[int, ...]:
    """The tokens of the check: of the fixed text, or fixed draws for a model without a tokenizer."""
    n = min(ROWS, context)
    if loaded.tokenizer is None:
        draw = np.random.default_rng(29)
        return tuple(draw.integers(0, vocab, n).tolist())
    return tuple(t for t in loaded.tokenizer.encode(TEXT, special=False) if t < vocab)[:n]


def check(name: str, forward: Forward, own: Pool, quantized: Pool, tile: RowTile, tokens: Sequence[int]) -> Fidelity:
    """Compares a model on its own rows with itself on quantized ones.

    ModelLoadError when an output is not finite, or fewer than `LEAST` of the positions have the same likeliest token.
    """
    pairs = zip(played(forward, own, tile, tokens), played(forward, quantized, tile, tokens), strict=True)
    found = measured(quantized.layout, own.layout, [compared(plain, rounded) for plain, rounded in pairs])
    if not found.finite or found.same_token < LEAST:
        raise ModelLoadError(
            f"{name}: --kv-bits {found.bits}: on quantized rows the output no longer resembles the model's: {found}. "
            f"At least {LEAST:.0%} of the tokens must be the same, and every number finite."
        )
    return found


def played(forward: Forward, pool: Pool, tile: RowTile, tokens: Sequence[int]) -> Iterator[Host]:
    """The model's logits `[rows, vocab]` of given tokens on rows of that pool, `STEP` at a time."""
    room = round_up(len(tokens))
    pool.apply((Allocate(SCRATCH, 0, room),))
    try:
        for at in range(0, len(tokens), STEP):
            part = tuple(tokens[at : at + STEP])
            logits = forward([Strip(Chain((Link(SCRATCH, 0, at),), room), at, part, len(part))], pool, tile)
            mx.eval(logits, *pool.segments[SCRATCH].flat())
            yield np.array(logits.astype(mx.float32))
    finally:
        pool.apply((Drop(SCRATCH), Trim()))


def compared(plain: Host, rounded: Host) -> tuple[Host, Host, Host]:
    """Of logits `[rows, vocab]`, for each row: whether the likeliest token is the same, divergence, largest difference.

    Tokens that the model itself rules out (-inf) are left out.
    """
    possible = plain > -np.inf
    with np.errstate(all="ignore"):
        p, q = _log_shares(plain), _log_shares(rounded)
        divergence = np.where(possible, np.exp(p) * (p - q), 0).sum(axis=1)
        apart = np.where(possible, np.abs(plain - rounded), 0).max(axis=1)
    return plain.argmax(axis=1) == rounded.argmax(axis=1), divergence, apart


def _log_shares(logits: Host) -> Host:
    less = logits - logits.max(axis=1, keepdims=True)
    shares: Host = less - np.log(np.exp(less).sum(axis=1, keepdims=True))
    return shares


def measured(quantized: Layout, own: Layout, parts: Sequence[tuple[Host, Host, Host]]) -> Fidelity:
    """The figures of all rows together."""
    same, divergence, apart = (np.concatenate(each) for each in zip(*parts, strict=True))
    bits = [layer.bits for layer in quantized.layers if layer.bits is not None]
    return Fidelity(
        bits=bits[0],
        layers=len(bits),
        of=len(own.layers),
        rows=len(same),
        same_token=float(same.mean()),
        mean_kl=max(0.0, float(divergence.mean())) if np.isfinite(divergence).all() else math.inf,
        largest_difference=float(apart.max()),
    )
