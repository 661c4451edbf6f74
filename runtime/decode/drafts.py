"""Drafts: tokens proposed for free and verified in one forward, and the rule that keeps them honest.

A proposal never decides a token. The round computes all its rows, the keyed sampler picks at each, and `verify` keeps
the longest prefix of the proposal that equals the picks (exact-match form of Leviathan et al. 2023; the sampler is a
function of seed and position, so equality is all there is to check). Drafted replies are undrafted replies.

How wide to draft is a function of what was kept before in this conversation and of a table of round costs measured at
start-up: never of time inside a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# The weight of a drafter's prior, in observations.
_PRIOR_SEEN = 4.0
# Of earlier evidence this much stays per proposal (about the last 16 count) and per chance let pass: a drafter that
# failed is tried again, but rarely.
_FADE, _REST = 15 / 16, 127 / 128


@dataclass(frozen=True, slots=True)
class DraftStats:
    """rounds: proposals made. proposed, kept: tokens of them. kept_at[i]: how often token i of a proposal was right."""

    rounds: int = 0
    proposed: int = 0
    kept: int = 0
    kept_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prices:
    """What drafting costs on this machine, in units of a round of one row; measured once, at start-up.

    widths[w - 1]: a round of width w; none: nobody drafts. again: computing a recurrent state once more after a draft
    was rejected. ahead[d - 1]: d tokens that the device proposes at the end of a round; none: it has no drafter.
    device: the kind of drafter it has, mark: what its rows depend on beside the model.
    """

    widths: tuple[float, ...] = ()
    again: float = 0.0
    ahead: tuple[float, ...] = ()
    device: str = ""
    mark: str = ""

    @property
    def drafters(self) -> tuple[str, ...]:
        """Who drafts, in the order they are asked."""
        return () if not self.widths else ("copies", *((self.device,) if self.ahead else ()))

    @property
    def limit(self) -> int:
        """Tokens of a proposal at most."""
        return len(self.widths) - 1


class Drafter(Protocol):
    """Proposes the next tokens of one conversation. Belongs to that conversation; nothing in it is shared.

    Some kinds know by themselves (copies), some hear from the device what it thinks (heads, block drafters): `ahead`
    asks for that before a round, `offer` brings it after the round, `propose` decides. All are verified alike.
    """

    @property
    def stats(self) -> DraftStats: ...

    def propose(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may follow, none when it is not worth a wider round."""

    def ahead(self, limit: int) -> int:
        """How many tokens, at most `limit`, the device is to propose at the end of the coming round."""

    def offer(self, tokens: Sequence[int]) -> None:
        """The device proposes these after the newest token. Called after the `accept` of the same round."""

    def accept(self, tokens: Sequence[int]) -> None:
        """`tokens` were delivered: kept drafts and the sampler's own. How the last proposal fared shows in them."""

    def rewind(self, length: int) -> None:
        """The conversation has only its first `length` tokens again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """kept: proposed tokens that stay. tokens: what is delivered, the kept ones and one of the sampler's own."""

    kept: int
    tokens: tuple[int, ...]


def verify(proposal: Sequence[int], picks: Sequence[int]) -> Verdict:
    """Judge a proposal of W - 1 tokens by the W picks of its rows: row i saw the first i proposed tokens.

    Rows past 1 + kept are the ones to rewind: they were computed after a token that was not picked.
    """
    if len(picks) != len(proposal) + 1:
        raise ValueError(f"{len(proposal)} drafts need {len(proposal) + 1} picks, not {len(picks)}")
    kept = shared_prefix(proposal, picks)
    return Verdict(kept, tuple(picks[: kept + 1]))


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


class Odds:
    """How likely the next drafted token is kept, from counts that fade; a function of the replies' tokens alone."""

    __slots__ = ("_kept", "_prior", "_seen")

    def __init__(self, prior: float = 0.5) -> None:
        """prior: the chance believed before anything was seen."""
        self._prior = prior
        self._kept = self._seen = 0.0

    @property
    def rate(self) -> float:
        return (self._kept + self._prior * _PRIOR_SEEN) / (self._seen + _PRIOR_SEEN)

    def record(self, kept: int, rejected: bool) -> None:
        """A proposal had `kept` tokens kept, and one rejected or none (its end, or the reply's, came first)."""
        self._kept = self._kept * _FADE + kept
        self._seen = self._seen * _FADE + kept + rejected

    def rest(self) -> None:
        """A chance to draft was let pass."""
        self._kept *= _REST
        self._seen *= _REST


def best_drafts(rate: float, limit: int, costs: Sequence[float], again: float = 0.0) -> int:
    """How many tokens to draft, 0 to `limit`, for the most tokens a millisecond.

    costs[w - 1] is the cost of a round of width w and of drafting for it, `again` of a rejection, in one unit.
    Of d drafts each kept with probability `rate` once its predecessor is, a round yields 1 + rate + ... + rate**d
    tokens, and keeps them all with probability rate**d.
    """
    best, most, tokens, chance = 0, 0.0, 0.0, 1.0
    for drafts in range(min(limit, len(costs) - 1) + 1):
        tokens += chance
        speed = tokens / (costs[drafts] + again * (1.0 - chance))
        chance *= rate
        if speed > most:
            best, most = drafts, speed
    return best


def expected(rate: float, drafts: int) -> float:
    """How many of so many drafts are kept on average."""
    return sum(rate**depth for depth in range(1, drafts + 1))


class Tally:
    """Counts what becomes of proposals, for `DraftStats`."""

    __slots__ = ("_kept_at", "_proposed", "_rounds")

    def __init__(self) -> None:
        self._rounds = self._proposed = 0
        self._kept_at: list[int] = []

    def add(self, proposed: int, kept: int) -> None:
        self._rounds += 1
        self._proposed += proposed
        self._kept_at.extend([0] * (proposed - len(self._kept_at)))
        for depth in range(kept):
            self._kept_at[depth] += 1

    @property
    def stats(self) -> DraftStats:
        return DraftStats(self._rounds, self._proposed, sum(self._kept_at), tuple(self._kept_at))
