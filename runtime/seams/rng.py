"""Randomness, as a seam: seeds for requests that bring none, unguessable ids."""

from __future__ import annotations

import random
import secrets
from typing import Protocol


class Rng(Protocol):
    """seed64: uniform in [0, 2**64). token: lower-case hex of `nbytes` random bytes. bytes: `n` random bytes."""

    def seed64(self) -> int: ...
    def token(self, nbytes: int = 16) -> str: ...
    def bytes(self, n: int) -> bytes: ...


class RealRng:
    """The operating system's generator: nothing it gives can be guessed from what it gave before."""

    def seed64(self) -> int:
        return secrets.randbits(64)

    def token(self, nbytes: int = 16) -> str:
        return secrets.token_hex(nbytes)

    def bytes(self, n: int) -> bytes:
        return secrets.token_bytes(n)


class SeededRng:
    """The same draws for the same seed, for tests. Not for anything that must be unguessable."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def seed64(self) -> int:
        return self._random.getrandbits(64)

    def token(self, nbytes: int = 16) -> str:
        return self.bytes(nbytes).hex()

    def bytes(self, n: int) -> bytes:
        return self._random.randbytes(n)
