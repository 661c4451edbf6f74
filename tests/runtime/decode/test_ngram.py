from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.decode.drafts import shared_prefix
from onecopy.runtime.decode.ngram import NgramDrafter

CHEAP = [1.0 + 0.01 * width for width in range(9)]
DEAR = [1.0, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8, 3.1]


def replay(drafter: NgramDrafter, reply: Sequence[int], limit: int = 7) -> int:
    """Rounds it takes to deliver `reply` with the drafter's help."""
    at = rounds = 0
    while at < len(reply):
        kept = shared_prefix(drafter.propose(limit), reply[at:])
        drafter.accept(reply[at : at + kept + 1])
        at, rounds = at + kept + 1, rounds + 1
    return rounds


def test_what_followed_last_time_is_proposed() -> None:
    drafter = NgramDrafter([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], CHEAP)
    assert drafter.propose(4) == (4, 5, 6, 7)


def test_nothing_is_proposed_without_a_match() -> None:
    for tokens in ([], [1], [1, 1], [1, 2, 3, 4, 5], [1, 2, 3, 9, 3]):
        assert NgramDrafter(tokens, CHEAP).propose(4) == ()


def test_the_longest_match_wins_over_the_latest() -> None:
    drafter = NgramDrafter([1, 2, 3, 4, 50, 9, 9, 7, 3, 4, 60, 8, 8, 1, 2, 3, 4], CHEAP)
    assert drafter.propose(1) == (50,)


def test_the_latest_of_equal_matches_wins() -> None:
    drafter = NgramDrafter([1, 2, 50, 7, 1, 2, 60, 8, 1, 2], CHEAP)
    assert drafter.propose(1) == (60,)


def test_a_copy_goes_on_where_it_is_when_a_later_place_looks_the_same() -> None:
    first, second = [*range(100, 140)], [*range(110, 118), 999]
    drafter = NgramDrafter([*first, 7, *second, 8, *range(100, 110)], CHEAP)
    reply = [*range(110, 140)]
    assert replay(drafter, reply) == 4


def test_a_repeating_end_is_continued_past_the_end() -> None:
    drafter = NgramDrafter([9, 8, 5, 6, 5, 6, 5, 6, 5, 6], CHEAP)
    assert drafter.propose(7) == (5, 6, 5, 6, 5, 6, 5)


def test_copying_a_long_text_takes_a_round_for_every_full_width() -> None:
    rng = random.Random(1)
    text = [rng.randrange(5000) for _ in range(800)]
    drafter = NgramDrafter([*text, 1, 2], CHEAP)
    drafter.accept(text[:3])
    assert replay(drafter, text[3:]) <= 800 / 8 + 3
    assert drafter.stats.kept == drafter.stats.proposed > 600


def test_misleading_matches_are_soon_left_alone() -> None:
    rng = random.Random(2)
    reply = [rng.randrange(30) for _ in range(3000)]
    drafter = NgramDrafter([rng.randrange(30) for _ in range(1000)], DEAR)
    replay(drafter, reply)
    assert drafter.stats.rounds < 100


def test_what_failed_is_tried_again_but_rarely() -> None:
    rng = random.Random(2)
    pairs = [token for _ in range(2000) for token in (1, 2, rng.randrange(10, 90_000))]
    drafter = NgramDrafter(pairs[:900], [1.0, 1.1, 1.2])
    replay(drafter, pairs[900:3000])
    before = drafter.stats.rounds
    replay(drafter, pairs[3000:])
    # A thousand pairs looked familiar in the second half, and what follows them never was.
    assert 20 < drafter.stats.rounds - before < 100


def test_a_proposal_that_was_rewound_teaches_nothing() -> None:
    drafter = NgramDrafter([1, 2, 3, 4, 1, 2], CHEAP)
    assert drafter.propose(2) == (3, 4)
    drafter.rewind(6)
    drafter.accept((9,))
    assert drafter.stats.rounds == 0


def test_drafts_come_back_once_copies_pay_again() -> None:
    rng = random.Random(3)
    noise = [rng.randrange(30) for _ in range(1500)]
    text = [rng.randrange(100, 9000) for _ in range(400)]
    drafter = NgramDrafter([*text, *noise[:500]], DEAR)
    replay(drafter, noise[500:])
    drafter.accept(text[:6])
    assert replay(drafter, text[6:]) < 200


TOKENS = st.lists(st.integers(0, 3), max_size=80)


@given(TOKENS, TOKENS)
def test_an_index_built_at_once_proposes_like_one_grown_token_by_token(prompt: list[int], more: list[int]) -> None:
    grown = NgramDrafter(prompt, CHEAP)
    for token in more:
        grown.accept((token,))
    built = NgramDrafter([*prompt, *more], CHEAP)
    assert len(grown) == len(built)
    # The grown one may also know the place it would be copying from, which can only lengthen the match.
    assert bool(grown.propose(5)) >= bool(built.propose(5))


@given(TOKENS)
def test_every_proposal_follows_an_earlier_copy_of_the_end(tokens: list[int]) -> None:
    proposal = NgramDrafter(tokens, CHEAP).propose(1)
    followed = [tokens[i + 2] for i in range(len(tokens) - 2) if tokens[i : i + 2] == tokens[-2:]]
    assert bool(proposal) == bool(followed)
    assert not proposal or proposal[0] in followed


@given(TOKENS, TOKENS, TOKENS)
def test_after_a_rewind_only_the_remaining_tokens_are_copied(
    kept: list[int], gone: list[int], after: list[int]
) -> None:
    drafter = NgramDrafter(kept, CHEAP)
    drafter.accept([token + 10 for token in gone])
    drafter.rewind(len(kept))
    drafter.accept(after)
    assert len(drafter) == len(kept) + len(after)
    assert all(token < 10 for token in drafter.propose(6))


def test_a_fork_learns_on_its_own() -> None:
    parent = NgramDrafter([1, 2, 3, 4, 1, 2], CHEAP)
    child = parent.fork()
    child.accept((77, 78, 1, 2))
    assert child.propose(2) == (77, 78)
    assert parent.propose(2) == (3, 4)


def test_the_index_grows_with_the_reply_and_keeps_what_it_knew() -> None:
    rng = random.Random(4)
    head = [rng.randrange(50_000) for _ in range(40)]
    drafter = NgramDrafter(head, CHEAP)
    for _ in range(5000):
        drafter.accept((rng.randrange(50_000),))
    drafter.accept(head[:8])
    assert drafter.propose(4) == tuple(head[8:12])


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_proposal_keeps_to_its_limit(limit: int) -> None:
    assert len(NgramDrafter([5] * 20, CHEAP).propose(limit)) == limit
