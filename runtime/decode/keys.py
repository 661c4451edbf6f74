"""Keys of the sampler: a 64-bit seed and an absolute position become one random key, and nothing else does."""

from __future__ import annotations

from onecopy.runtime.errors import BadRequest

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    """The SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words in which every bit moves."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def key_of(seed: int, position: int) -> tuple[int, int]:
    """The (high, low) 32-bit words of the key for the token at `position` (0 is the prompt's first token).

    The seed is scrambled first, so neighbouring seeds share no stream; positions then walk that seed's SplitMix64
    stream. One seed never repeats a key. A seed beyond 64 bits counts modulo 2**64.
    """
    start = mixed((seed + _GOLDEN) & _WORD)
    word = mixed((start + _GOLDEN * (position + 1)) & _WORD)
    return word >> 32, word & 0xFFFFFFFF


def folded_seed(seed: int, param: str = "seed") -> int:
    """A client's seed as the 64-bit seed of a `Sampling`.

    0 is a seed like any other; a seed beyond 64 bits counts modulo 2**64; a negative one is a `BadRequest`, because
    elsewhere -1 means "random" and folding it silently would fix it. Who sends none gets one drawn by the Rng seam.
    """
    if seed < 0:
        raise BadRequest(f"{param} must not be negative; leave it out for a random seed.", param=param)
    return seed & _WORD
