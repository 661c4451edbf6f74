"""Drafts that the device proposes at the end of a round, and the drafter of a conversation that has both kinds.

The device knows what no host code can: hidden states. So a head of the model or a small model beside it proposes there,
right after a round's tokens are picked, and the tokens come back with the round's result (`Drafter.offer`).
"""

from __future__ import annotations

from collections.abc import Sequence

from .drafts import Drafter, DraftStats, Odds, Prices, Tally, best_drafts, expected, shared_prefix
from .ngram import NgramDrafter

_PRIOR = 0.6
"""The chance that a trained head's draft is kept, before a conversation has shown it."""


def drafter_for(tokens: Sequence[int], prices: Prices) -> Drafter:
    """The drafter of a conversation that begins with `tokens`: copies, and the device's proposals if it makes any."""
    copies = NgramDrafter(tokens, prices.widths, prices.again)
    return BothDrafter(copies, OfferedDrafter(prices)) if prices.ahead else copies


class OfferedDrafter:
    """Passes the device's proposals on, and asks for as many as paid so far in this conversation."""

    def __init__(self, prices: Prices) -> None:
        self._again = prices.again
        # One price for each number of drafts: a round that verifies them, and the end of the one before it.
        drafting = zip(prices.widths, (0.0, *prices.ahead), strict=False)
        self._costs = tuple(width + ahead for width, ahead in drafting)
        self._odds = Odds(_PRIOR)
        self._tally = Tally()
        self._offered: tuple[int, ...] = ()

    @property
    def stats(self) -> DraftStats:
        return self._tally.stats

    @property
    def rate(self) -> float:
        """How likely the next token of an offer is kept."""
        return self._odds.rate

    def ahead(self, limit: int) -> int:
        """As many tokens as the most tokens a millisecond take, by what was kept before."""
        best = best_drafts(self._odds.rate, limit, self._costs, self._again)
        if not best:
            self._odds.rest()
        return best

    def offer(self, tokens: Sequence[int]) -> None:
        self._offered = tuple(tokens)

    def propose(self, limit: int) -> tuple[int, ...]:
        return self._offered[: max(0, limit)]

    def accept(self, tokens: Sequence[int]) -> None:
        """Learns from the last offer, whether it was proposed or not."""
        offered, self._offered = self._offered, ()
        if offered:
            kept = shared_prefix(offered, tokens)
            self._tally.add(len(offered), kept)
            self._odds.record(kept, rejected=kept < min(len(offered), len(tokens)))

    def rewind(self, length: int) -> None:
        """What was offered followed tokens that are gone."""
        self._offered = ()


class BothDrafter:
    """Copies where they promise more, the device's proposals otherwise. While a copy goes on, the device rests."""

    def __init__(self, copies: NgramDrafter, offers: OfferedDrafter) -> None:
        self._copies, self._offers = copies, offers
        self._tally = Tally()
        self._proposal: tuple[int, ...] = ()
        self._copied = self._copying = False

    @property
    def stats(self) -> DraftStats:
        return self._tally.stats

    def propose(self, limit: int) -> tuple[int, ...]:
        copied, offered = self._copies.propose(limit), self._offers.propose(limit)
        gain = expected(self._copies.rate, len(copied)) if copied else 0.0
        self._copied = gain > expected(self._offers.rate, len(offered))
        self._proposal = copied if self._copied else offered
        return self._proposal

    def ahead(self, limit: int) -> int:
        return 0 if self._copying else self._offers.ahead(limit)

    def offer(self, tokens: Sequence[int]) -> None:
        self._offers.offer(tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        proposal, self._proposal = self._proposal, ()
        kept = shared_prefix(proposal, tokens)
        if proposal:
            self._tally.add(len(proposal), kept)
        self._copying = self._copied and bool(proposal) and kept == len(proposal)
        self._copies.accept(tokens)
        self._offers.accept(tokens)

    def rewind(self, length: int) -> None:
        self._copies.rewind(length)
        self._offers.rewind(length)
        self._proposal, self._copying = (), False
