"""Prompts tokenised from where they differ have the ids they would have had alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.api.prompts import KEPT, SMALL, RememberingTokenizer
from onecopy.runtime.models import list_models
from onecopy.runtime.models.gguf_header import read_header
from onecopy.runtime.models.gguf_vocab import tokenizer_of
from onecopy.runtime.text.tokenizer import Tokenizer

from tests.support.tokens import byte_tokenizer


class Counting(RememberingTokenizer):
    """Tells how much text went to the inner tokenizer."""

    def __init__(self, source: Tokenizer) -> None:
        super().__init__(source)
        self.inner = Counted(source.inner)

    @property
    def read(self) -> int:
        total: int = self.inner.read
        return total


class Counted:
    def __init__(self, inner: object) -> None:
        self.wrapped, self.read = inner, 0

    def encode(self, text: str, **options: bool) -> object:
        self.read += len(text)
        return self.wrapped.encode(text, **options)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: object) -> None:
        if name == "encode_special_tokens":
            setattr(self.wrapped, name, value)
        else:
            object.__setattr__(self, name, value)


def said(*texts: str) -> str:
    return "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts)


LONG = [f"message {i} " + "héllo wörld 東京 " * 60 for i in range(8)]

parts = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|im_", "|>", " ", "\n", "user\n", "a", "ab", "é", "東", "x" * 40, "<think>"]
)


@given(st.lists(st.lists(parts, max_size=12), min_size=1, max_size=5))
def test_the_ids_are_those_of_the_text_alone(texts: list[list[str]]) -> None:
    tokenizer = RememberingTokenizer(byte_tokenizer())
    fresh = byte_tokenizer()
    for pieces in texts:
        text = said(LONG[0]) + "".join(pieces)
        assert tokenizer.encode(text) == fresh.encode(text)


@pytest.mark.model
@given(st.lists(st.lists(parts, max_size=12), min_size=1, max_size=5))
def test_the_bundled_vocabulary_gives_the_same_ids(texts: list[list[str]]) -> None:
    tokenizer, fresh = RememberingTokenizer(bundled()), bundled()
    for pieces in texts:
        text = said(LONG[0]) + "".join(pieces)
        assert tokenizer.encode(text) == fresh.encode(text)


def bundled(kept: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006
    if not kept:
        kept.append(tokenizer_of(read_header(list_models()[0].path)))
    return kept[0]


def test_a_turn_reads_its_new_text_only() -> None:
    tokenizer = Counting(byte_tokenizer())
    tokenizer.encode(said(*LONG))
    before = tokenizer.read
    tokenizer.encode(said(*LONG, "new"))
    assert tokenizer.read - before < 2 * len(said("new")) + len("<|im_end|>\n")


def test_many_forks_read_the_shared_text_once() -> None:
    tokenizer = Counting(byte_tokenizer())
    for child in range(20):
        tokenizer.encode(said(*LONG, f"child {child}"))
    assert tokenizer.read < len(said(*LONG)) + 20 * 80


def test_small_texts_and_plain_texts_are_not_remembered() -> None:
    tokenizer, fresh = RememberingTokenizer(byte_tokenizer()), byte_tokenizer()
    long = said(*LONG)
    tokenizer.encode(long)
    for text in (long, "x" * (SMALL - 1)):
        assert tokenizer.encode(text, special=False) == fresh.encode(text, special=False)
        assert tokenizer.encode(text, bos=True) == fresh.encode(text, bos=True)
        assert tokenizer.encode(text) == fresh.encode(text)


def test_what_is_remembered_is_bounded() -> None:
    tokenizer = Counting(byte_tokenizer())
    first = said("first " + "x" * (KEPT // 2))
    for text in (first, said("second " + "y" * (KEPT // 2)), said("third")):
        tokenizer.encode(text)
    before = tokenizer.read
    tokenizer.encode(first)
    assert tokenizer.read - before > KEPT // 2


def test_threads_may_share_it() -> None:
    tokenizer, fresh = RememberingTokenizer(byte_tokenizer()), byte_tokenizer()
    texts = [said(*LONG[: 1 + i % 8], f"child {i}") for i in range(64)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(tokenizer.encode, texts))
    assert found == [fresh.encode(text) for text in texts]


def test_everything_else_is_the_sources() -> None:
    source = byte_tokenizer()
    tokenizer = RememberingTokenizer(source)
    every = range(source.vocab_size)
    assert [tokenizer.token_bytes(i) for i in every] == [source.token_bytes(i) for i in every]
    assert [tokenizer.is_special(i) for i in every] == [source.is_special(i) for i in every]
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.names) == (source.eos_ids, source.bos_id, source.names)
