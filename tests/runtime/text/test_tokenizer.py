"""The tokenizer's own promises, on every kind of vocabulary it wraps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onecopy.runtime.models.gguf_header import Header, Quant, TensorInfo, read_header
from onecopy.runtime.models.gguf_vocab import SPLITS, tokenizer_of
from onecopy.runtime.models.hf_vocab import tokenizer_of as hf_tokenizer_of
from onecopy.runtime.models.names import resolve
from onecopy.runtime.text.tokenizer import Tokenizer
from tokenizers import pre_tokenizers

from tests.support.checkpoints import write_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\n\nlines \r\n",
    "naïve façade — “quotes”",
    "日本語のテキスト 한국어 العربية हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 1️⃣",
    "def f(x):\n    return x**2  # 12345",
    "I'm we'll THEY'RE",
    "\u0000\u0001\ufeff\u200b",
]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def header(**metadata: Any) -> Header:
    """A GGUF header with only a vocabulary in it."""
    tokens = metadata["tokens"]
    rows = TensorInfo("token_embd.weight", (len(tokens), 8), Quant("F32", 1, 4), 0, 0)
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return Header(Path("x.gguf"), keys, {"token_embd.weight": rows})


def byte_level(pre: str = "gpt2", **metadata: Any) -> Tokenizer:
    tokens = [*ALPHABET, "he", "ll", "hell", "<|im_end|>", "<tool>", "[PAD]"]
    merges = ["h e", "l l", "he ll"]
    kinds = [1] * (len(tokens) - 3) + [3, 4, 5]
    base = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "token_type": kinds, "eos_token_id": 259}
    return tokenizer_of(header(**(base | metadata)))


def sentencepiece(**metadata: Any) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "e", "l", "o", "▁h", "el", "lo"]
    pieces += ["▁hel", "▁hello", "é"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) - 259)]
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    base = {"model": "llama", "tokens": pieces, "token_type": kinds, "scores": scores, **ids}
    return tokenizer_of(header(**(base | metadata)))


def hf(path: Path) -> Tokenizer:
    write_tokenizer(path)
    found = hf_tokenizer_of(path, [])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return tokenizer_of(read_header(resolve("smollm2").path))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level, sentencepiece, lambda: byte_level("llama-bpe")])
def test_text_survives_encode_and_decode(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_bundled_vocabulary_keeps_every_text(bundled: Tokenizer, text: str) -> None:
    ids = bundled.encode(text, special=False)
    assert bundled.decode(ids) == text
    assert b"".join(map(bundled.token_bytes, ids)) == text.encode()


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_the_bytes_of_the_tokens_spell_the_text(text: str) -> None:
    tokenizer = BYTE_LEVEL
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, special=False))) == text.encode()


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_sentencepiece_bytes_spell_the_text_after_one_leading_space(text: str) -> None:
    tokenizer = SENTENCEPIECE
    spelled = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, special=False)))
    assert spelled == (b" " + text.encode() if text else b"")


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def test_merges_apply_in_their_order() -> None:
    assert BYTE_LEVEL.encode("hello") == [258, *BYTE_LEVEL.encode("o")]


def test_sentencepiece_merges_follow_the_scores() -> None:
    assert [SENTENCEPIECE.token_text(i) for i in SENTENCEPIECE.encode("hello")] == ["▁hello"]


def test_a_character_no_piece_covers_becomes_its_bytes() -> None:
    assert [SENTENCEPIECE.token_bytes(i) for i in SENTENCEPIECE.encode("h€")] == [b" h", b"\xe2", b"\x82", b"\xac"]


def test_a_token_may_hold_part_of_a_character() -> None:
    first = BYTE_LEVEL.encode("é")[0]
    assert BYTE_LEVEL.token_bytes(first) == b"\xc3"


def test_control_tokens_have_no_bytes_but_a_name() -> None:
    assert BYTE_LEVEL.is_special(259)
    assert BYTE_LEVEL.token_bytes(259) == b""
    assert BYTE_LEVEL.token_text(259) == "<|im_end|>"
    assert BYTE_LEVEL.token_id("<|im_end|>") == 259


def test_user_defined_tokens_are_text() -> None:
    assert BYTE_LEVEL.encode("a<tool>b")[1] == 260
    assert not BYTE_LEVEL.is_special(260)
    assert BYTE_LEVEL.token_bytes(260) == b"<tool>"


def test_unused_and_unknown_ids_have_no_bytes() -> None:
    assert BYTE_LEVEL.is_special(261)
    assert BYTE_LEVEL.token_bytes(261) == b""
    assert BYTE_LEVEL.token_bytes(99_999) == b""
    assert BYTE_LEVEL.token_text(99_999) == ""


def test_control_tokens_in_the_text_are_recognised_only_when_asked() -> None:
    assert BYTE_LEVEL.encode("a<|im_end|>") == [BYTE_LEVEL.encode("a")[0], 259]
    plain = BYTE_LEVEL.encode("a<|im_end|>", special=False)
    assert 259 not in plain
    assert BYTE_LEVEL.decode(plain) == "a<|im_end|>"


def test_reading_plain_text_never_changes_how_another_thread_reads() -> None:
    assert BYTE_LEVEL.encode("<|im_end|>", special=False) != [259]
    assert not BYTE_LEVEL.inner.encode_special_tokens
    assert BYTE_LEVEL.encode("<|im_end|>") == [259]


def test_decode_writes_control_tokens_only_when_asked() -> None:
    ids = BYTE_LEVEL.encode("a<|im_end|>b")
    assert BYTE_LEVEL.decode(ids) == "ab"
    assert BYTE_LEVEL.decode(ids, special=True) == "a<|im_end|>b"


def test_the_begin_token_is_added_when_the_vocabulary_wants_one() -> None:
    assert SENTENCEPIECE.encode("h", bos=True)[0] == SENTENCEPIECE.bos_id == 1
    assert 1 not in SENTENCEPIECE.encode("h")
    without = sentencepiece(add_bos_token=False)
    assert 1 not in without.encode("h", bos=True)


def test_declared_and_well_known_end_tokens_end_a_reply() -> None:
    assert SENTENCEPIECE.eos_ids == {2}
    assert byte_level(eos_token_id=5).eos_ids == {5, 259}
    assert byte_level(eot_token_id=6).eos_ids == {6, 259}


def test_ids_outside_the_vocabulary_are_not_end_tokens() -> None:
    assert byte_level(eos_token_id=10**6).eos_ids == {259}


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_split_keeps_every_text(pre: str) -> None:
    tokenizer = byte_level(pre)
    assert [tokenizer.decode(tokenizer.encode(text, special=False)) for text in TEXTS] == TEXTS


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt2", ["a", "Ġ12345", "'", "S"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "5", "'", "S"]),
        ("llama-bpe", ["a", "Ġ", "123", "45", "'S"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "5", "'S"]),
    ],
)
def test_each_split_cuts_digits_and_contractions_its_own_way(pre: str, pieces: list[str]) -> None:
    inner = byte_level(pre).inner
    assert [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str("a 12345'S")] == pieces


def test_a_directory_vocabulary_behaves_the_same(tmp_path: Path) -> None:
    tokenizer = hf(tmp_path)
    ids = tokenizer.encode("é<think><|im_end|>")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9", b"<think>", b""]
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.vocab_size) == ({257}, 256, 259)


@pytest.mark.model
def test_the_bundled_vocabulary_knows_its_special_tokens(bundled: Tokenizer) -> None:
    assert bundled.encode("<|im_start|>user\n") == [1, *bundled.encode("user\n")]
    assert bundled.eos_ids == {0, 2}
    assert bundled.names["eos_token"] == "<|im_end|>"
    assert bundled.vocab_size == 49152
    assert "<|im_start|>" in (bundled.template or "")
