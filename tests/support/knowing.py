"""A drafter for tests that knows the reply and errs where it is told: every number of kept drafts occurs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

from onecopy.actors import running
from onecopy.actors import system as root
from onecopy.runtime.decode import DraftStats, Prices

Replies = Mapping[tuple[int, ...], Sequence[int]]
"""Replies by their prompts."""


class Knowing:
    """Proposes the rest of a known reply, `width` tokens at a time, with one wrong token at a place that wanders."""

    stats = DraftStats()

    def __init__(self, tokens: Sequence[int], replies: Replies, width: int) -> None:
        self._whole = [*tokens, *replies.get(tuple(tokens), ())]
        self._length, self._width, self._round = len(tokens), width, 0

    def propose(self, limit: int) -> tuple[int, ...]:
        n = min(limit, self._width)
        known = self._whole[self._length : self._length + n]
        proposal = [*known, *[1] * (n - len(known))]
        wrong = self._round % (self._width + 1)
        self._round += 1
        if wrong < n:
            proposal[wrong] = (proposal[wrong] + 1) % 128
        return tuple(proposal)

    def ahead(self, limit: int) -> int:
        return 0

    def offer(self, tokens: Sequence[int]) -> None:
        raise AssertionError("nothing was asked of the device")

    def accept(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)

    def rewind(self, length: int) -> None:
        self._length = length


@contextmanager
def knowing(replies: Replies, width: int = 5) -> Iterator[None]:
    """Turns that begin in the block draft what `replies` says they will say."""
    with mock.patch.object(running, "drafter_for", lambda tokens, _: Knowing(tokens, replies, width)):
        yield


@contextmanager
def cheap_rounds(prices: Prices | None = None) -> Iterator[None]:
    """Systems opened in the block believe that wide rounds cost nothing, whatever the machine says."""
    found = prices or Prices((1.0,) * 8)
    with mock.patch.object(root, "prices", return_value=found):
        yield
