"""Where recurrent states are kept, found by the tokens before them.

A state stands for all tokens up to its position, so it serves whoever's prompt begins with exactly those. Digests of
prompts are taken at the positions where anything is kept, in one pass; what matches is compared token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import blake3
import numpy as np

from .segments import Segment, chain_tokens

Key = tuple[bytes, int, bytes]
"""Salt, position, digest of the tokens before it."""


class Anchors:
    """The anchors of all segments, one set for each salt."""

    def __init__(self) -> None:
        self._holders: dict[Key, dict[Segment, None]] = {}
        self._keys: dict[tuple[Segment, int], Key] = {}
        self._positions: dict[bytes, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, segment: Segment, position: int, salt: bytes) -> None:
        """`segment` keeps the state behind the first `position` tokens of its chain."""
        ((_, digest),) = _digests(chain_tokens(segment, position), [position])
        key = salt, position, digest
        self._keys[segment, position] = key
        self._holders.setdefault(key, {})[segment] = None
        self._positions.setdefault(salt, Counter())[position] += 1

    def remove(self, segment: Segment, position: int) -> None:
        """Unknown ones are ignored."""
        key = self._keys.pop((segment, position), None)
        if key is None:
            return
        del self._holders[key][segment]
        if not self._holders[key]:
            del self._holders[key]
        positions = self._positions[key[0]]
        positions[position] -= 1
        if not positions[position]:
            del positions[position]
        if not positions:
            del self._positions[key[0]]

    def latest(self, tokens: Sequence[int], limit: int, salt: bytes) -> tuple[int, Segment | None]:
        """The last position up to `limit` at which a state behind these very tokens is kept, and who keeps it."""
        places = sorted(p for p in self._positions.get(salt, ()) if p <= limit)
        for position, digest in reversed(list(_digests(tokens, places))):
            for segment in self._holders.get((salt, position, digest), ()):
                if chain_tokens(segment, position) == list(tokens[:position]):
                    return position, segment
        return 0, None


def _digests(tokens: Sequence[int], places: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Digests of `tokens[:place]` for ascending places."""
    if not places:
        return
    raw = np.asarray(tokens[: places[-1]], dtype="<u4").tobytes()
    hasher, at = blake3.blake3(), 0
    for place in places:
        hasher.update(raw[4 * at : 4 * place])
        at = place
        yield place, hasher.digest()
