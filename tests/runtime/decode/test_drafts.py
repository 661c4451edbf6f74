from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.decode.counts import TokenCounts
from onecopy.runtime.decode.drafts import Drafter, DraftStats, Odds, Tally, Verdict, best_drafts, verify
from onecopy.runtime.decode.ngram import NgramDrafter
from onecopy.runtime.decode.sampling import pick
from onecopy.runtime.decode.want import wants_for
from onecopy.runtime.turn import Sampling

Model = Callable[[Sequence[int]], int]
COSTS = [1.0, 1.1, 1.15, 1.2, 1.25, 1.3, 1.33, 1.35]


class Guesser:
    """A drafter that proposes noise, or the truth, or a mix; right or wrong, it must not matter."""

    def __init__(self, rng: random.Random, vocab: int) -> None:
        self._rng, self._vocab, self.stats = rng, vocab, DraftStats()

    def propose(self, limit: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._vocab) for _ in range(self._rng.randint(0, limit)))

    def ahead(self, limit: int) -> int:
        return 0

    def offer(self, tokens: Sequence[int]) -> None:
        """Hears nothing."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Learns nothing."""

    def rewind(self, length: int) -> None:
        """Knows nothing."""


def drafted(model: Model, prompt: list[int], count: int, drafter: Drafter, limit: int = 7) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        proposal = drafter.propose(limit)
        picks = [model([*tokens, *proposal[:row]]) for row in range(len(proposal) + 1)]
        verdict = verify(proposal, picks)
        tokens.extend(verdict.tokens)
        drafter.accept(verdict.tokens)
    return tokens[len(prompt) : len(prompt) + count]


def undrafted(model: Model, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(tokens))
    return tokens[len(prompt) :]


def hashed_model(vocab: int, memory: int) -> Model:
    """The next token is a hash of the last `memory` ones: short memories repeat themselves, long ones never do."""
    return lambda tokens: hash(tuple(tokens[-memory:])) % vocab


@given(
    vocab=st.integers(1, 6),
    memory=st.integers(1, 5),
    prompt=st.lists(st.integers(0, 5), max_size=30),
    guess=st.one_of(st.none(), st.randoms(use_true_random=False)),
)
def test_drafted_replies_are_undrafted_replies(
    vocab: int, memory: int, prompt: list[int], guess: random.Random | None
) -> None:
    model = hashed_model(vocab, memory)
    drafter: Drafter = NgramDrafter(prompt, COSTS) if guess is None else Guesser(guess, vocab)
    assert drafted(model, prompt, 60, drafter) == undrafted(model, prompt, 60)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_keyed_sampling_with_penalties_gives_the_same_reply_drafted(temperature: float) -> None:
    sampling = Sampling(77, temperature=temperature, top_p=0.9, frequency_penalty=0.05, logprobs=2)
    table = mx.array(np.random.default_rng(1).normal(0, 2, (20, 20)).astype(np.float32))

    def reply(drafter: Drafter | None) -> list[tuple[int, float | None]]:
        tokens, out, counts = [3, 1, 4], list[tuple[int, float | None]](), TokenCounts()
        while len(out) < 80:
            proposal = drafter.propose(5) if drafter else ()
            wants = wants_for(sampling, len(tokens), proposal, counts)
            picks = pick(table[mx.array([tokens[-1], *proposal])], wants).resolve()
            kept = verify(proposal, [p.token for p in picks]).tokens
            counts.extend(kept)
            tokens.extend(kept)
            out.extend((p.token, p.logprob) for p in picks[: len(kept)])
            if drafter:
                drafter.accept(kept)
        return out[:80]

    plain = reply(None)
    ngram = NgramDrafter([3, 1, 4], COSTS)
    assert reply(ngram) == plain
    assert ngram.stats.proposed > 0
    assert reply(Guesser(random.Random(5), 20)) == plain


@pytest.mark.parametrize(
    ("proposal", "picks", "verdict"),
    [
        ((), [5], Verdict(0, (5,))),
        ((1, 2), [1, 2, 3], Verdict(2, (1, 2, 3))),
        ((1, 2), [1, 9, 3], Verdict(1, (1, 9))),
        ((1, 2), [9, 2, 3], Verdict(0, (9,))),
    ],
)
def test_verify_keeps_the_prefix_that_was_picked_and_one_more(
    proposal: tuple[int, ...], picks: list[int], verdict: Verdict
) -> None:
    assert verify(proposal, picks) == verdict


def test_verify_needs_a_pick_for_every_row() -> None:
    with pytest.raises(ValueError, match="3 picks"):
        verify((1, 2), [1, 2])


def test_more_is_drafted_the_more_is_kept_and_the_less_it_costs() -> None:
    depths = [best_drafts(rate, 7, COSTS) for rate in (0.01, 0.2, 0.5, 0.9, 1.0)]
    assert depths == sorted(depths)
    assert (depths[0], depths[-1]) == (0, 7)
    assert best_drafts(0.5, 7, [1, 2, 3, 4]) == 0
    assert best_drafts(0.5, 7, [cost + 0.6 * drafts for drafts, cost in enumerate(COSTS)]) == 0


def test_a_dear_rejection_makes_proposals_shorter_or_none() -> None:
    free = [best_drafts(rate, 7, COSTS) for rate in (0.3, 0.6, 0.8, 1.0)]
    dear = [best_drafts(rate, 7, COSTS, again=1.0) for rate in (0.3, 0.6, 0.8, 1.0)]
    assert all(d <= f for d, f in zip(dear, free, strict=True))
    assert dear[0] == 0
    assert dear[-1] == free[-1] == 7


def test_drafts_stay_within_the_limit_and_the_cost_table() -> None:
    assert best_drafts(1.0, 2, COSTS) == 2
    assert best_drafts(1.0, 50, COSTS) == len(COSTS) - 1
    assert best_drafts(1.0, 7, [1.0]) == 0


@given(st.floats(0, 1), st.integers(0, 7), st.lists(st.floats(0.01, 5), min_size=8, max_size=8))
def test_the_chosen_depth_yields_the_most_tokens_for_its_cost(rate: float, limit: int, steps: list[float]) -> None:
    costs = np.cumsum(steps).tolist()
    speed = [sum(rate**i for i in range(d + 1)) / costs[d] for d in range(limit + 1)]
    assert speed[best_drafts(rate, limit, costs)] == pytest.approx(max(speed))


def test_odds_follow_what_was_kept_and_forget() -> None:
    odds = Odds(prior=0.5)
    assert odds.rate == 0.5
    for _ in range(30):
        odds.record(0, rejected=True)
    low = odds.rate
    assert low < 0.15
    for _ in range(100):
        odds.rest()
    assert low < odds.rate < 0.5
    for _ in range(30):
        odds.record(4, rejected=False)
    assert odds.rate > 0.9


def test_a_proposal_cut_short_by_the_end_counts_no_rejection() -> None:
    cut, full = Odds(), Odds()
    cut.record(1, rejected=False)
    full.record(1, rejected=True)
    assert cut.rate > 0.5
    assert cut.rate > full.rate


def test_the_tally_counts_by_depth() -> None:
    tally = Tally()
    tally.add(3, 2)
    tally.add(1, 1)
    tally.add(4, 0)
    assert tally.stats == DraftStats(rounds=3, proposed=8, kept=3, kept_at=(2, 1, 0, 0))
