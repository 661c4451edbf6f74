"""The longest kept prefix, by token identity: compared with a search through everything."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.prefixes import END_SLACK, Prefixes
from onecopy.runtime.rows.segments import Segment, chain_tokens

SALT = b"a"


def root(index: Prefixes, n: int, tokens: list[int], salt: bytes = SALT) -> Segment:
    s = Segment(n, None, 0, 1 << 20, tokens=list(tokens))
    index.update(s, salt)
    return s


def child(index: Prefixes, n: int, parent: Segment, start: int, tokens: list[int]) -> Segment:
    s = Segment(n, parent, start, 1 << 20, tokens=list(tokens))
    parent.adopt(s)
    index.update(s, SALT)
    return s


def story(seed: int, n: int, words: int = 1000) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(words) for _ in range(n)]


def found(index: Prefixes, tokens: list[int], salt: bytes = SALT) -> tuple[int, set[int]]:
    match = index.longest(tokens, len(tokens), salt)
    return match.length, {s.id for s in match.holders}


def test_nothing_kept_is_nothing_found() -> None:
    assert found(Prefixes(), story(1, 600)) == (0, set())


def test_a_partial_block_is_matched_to_the_token() -> None:
    index = Prefixes()
    tokens = story(1, 700)
    root(index, 1, tokens)
    for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 699, 700):
        assert found(index, [*tokens[:n], -1 % 5000]) == (n, {1})


def test_a_limit_leaves_the_last_token_out() -> None:
    index = Prefixes()
    tokens = story(1, 512)
    root(index, 1, tokens)
    assert index.longest(tokens, 511, SALT).length == 511


def test_all_that_hold_the_same_tokens_are_named() -> None:
    index = Prefixes()
    tokens = story(1, 300)
    root(index, 1, tokens)
    root(index, 2, tokens)
    assert found(index, tokens) == (300, {1, 2})


def test_a_child_is_found_through_its_parents_rows() -> None:
    index = Prefixes()
    tokens = story(1, 600)
    parent = root(index, 1, tokens)
    child(index, 2, parent, 512, [*tokens[512:520], 5000, 5001])
    assert found(index, [*tokens[:520], 5000, 7]) == (521, {2})
    assert found(index, [*tokens[:530], 7]) == (530, {1})


def test_another_salt_sees_nothing() -> None:
    index = Prefixes()
    root(index, 1, story(1, 300), b"b")
    assert found(index, story(1, 300)) == (0, set())
    assert found(index, story(1, 300), b"b") == (300, {1})


def test_rows_that_were_cut_are_not_found_any_more() -> None:
    index = Prefixes()
    tokens = story(1, 700)
    s = root(index, 1, tokens)
    del s.tokens[300:]
    index.update(s, SALT)
    assert found(index, tokens) == (300, {1})
    s.tokens += story(2, 400)
    index.update(s, SALT)
    assert found(index, tokens[:300] + story(2, 400)) == (700, {1})


def test_a_removed_segment_leaves_no_trace() -> None:
    index = Prefixes()
    s = root(index, 1, story(1, 700))
    index.remove(s)
    assert (len(index), found(index, story(1, 700)), index.salt(s)) == (0, (0, set()), None)
    assert all(not node.edges for node in index._roots.values())


def test_conversations_that_end_on_a_prefix_are_named_longest_first() -> None:
    index = Prefixes()
    tokens = story(1, 600)
    for n, stop in enumerate((300, 512, 560, 590), 1):
        root(index, n, tokens[:stop]).tip = f"c{n}"
    match = index.longest(tokens, 600, SALT)
    assert (match.length, [s.frontier for s in match.ends]) == (590, [590, 560, 512])
    busy = match.ends[0]
    busy.lease = 7
    assert [s.frontier for s in index.longest(tokens, 600, SALT).ends] == [560, 512]


def test_an_end_too_far_before_the_longest_prefix_is_not_named() -> None:
    index = Prefixes()
    tokens = story(1, 200)
    root(index, 1, tokens)
    root(index, 2, tokens[: 200 - END_SLACK]).tip = "short"
    root(index, 3, tokens[: 201 - END_SLACK]).tip = "near"
    assert [s.id for s in index.longest(tokens, 200, SALT).ends] == [3]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_longest_prefix_is_what_a_search_through_everything_finds(seed: int) -> None:
    draw = random.Random(seed)
    index, segments = Prefixes(), []
    texts = [story(seed, draw.randrange(1, 900), words=2)]
    for n in range(draw.randrange(1, 25)):
        base = draw.choice(texts)
        texts.append(base[: draw.randrange(len(base) + 1)] + story(n, draw.randrange(1, 400), words=2))
        match = index.longest(texts[-1], draw.randrange(len(texts[-1])), SALT)
        parent, start = (match.holders[0] if match.holders else None), match.length // BLOCK * BLOCK
        parent = next(s for s in parent.ancestors() if s.start < start) if parent is not None and start else None
        made = Segment(n, parent, start if parent is not None else 0, 1 << 20)
        made.tokens = texts[-1][made.start :]
        if parent is not None:
            parent.adopt(made)
        index.update(made, SALT)
        segments.append(made)
        if draw.random() < 0.3:
            victim = draw.choice([s for s in segments if not s.children])
            if victim.parent is not None:
                victim.parent.disown(victim)
            index.remove(victim)
            segments.remove(victim)
    for _ in range(5):
        base = draw.choice(texts)
        prompt = base[: draw.randrange(len(base) + 1)] + story(draw.randrange(99), 40, words=2)
        kept = [chain_tokens(s, s.frontier) for s in segments]
        longest = max((common(prompt, k) for k in kept), default=0)
        length, holders = found(index, prompt)
        assert length == longest
        for s in segments:
            if s.id in holders:
                assert common(prompt, chain_tokens(s, s.frontier)) == longest


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
