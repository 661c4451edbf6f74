"""The n-gram hash of per-layer embeddings (PLE): which table rows a token's last N tokens name.

Everything is integer arithmetic on the host, so a row id depends on tokens alone. Source: the public
qwen4_exp reference (splitmix64 multipliers, successive primes, XOR of wrapping products).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from .config import Config

Ids = NDArray[np.int64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_STRIDE = 10007


@dataclass(frozen=True, slots=True)
class NgramHash:
    """The constants of one PLE layer. multipliers [N]; primes and offsets [(N-1)·heads]; all int64.

    rows: rows of the padded table that `offsets` and `primes` point into.
    """

    multipliers: Ids
    primes: Ids
    offsets: Ids
    heads: int
    eos: int
    rows: int

    @property
    def context(self) -> int:
        """Tokens before the first one that its row ids depend on."""
        return len(self.multipliers) - 1

    def __call__(self, history: Ids) -> Ids:
        """Row ids [B, T, (N-1)·heads] of the last T tokens of `history` [B, context + T]."""
        shifted = [_shift(history, p, self.eos) for p in range(len(self.multipliers))]
        with np.errstate(over="ignore"):
            mixes = list(_mixes(shifted, self.multipliers))
        per_head = np.repeat(np.stack(mixes, axis=-1), self.heads, axis=-1)
        rows: Ids = np.mod(per_head, self.primes) + self.offsets
        return rows[:, self.context :]


def ngram_hash(config: Config, ple_index: int) -> NgramHash:
    """The hash of the `ple_index`-th PLE layer (0 = first); primes go on where the layer before stopped."""
    per_layer = (config.ngram_size - 1) * config.heads_per_ngram
    primes = _primes(config.ngram_base, per_layer * (ple_index + 1))[-per_layer:]
    total, divisor = sum(primes), config.ngram_divisor
    return NgramHash(
        multipliers=np.array(_multipliers(config, ple_index), np.int64),
        primes=np.array(primes, np.int64),
        offsets=np.array([sum(primes[:i]) for i in range(per_layer)], np.int64),
        heads=config.heads_per_ngram,
        eos=config.eos,
        rows=-(-total // divisor) * divisor,
    )


def _shift(history: Ids, by: int, eos: int) -> Ids:
    """`history` moved right by `by`; what lies at or before the last EOS strictly before a token reads as EOS."""
    out = np.full_like(history, eos)
    if by < history.shape[1]:
        out[:, by:] = history[:, : history.shape[1] - by]
    crossed = np.zeros(history.shape, bool)
    for back in range(1, by + 1):
        crossed[:, back:] |= history[:, :-back] == eos
    return np.where(crossed, eos, out)


def _mixes(shifted: list[Ids], multipliers: Ids) -> Iterator[Ids]:
    """The XOR of wrapping products for n = 2, 3, … N, each building on the one before."""
    mix = shifted[0] * multipliers[0]
    for tokens, multiplier in zip(shifted[1:], multipliers[1:], strict=True):
        mix = mix ^ (tokens * multiplier)
        yield mix


def _multipliers(config: Config, ple_index: int) -> list[int]:
    bound = max(1, ((1 << 63) - 1) // max(config.vocab_size, 1) // 2)
    base = config.seed + _LAYER_STRIDE * ple_index
    return [2 * (_splitmix64(base + _GAMMA * (p + 1)) % bound) + 1 for p in range(config.ngram_size)]


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes(base: int, count: int) -> list[int]:
    """The first `count` primes ≥ base."""
    found: list[int] = []
    candidate = max(base, 2)
    while len(found) < count:
        if all(candidate % d for d in range(2, isqrt(candidate) + 1)):
            found.append(candidate)
        candidate += 1
    return found
