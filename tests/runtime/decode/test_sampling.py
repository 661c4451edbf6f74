from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from onecopy.runtime.decode import sampling as module
from onecopy.runtime.decode.counts import TokenCounts
from onecopy.runtime.decode.sampling import pick
from onecopy.runtime.decode.want import Pick, Want, wants_for
from onecopy.runtime.turn import Sampling

VOCAB = 12
DRAWS = 6000
LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 0.25, 0.75, 1.25, -4.0], np.float32)


def picks_of(logits: NDArray[np.float32], wants: list[Want]) -> list[Pick]:
    picked = pick(mx.array(np.atleast_2d(logits).astype(np.float32)), wants)
    mx.eval(*picked.arrays)
    return picked.resolve()


def counts_of(sampling: Sampling, **more: object) -> NDArray[np.int64]:
    """How often each token of the small vocabulary is picked over many positions of one seed."""
    wants = [Want(sampling, position, **more) for position in range(DRAWS)]  # type: ignore[arg-type]
    tokens = [p.token for p in picks_of(np.tile(LOGITS, (DRAWS, 1)), wants)]
    return np.bincount(tokens, minlength=VOCAB)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weight = np.exp(logits - logits.max())
    return weight / weight.sum()


def reference(sampling: Sampling) -> NDArray[np.float64]:
    """The distribution the filters leave, the slow and obvious way."""
    probs = softmax(LOGITS.astype(np.float64) / sampling.temperature)
    order = np.argsort(-probs)
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
        probs /= probs.sum()
    before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
    probs[order[before >= sampling.top_p]] = 0
    probs[probs < sampling.min_p * probs.max()] = 0
    return probs / probs.sum()


def assert_drawn_from(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> None:
    assert not counts[probs == 0].any()
    expected = probs[probs > 0] * DRAWS
    chi = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
    # The 99.99 % points of chi-square are below freedom + 5.3 sqrt(freedom) + 10 for these sizes.
    freedom = len(expected) - 1
    assert chi < freedom + 5.3 * freedom**0.5 + 10


FILTERS = [
    Sampling(1),
    Sampling(2, temperature=0.5),
    Sampling(3, temperature=2.0),
    Sampling(4, top_k=4),
    Sampling(5, top_p=0.7),
    Sampling(6, min_p=0.3),
    Sampling(7, temperature=1.5, top_k=6, top_p=0.8),
    Sampling(8, temperature=0.8, top_k=8, top_p=0.95, min_p=0.2),
    Sampling(9, top_p=1e-9),
    Sampling(10, top_k=500),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_picks_follow_the_filtered_softmax(sampling: Sampling) -> None:
    assert_drawn_from(counts_of(sampling), reference(sampling))


def test_picks_follow_the_softmax_over_seeds_too() -> None:
    wants = [Want(Sampling(seed), 7) for seed in range(DRAWS)]
    tokens = [p.token for p in picks_of(np.tile(LOGITS, (DRAWS, 1)), wants)]
    assert_drawn_from(np.bincount(tokens, minlength=VOCAB), softmax(LOGITS.astype(np.float64)))


def test_successive_positions_are_independent() -> None:
    wants = [Want(Sampling(11), position) for position in range(DRAWS)]
    logits = np.zeros((DRAWS, 2), np.float32)
    bits = np.array([p.token for p in picks_of(logits, wants)])
    pairs = np.bincount(bits[:-1] * 2 + bits[1:], minlength=4)
    assert np.abs(pairs - DRAWS / 4).max() < 5 * (DRAWS * 3 / 16) ** 0.5


def test_an_unlikely_token_is_not_carried_in_by_the_noise() -> None:
    logits = np.full((200, 5000), -40.0, np.float32)
    logits[:, 17] = 0
    assert {p.token for p in picks_of(logits, [Want(Sampling(5), at) for at in range(200)])} == {17}


def test_temperature_zero_takes_the_best_and_the_lowest_of_equals() -> None:
    logits = np.array([[0, 3, 1, 3], [2, 2, 2, 2]], np.float32)
    greedy = Sampling(1, temperature=0.0)
    assert [p.token for p in picks_of(logits, [Want(greedy, 0), Want(greedy, 1)])] == [1, 0]
    asked = replace(greedy, logprobs=1)
    assert [p.token for p in picks_of(logits, [Want(asked, 0), Want(asked, 1)])] == [1, 0]


def test_top_k_one_and_a_vanishing_temperature_are_greedy() -> None:
    for sampling in (Sampling(1, top_k=1), Sampling(1, temperature=1e-6)):
        assert counts_of(sampling)[0] == DRAWS


def test_tokens_equal_to_the_last_one_kept_are_kept() -> None:
    logits = np.array([3, 1, 1, 1, 0], np.float32)
    tokens = {
        p.token for p in picks_of(np.tile(logits, (500, 1)), [Want(Sampling(1, top_k=2), at) for at in range(500)])
    }
    assert tokens == {0, 1, 2, 3}


def test_bias_bans_and_forces() -> None:
    banned = counts_of(Sampling(1, logit_bias=((0, -100.0), (1, -100.0))))
    assert banned[0] == banned[1] == 0
    assert banned[2] > 0
    assert counts_of(Sampling(1, logit_bias=((7, 100.0),)))[7] == DRAWS


def test_bias_for_an_id_the_model_lacks_changes_nothing() -> None:
    assert (counts_of(Sampling(1, logit_bias=((999, 100.0), (-1, 100.0)))) == counts_of(Sampling(1))).all()


@pytest.mark.parametrize("packed", [False, True])
def test_only_masked_in_tokens_are_picked(packed: bool) -> None:
    allowed = np.zeros(32, np.bool_)
    allowed[[3, 5, 9]] = True
    mask = np.packbits(allowed, bitorder="little").view(np.int32) if packed else allowed[:10]
    probs = softmax(np.where(allowed[:VOCAB], LOGITS, -np.inf).astype(np.float64))
    assert_drawn_from(counts_of(Sampling(1), mask=mask), probs)
    assert counts_of(Sampling(1, temperature=0.0), mask=mask)[9] == DRAWS
    assert set(np.flatnonzero(counts_of(Sampling(1, top_k=8), mask=mask))) == {3, 5, 9}


def test_a_mask_that_allows_nothing_fails_where_the_want_is_made() -> None:
    with pytest.raises(ValueError, match="position 4"):
        Want(Sampling(1), 4, mask=np.zeros(1, np.int32))


def scaled_by_hand(sampling: Sampling, prompt: list[int], reply: list[int]) -> NDArray[np.float64]:
    logits = LOGITS.astype(np.float64)
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    for token in set(prompt) | set(reply):
        logits[token] *= sampling.repetition_penalty if logits[token] <= 0 else 1 / sampling.repetition_penalty
    for token in set(reply):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * reply.count(token)
    return logits


PENALTIES = [
    Sampling(1, presence_penalty=1.0),
    Sampling(2, frequency_penalty=0.5),
    Sampling(3, repetition_penalty=1.7),
    Sampling(4, presence_penalty=-1.0, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias=((0, 1.5), (3, -3.0))),
]


@pytest.mark.parametrize("sampling", PENALTIES, ids=str)
def test_penalties_change_the_distribution_as_written(sampling: Sampling) -> None:
    prompt, reply = [0, 6, 6, 11], [1, 1, 2, 6, 1]
    counts = TokenCounts.wanted(sampling, prompt)
    assert counts is not None
    counts.extend(reply)
    probs = softmax(scaled_by_hand(sampling, prompt, reply))
    assert_drawn_from(counts_of(sampling, counts=counts.seen()), probs)


def test_logprobs_are_of_the_raw_model_distribution() -> None:
    sampling = Sampling(1, temperature=0.3, top_k=2, logit_bias=((11, 50.0),), logprobs=3)
    (got,) = picks_of(LOGITS, [Want(sampling, 5)])
    expected = np.log(softmax(LOGITS.astype(np.float64)))
    assert got.token == 11
    assert got.logprob == pytest.approx(expected[11], abs=1e-5)
    assert [token for token, _ in got.top] == [0, 1, 10]
    assert [value for _, value in got.top] == pytest.approx(expected[[0, 1, 10]].tolist(), abs=1e-5)


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (1, 1), (12, 12), (20, 12)])
def test_logprobs_gives_as_many_alternatives_as_asked_or_exist(asked: int, given: int) -> None:
    (got,) = picks_of(LOGITS, [Want(Sampling(1, logprobs=asked), 5)])
    assert len(got.top) == given
    assert got.logprob is not None


def test_rows_without_logprobs_carry_none_beside_rows_with() -> None:
    wants = [Want(Sampling(1), 0), Want(Sampling(1, logprobs=2), 0), Want(Sampling(1), 0)]
    got = picks_of(np.tile(LOGITS, (3, 1)), wants)
    assert [p.logprob is None for p in got] == [True, False, True]
    assert [len(p.top) for p in got] == [0, 2, 0]


def mixed_rows(vocab: int, rows: int, seed: int) -> tuple[NDArray[np.float32], list[Want]]:
    rng = random.Random(seed)
    logits = np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)
    return logits, [mixed_want(rng, vocab, row) for row in range(rows)]


def mixed_want(rng: random.Random, vocab: int, row: int) -> Want:
    sampling = Sampling(
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 0.7, 1.0, 4.0]),
        top_p=rng.choice([1.0, 0.9, 0.999]),
        top_k=rng.choice([0, 1, 40]),
        min_p=rng.choice([0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.1]),
        logit_bias=rng.choice([(), ((rng.randrange(vocab), 4.0),)]),
        logprobs=rng.choice([None, 0, 5]),
    )
    counts = TokenCounts.wanted(sampling, [rng.randrange(vocab) for _ in range(30)])
    if counts is not None:
        counts.extend(rng.randrange(vocab) for _ in range(10))
    mask = np.array([rng.random() < 0.5 for _ in range(vocab)]) if rng.random() < 0.3 else None
    return Want(sampling, rng.randrange(1 << 20), counts.seen() if counts else None, mask)


def flat_rows(vocab: int, rows: int) -> tuple[NDArray[np.float32], list[Want]]:
    """top_p keeps most tokens, so the threshold lies far down."""
    logits, _ = mixed_rows(vocab, rows, seed=4)
    return logits / 10, [Want(Sampling(5, top_p=0.95, logprobs=1), row) for row in range(rows)]


def plateau_rows(vocab: int, rows: int) -> tuple[NDArray[np.float32], list[Want]]:
    """More tokens equal the last one kept than a sort window holds."""
    return np.zeros((rows, vocab), np.float32), [Want(Sampling(5, top_k=3), row) for row in range(rows)]


@pytest.mark.parametrize("vocab", [37, 1003, 3001])
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(vocab: int) -> None:
    logits, wants = mixed_rows(vocab, 24, seed=vocab)
    together = picks_of(logits, wants)
    for row, want in enumerate(wants):
        assert picks_of(logits[row], [want]) == [together[row]]
    order = list(range(24))
    random.Random(1).shuffle(order)
    assert picks_of(logits[order], [wants[row] for row in order]) == [together[row] for row in order]


@pytest.mark.parametrize("rows", [mixed_rows(700, 64, seed=3), flat_rows(700, 64), plateau_rows(700, 64)])
def test_a_small_sort_window_never_changes_a_pick(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[NDArray[np.float32], list[Want]]
) -> None:
    wide = picks_of(*rows)
    monkeypatch.setattr(module, "_NEAR", 64)
    assert picks_of(*rows) == wide


def test_picks_stay_lazy_until_resolved() -> None:
    broken = mx.array(np.tile(LOGITS, (2, 1)))
    picked = pick(broken, [Want(Sampling(1, top_p=0.9, logprobs=2), 0), Want(Sampling(2, temperature=0.0), 0)])
    before = picked.resolve()
    mx.eval(*picked.arrays)
    assert picked.resolve() == before


def test_a_conversations_rows_are_asked_as_if_its_proposal_were_delivered() -> None:
    sampling = Sampling(1, temperature=0.0, frequency_penalty=2.0)
    counts = TokenCounts.wanted(sampling, [0])
    assert counts is not None
    wants = wants_for(sampling, 40, (0, 0), counts)
    assert [want.position for want in wants] == [40, 41, 42]
    assert [p.token for p in picks_of(np.tile(LOGITS, (3, 1)), list(wants))] == [0, 1, 1]
    assert len(counts) == 0


def test_masks_go_with_their_rows() -> None:
    masks = [None, np.array([False, True]), np.array([True])]
    wants = wants_for(Sampling(1, temperature=0.0), 0, (5, 5), masks=masks)
    assert [p.token for p in picks_of(np.tile(LOGITS[::-1], (3, 1)), list(wants))] == [11, 1, 0]
    with pytest.raises(ValueError, match="zip"):
        wants_for(Sampling(1), 0, (5, 5), masks=masks[:1])


@pytest.mark.parametrize("make", [lambda s: Sampling(s), lambda s: Sampling(s, temperature=0.8, top_p=0.95)])
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_a_seed_gives_its_picks_again_after_any_other_traffic(make: Callable[[int], Sampling], seed: int) -> None:
    wants = [Want(make(seed), at) for at in range(64)]
    rows = np.tile(LOGITS, (64, 1))
    first = picks_of(rows, wants)
    picks_of(*mixed_rows(50, 8, seed=9))
    mx.random.seed(1234)
    assert picks_of(rows, wants) == first
    assert picks_of(rows, [Want(make(seed ^ 1), at) for at in range(64)]) != first
