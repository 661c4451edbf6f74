"""Drafts that the device offers: how many are asked for, what is learnt from them, and when copies go first."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.decode import NgramDrafter, OfferedDrafter, Prices, drafter_for
from onecopy.runtime.decode.drafts import expected, verify

FLAT = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35)
PRICES = Prices(FLAT, ahead=(0.05, 0.1, 0.15, 0.2, 0.25), device="any")
DEAR = Prices(FLAT, ahead=(0.3, 0.6, 0.9, 1.2, 1.5), device="any")


def played(drafter: OfferedDrafter, right: int, rounds: int = 40) -> list[int]:
    """How many tokens were asked for when the first `right` of each offer were kept."""
    asked = []
    for _ in range(rounds):
        asked.append(drafter.ahead(7))
        drafter.offer(range(asked[-1]))
        offered = drafter.propose(7)
        drafter.accept([*offered[:right], -1])
    return asked


def test_the_more_is_kept_the_deeper_the_device_is_asked() -> None:
    never, some, always = (played(OfferedDrafter(PRICES), right)[-10:] for right in (0, 2, 7))
    assert set(always) == {5}
    assert max(never) <= min(some) <= max(some) < 5


def test_a_device_whose_offers_are_never_kept_is_asked_seldom_and_tried_again() -> None:
    asked = played(OfferedDrafter(DEAR), 0, 600)
    assert asked[-1] == 0
    assert sum(a > 0 for a in asked) < 60
    assert sum(a > 0 for a in asked[100:]) > 0


def test_no_more_is_asked_for_or_proposed_than_there_is_room_for() -> None:
    drafter = OfferedDrafter(PRICES)
    assert drafter.ahead(0) == 0
    assert drafter.ahead(2) <= 2
    drafter.offer((1, 2, 3))
    assert drafter.propose(2) == (1, 2)
    assert drafter.propose(-1) == ()


def test_an_offer_is_good_for_one_round_and_not_after_a_rewind() -> None:
    drafter = OfferedDrafter(PRICES)
    drafter.offer((1, 2))
    drafter.accept([1, 5])
    assert drafter.propose(5) == ()
    assert (drafter.stats.proposed, drafter.stats.kept, drafter.stats.kept_at) == (2, 1, (1, 0))
    drafter.offer((3,))
    drafter.rewind(1)
    assert drafter.propose(5) == ()


def test_a_device_that_offers_nothing_leaves_copies_alone() -> None:
    assert isinstance(drafter_for([1, 2, 3], Prices(FLAT)), NgramDrafter)


def test_a_copy_that_goes_on_is_taken_before_an_offer_and_the_device_rests_meanwhile() -> None:
    text = list(range(30))
    drafter = drafter_for([*text, *text[:8]], PRICES)
    at = 8
    for turn in range(4):
        assert (drafter.ahead(7) > 0) == (turn == 0)
        drafter.offer((99, 99))
        proposal = drafter.propose(4)
        assert proposal == tuple(text[at : at + len(proposal)])
        drafter.accept([*proposal, text[at + len(proposal)]])
        at += len(proposal) + 1
    assert drafter.stats.kept == drafter.stats.proposed > 0


def test_where_nothing_repeats_the_offer_is_proposed_and_a_broken_copy_wakes_the_device() -> None:
    drafter = drafter_for([1, 2, 3, 4, 1, 2], PRICES)
    drafter.offer((50, 51, 52))
    assert drafter.propose(7) == (50, 51, 52)
    drafter.accept([50, 7])
    assert drafter.ahead(7) > 0


@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_replies_are_the_same_whatever_is_offered(rng: random.Random, vocab: int) -> None:
    def model(tokens: list[int]) -> int:
        return hash(tuple(tokens[-3:])) % vocab

    tokens = [1, 2, 3]
    drafter = drafter_for(tokens, PRICES)
    while len(tokens) < 60:
        proposal = drafter.propose(4)
        ahead = drafter.ahead(5)
        picks = [model([*tokens, *proposal[:row]]) for row in range(len(proposal) + 1)]
        got = verify(proposal, picks).tokens
        tokens += got
        drafter.accept(got)
        drafter.offer([rng.randrange(vocab) for _ in range(ahead)])
    plain = [1, 2, 3]
    while len(plain) < len(tokens):
        plain.append(model(plain))
    assert tokens == plain


def test_the_expected_number_kept_is_the_sum_over_depths() -> None:
    assert expected(0.5, 3) == 0.875
    assert expected(1.0, 4) == 4
    assert expected(0.9, 0) == 0
