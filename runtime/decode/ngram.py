"""Drafts copied from the conversation itself: what followed the last time its newest tokens appeared.

Saxena's prompt lookup (2023) with an index instead of a search. For each length in `_ORDERS` a table maps the hash of
that many tokens to the place right after their latest occurrence; a lookup is checked against the tokens, so a
collision or a stale entry costs a miss and never a wrong answer. A place that is being copied from stays a candidate,
so a long copy goes on where it is rather than at the latest look-alike. The longest match wins.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .drafts import DraftStats, Odds, Tally, best_drafts, shared_prefix

_ORDERS = (2, 3, 4, 6)
# How likely a match of each order goes on, before this conversation has shown it: longer ones are seldom accidents.
_PRIORS = (0.25, 0.4, 0.5, 0.7)
_LONGEST_MATCH = 32
# Per order, 4 bytes a slot: at most 1 MiB a running reply. Newer n-grams overwrite older ones past that.
_LEAST_SLOTS, _MOST_SLOTS = 1 << 10, 1 << 16
_FACTOR, _WORD = 0x9E3779B1, 0xFFFFFFFF


class NgramDrafter:
    """Index of one running conversation. O(1) a token; building it from a prompt is vectorised.

    costs[w - 1]: measured cost of a round of width w, `again` of a rejection, in one unit. Memory: 4 bytes a token and
    the tables.
    """

    def __init__(self, tokens: Sequence[int], costs: Sequence[float], again: float = 0.0) -> None:
        self._costs = tuple(costs)
        self._again = again
        self._tokens = array("i", tokens)
        self._tables: list[array[int]] = []
        self._odds = [Odds(prior) for prior in _PRIORS]
        self._tally = Tally()
        self._proposal: tuple[int, ...] = ()
        self._order = 0
        self._source = 0
        self._index_all()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def stats(self) -> DraftStats:
        return self._tally.stats

    @property
    def rate(self) -> float:
        """How likely the next token of the last proposal is kept."""
        return self._odds[self._order].rate

    def propose(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens; fewer, or none, when copies of this match length were not kept lately."""
        self._proposal = ()
        source, length = self._longest_match()
        if length < _ORDERS[0] or limit < 1:
            return ()
        self._source, self._order = source, _order_of(length)
        odds = self._odds[self._order]
        self._proposal = self._copy(source, best_drafts(odds.rate, limit, self._costs, again=self._again))
        if not self._proposal:
            odds.rest()
        return self._proposal

    def ahead(self, limit: int) -> int:
        """Needs nothing of the device."""
        return 0

    def offer(self, tokens: Sequence[int]) -> None:
        """Is never offered anything."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Append delivered tokens and learn from how many of them were proposed."""
        self._learn(tokens)
        for token in tokens:
            self._append(token)
        self._source += len(tokens)

    def rewind(self, length: int) -> None:
        """Drop tokens past the first `length`. Entries that point past it are found stale when they are looked up."""
        del self._tokens[length:]
        self._proposal = ()

    def fork(self) -> NgramDrafter:
        """A copy that learns on its own from here."""
        return NgramDrafter(self._tokens, self._costs, self._again)

    def _learn(self, tokens: Sequence[int]) -> None:
        if not self._proposal:
            return
        kept = shared_prefix(self._proposal, tokens)
        self._tally.add(len(self._proposal), kept)
        self._odds[self._order].record(kept, rejected=kept < min(len(self._proposal), len(tokens)))
        self._proposal = ()

    def _append(self, token: int) -> None:
        """The n-grams that end before `token` now have a follower, so only now they are indexed."""
        place = len(self._tokens)
        for table, slot in zip(self._tables, self._slots(), strict=False):
            table[slot] = place
        self._tokens.append(token)
        if 2 * place > len(self._tables[0]) < _MOST_SLOTS:
            self._index_all()

    def _slots(self) -> Iterator[int]:
        """The table slots of the n-grams at the end of the conversation, shortest first."""
        tokens, shift, word, taken = self._tokens, self._shift, 0, 0
        for order in _ORDERS:
            if order > len(tokens):
                return
            while taken < order:
                taken += 1
                word = ((word ^ tokens[-taken]) * _FACTOR) & _WORD
                word ^= word >> 15
            yield word >> shift

    def _longest_match(self) -> tuple[int, int]:
        """The place to copy from and how many tokens before it match; the place being copied from wins a tie."""
        places = [self._source]
        places.extend(table[slot] for table, slot in zip(self._tables, self._slots(), strict=False))
        return max(((place, self._matched(place)) for place in dict.fromkeys(places)), key=lambda found: found[1])

    def _matched(self, place: int) -> int:
        """How many tokens before `place` equal those at the end, 0 when `place` lies outside."""
        tokens = self._tokens
        if not 0 < place < len(tokens):
            return 0
        length = 0
        while length < min(place, _LONGEST_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _copy(self, source: int, count: int) -> tuple[int, ...]:
        """`count` tokens from `source` on; past the end the copy goes on in itself, as a repeating text does."""
        copied = list(self._tokens[source : source + count])
        while len(copied) < count:
            copied.append(copied[len(copied) - (len(self._tokens) - source)])
        return tuple(copied)

    def _index_all(self) -> None:
        """Rebuild the tables at a size that suits the conversation: doubling keeps it O(1) a token."""
        slots = min(max(_LEAST_SLOTS, 1 << (2 * len(self._tokens)).bit_length()), _MOST_SLOTS)
        self._shift = 33 - slots.bit_length()
        tokens = np.array(self._tokens, np.uint32)
        self._tables = [_table(tokens, order, slots, self._shift) for order in _ORDERS]


def _order_of(length: int) -> int:
    """Index in `_ORDERS` of the longest order a match of `length` tokens has."""
    return sum(order <= length for order in _ORDERS) - 1


def _table(tokens: Any, order: int, slots: int, shift: int) -> array[int]:
    """The places after all n-grams of one order that have a follower; of several in a slot the latest stays."""
    count = max(len(tokens) - order, 0)
    words = np.zeros(count, np.uint32)
    for back in range(order):
        words = (words ^ tokens[order - 1 - back : order - 1 - back + count]) * np.uint32(_FACTOR)
        words ^= words >> np.uint32(15)
    latest = np.zeros(slots, np.int32)
    np.maximum.at(latest, words >> np.uint32(shift), np.arange(order, order + count, dtype=np.int32))
    table = array("i")
    table.frombytes(latest.tobytes())
    return table
