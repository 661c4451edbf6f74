"""Kept states are found by the very tokens before them, in the salt they were kept under, and no others."""

from __future__ import annotations

from onecopy.runtime.rows.anchors import Anchors
from onecopy.runtime.rows.segments import Segment

TOKENS = [(7 * i) % 101 for i in range(600)]


def chain(*lengths: int) -> list[Segment]:
    """Segments one behind the other, with the first of `TOKENS`."""
    out: list[Segment] = []
    start = 0
    for i, n in enumerate(lengths):
        out.append(Segment(i + 1, out[-1] if out else None, start, 512, tokens=TOKENS[start : start + n]))
        start += n
    return out


def test_the_latest_state_within_the_limit_is_found_through_a_chain() -> None:
    first, second = chain(256, 200)
    kept = Anchors()
    for segment, position in ((first, 100), (first, 256), (second, 300), (second, 456)):
        kept.add(segment, position, b"")
    assert kept.latest(TOKENS, 599, b"") == (456, second)
    assert kept.latest(TOKENS, 455, b"") == (300, second)
    assert kept.latest(TOKENS, 299, b"") == (256, first)
    assert kept.latest(TOKENS, 99, b"") == (0, None)


def test_one_other_token_hides_every_state_behind_it() -> None:
    first, second = chain(256, 200)
    kept = Anchors()
    kept.add(first, 100, b"")
    kept.add(second, 300, b"")
    other = [*TOKENS[:200], 1000, *TOKENS[201:]]
    assert kept.latest(other, 599, b"") == (100, first)
    assert kept.latest([1000, *TOKENS[1:]], 599, b"") == (0, None)


def test_salts_share_nothing() -> None:
    (first,) = chain(256)
    kept = Anchors()
    kept.add(first, 100, b"one")
    assert kept.latest(TOKENS, 599, b"two") == (0, None)
    assert kept.latest(TOKENS, 599, b"one") == (100, first)


def test_what_is_removed_is_not_found_and_leaves_nothing() -> None:
    (first,), (twin,) = chain(256), chain(256)
    kept = Anchors()
    kept.add(first, 100, b"")
    kept.add(twin, 100, b"")
    kept.remove(first, 100)
    kept.remove(first, 100)
    assert kept.latest(TOKENS, 599, b"") == (100, twin)
    kept.remove(twin, 100)
    assert (kept.latest(TOKENS, 599, b""), len(kept)) == ((0, None), 0)
    assert not any((kept._holders, kept._keys, kept._positions))
