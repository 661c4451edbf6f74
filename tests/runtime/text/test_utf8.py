"""Bytes to characters: only whole characters leave, whatever the split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.text.utf8 import Utf8

from tests.support.tokens import cut

FAMILY = "\U0001f468‍\U0001f469‍\U0001f467‍\U0001f466"
HARD = ["\U0001f600", FAMILY, "\U0001f1e9\U0001f1ea", "漢字かな", "e\u0301\u0308", "naïve — “quoted”"]


def streamed(parts: list[bytes]) -> list[str]:
    decoder = Utf8()
    return [*map(decoder.feed, parts), decoder.flush()]


@pytest.mark.parametrize("text", HARD)
def test_byte_by_byte_gives_whole_characters_only(text: str) -> None:
    pieces = streamed([bytes([b]) for b in text.encode()])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_any_split_of_any_bytes_reads_as_the_whole(raw: bytes, places: list[int]) -> None:
    assert "".join(streamed(cut(raw, places))) == raw.decode("utf-8", "replace")


@given(st.text(max_size=20), st.lists(st.integers(0, 80)))
def test_valid_text_never_shows_a_replacement(text: str, places: list[int]) -> None:
    assert "".join(streamed(cut(text.encode(), places))) == text


def test_a_character_cut_at_the_end_is_one_replacement() -> None:
    decoder = Utf8()
    assert decoder.feed("é\U0001f600".encode()[:-1]) == "é"
    assert decoder.pending
    assert decoder.flush() == "\ufffd"
    assert not decoder.pending
    assert decoder.feed(b"ok") == "ok"


def test_bytes_that_cannot_begin_a_character_are_replaced_at_once() -> None:
    decoder = Utf8()
    assert decoder.feed(b"a\xffb") == "a\ufffdb"
    assert not decoder.pending


def test_surrogate_bytes_never_become_a_lone_surrogate() -> None:
    text = "".join(streamed([b"\xed", b"\xa0", b"\x80"]))
    assert set(text) == {"\ufffd"}


def test_eight_streams_do_not_share_state() -> None:
    decoders = [Utf8() for _ in range(8)]
    out = [""] * 8
    for byte in range(4):
        for i, decoder in enumerate(decoders):
            out[i] += decoder.feed(chr(0x1F600 + i).encode()[byte : byte + 1])
    assert out == [chr(0x1F600 + i) for i in range(8)]
