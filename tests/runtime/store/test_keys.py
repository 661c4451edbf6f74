from itertools import islice

from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.store.keys import ROOT, anchor_key, block_key, block_keys, fingerprint

PRINT = fingerprint({"weights": "a"})
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=1100)


@given(tokens, tokens)
def test_equal_keys_mean_equal_prefixes(a: list[int], b: list[int]) -> None:
    for i, (x, y) in enumerate(zip(block_keys(a, PRINT, b""), block_keys(b, PRINT, b""), strict=False)):
        assert (x == y) == (a[: 256 * (i + 1)] == b[: 256 * (i + 1)])


@given(st.integers(0, 1023))
def test_one_token_changes_its_block_and_every_later_key(at: int) -> None:
    before = list(range(1024))
    after = [*before[:at], 5000, *before[at + 1 :]]
    same = [x == y for x, y in zip(block_keys(before, PRINT, b""), block_keys(after, PRINT, b""), strict=True)]
    assert same == [i < at // 256 for i in range(4)]


def test_a_partial_block_has_no_block_key() -> None:
    assert len(list(block_keys(range(511), PRINT, b""))) == 1


def test_keys_are_made_one_at_a_time() -> None:
    assert len(list(islice(block_keys(range(10**7), PRINT, b""), 1))) == 1


def test_salt_and_fingerprint_separate_owners_and_models() -> None:
    block = range(256)
    other = fingerprint({"weights": "b"})
    keys = {block_key(ROOT, block, p, s) for p in (PRINT, other) for s in (b"", b"key-1", b"key-2")}
    assert len(keys) == 6


def test_an_anchor_is_never_mistaken_for_a_block() -> None:
    assert anchor_key(ROOT, range(256), PRINT, b"") != block_key(ROOT, range(256), PRINT, b"")


def test_a_fingerprint_does_not_depend_on_the_order_of_facts() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 2, "b": 1})
