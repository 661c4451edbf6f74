from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.decode.counts import TokenCounts
from onecopy.runtime.turn import Sampling

TOKENS = st.lists(st.integers(0, 200), max_size=150)


def as_dict(counts: TokenCounts) -> dict[int, int]:
    seen = counts.seen()
    return dict(zip(seen.ids.tolist(), seen.replies.tolist(), strict=True))


@given(TOKENS, TOKENS)
def test_the_reply_is_counted_and_the_prompt_only_seen(prompt: list[int], reply: list[int]) -> None:
    counts = TokenCounts(prompt)
    counts.extend(reply)
    assert as_dict(counts) == dict.fromkeys(prompt, 0) | Counter(reply)
    assert len(counts) == len(reply)


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_rewinding_is_as_if_the_tokens_had_never_come(
    prompt: list[int], kept: list[int], rejected: list[int], after: list[int]
) -> None:
    counts, plain = TokenCounts(prompt), TokenCounts(prompt)
    for tokens in (kept, rejected):
        counts.extend(tokens)
    counts.rewind(len(kept))
    counts.extend(after)
    plain.extend(kept + after)
    assert as_dict(counts) == as_dict(plain)


def test_a_snapshot_is_not_changed_by_later_tokens() -> None:
    counts = TokenCounts([1, 2])
    counts.push(2)
    seen = counts.seen()
    counts.extend([2, 3, 4])
    assert np.array_equal(seen.replies, [0, 1])
    assert np.array_equal(seen.ids, [1, 2])


@pytest.mark.parametrize(
    ("sampling", "ids"),
    [
        (Sampling(1), None),
        (Sampling(1, presence_penalty=0.5), []),
        (Sampling(1, frequency_penalty=-0.5), []),
        (Sampling(1, repetition_penalty=1.1), [3, 4]),
    ],
)
def test_only_a_repetition_penalty_reads_the_prompt(sampling: Sampling, ids: list[int] | None) -> None:
    counts = TokenCounts.wanted(sampling, [4, 3, 4])
    assert (None if counts is None else sorted(as_dict(counts))) == ids
