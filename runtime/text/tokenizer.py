"""One tokenizer class for every source of a vocabulary (a Hugging Face directory, GGUF metadata).

Text to ids and back is the `tokenizers` library's work. What it does not offer is added here: the exact bytes one
token stands for (text is streamed by bytes, because a character may span tokens), and which ids are control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`; holds no state that a call changes.

    eos_ids: ids that end a reply. bos_id: id put before a bare prompt, or None. template: chat template (Jinja source)
    or None. names: what a template may call the special tokens ("bos_token", "eos_token", ...). control: ids that are
    control tokens beside those the vocabulary itself marks special.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        template: str | None = None,
        names: Mapping[str, str] | None = None,
        control: Iterable[int] = (),
    ) -> None:
        self.inner = inner
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self.template = template
        self.names = dict(names or {})
        self._added = {i: t.content for i, t in inner.get_added_tokens_decoder().items()}
        special = (i for i, t in inner.get_added_tokens_decoder().items() if t.special)
        self._special = frozenset(special) | frozenset(control)
        self._raw = _scheme(inner)
        inner.encode_special_tokens = False
        self._plain: tokenizers.Tokenizer | None = None

    @property
    def vocab_size(self) -> int:
        """Ids the vocabulary knows, added tokens included. A model's logits may be wider (padding rows)."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        """The ids of `text`. special: control tokens written in the text are recognised (a rendered chat template);
        False reads them as plain text. bos: add what the vocabulary puts around a bare prompt.
        """
        inner = self.inner if special else self._twin()
        return list(inner.encode(text, add_special_tokens=bos).ids)

    def _twin(self) -> tokenizers.Tokenizer:
        """The same vocabulary, which reads control tokens as plain text. Switching the one to and fro would change what
        another thread reads at that moment; two that are made at once are the same.
        """
        if self._plain is None:
            made = tokenizers.Tokenizer.from_str(self.inner.to_str())
            made.encode_special_tokens = True
            self._plain = made
        return self._plain

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`. special: write control tokens out instead of leaving them away."""
        return str(self.inner.decode(list(ids), skip_special_tokens=not special))

    def token_bytes(self, token: int) -> bytes:
        """The raw bytes `token` stands for; b"" for control tokens and unknown ids. Joined, they spell the text
        (after a sentencepiece vocabulary's one leading space, which `decode` strips).
        """
        if token in self._special:
            return b""
        if token in self._added:
            return self._added[token].encode()
        piece = self.inner.id_to_token(token)
        return self._raw(piece) if piece is not None else b""

    def token_text(self, token: int) -> str:
        """The name the vocabulary gives `token`, control tokens included ("<|im_end|>"); "" for unknown ids."""
        return self._added.get(token) or self.inner.id_to_token(token) or ""

    def token_id(self, name: str) -> int | None:
        """The id of the token called `name`, or None."""
        return self.inner.token_to_id(name)

    def is_special(self, token: int) -> bool:
        """Whether `token` is a control token: never part of the delivered text."""
        return token in self._special


def _scheme(inner: tokenizers.Tokenizer) -> Any:
    """How a vocabulary entry spells bytes, read from the decoder it would be joined with."""
    kinds = set(_kinds(json.loads(inner.decoder.__getstate__()))) if inner.decoder else set()
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return _sentencepiece
    return str.encode


def _kinds(decoder: dict[str, Any]) -> Iterable[str]:
    yield str(decoder.get("type"))
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _sentencepiece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE_MARK, " ").encode()


def _byte_level(piece: str) -> bytes:
    return b"".join(_BYTES[c] if c in _BYTES else c.encode() for c in piece)


def _byte_alphabet() -> dict[str, bytes]:
    """The printable character byte-level BPE writes for each byte (Radford et al. 2019, GPT-2): printable Latin-1
    bytes stand for themselves, the others for the code points from 256 on, in order.
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in plain]
    table = {chr(b): bytes([b]) for b in plain}
    return table | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
