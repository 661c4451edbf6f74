"""Grammars that constrain a reply, through llguidance: which tokens may come next, as a bit mask over the vocabulary.

A grammar is compiled once and kept; each request walks its own cheap copy. Copies never affect each other.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from ..errors import BadRequest, Unsupported
from ..turn import Grammar
from .reasoning import Tags
from .scan import automaton
from .tokenizer import Tokenizer

Mask = NDArray[np.uint32]

LARGEST = 256 * 1024
# One space or a line break with indentation between JSON tokens: models can lay JSON out, but not fill a reply with it.
LAYOUT = {"whitespace_pattern": r"(\n[ ]{0,16}| ?)"}
_KEPT = 64


class Matcher(Protocol):
    """One reply's place in its grammar. Mutable; `fork` copies it."""

    def mask(self) -> Mask:
        """Bits of the tokens that may come next: uint32 [ceil(width / 32)], bit i of the whole is token i.

        Once the grammar is satisfied and can go no further, only the end tokens are set.
        """

    def accept(self, token: int) -> bool:
        """Take one token. False, and nothing changes, when it may not come here."""

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these could be taken one after the other. Changes nothing."""

    def rollback(self, tokens: int) -> None:
        """Take back the last accepted tokens (rejected drafts)."""

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may come."""

    @property
    def error(self) -> str | None:
        """Why the grammar gave up (a limit of its engine), in which case the reply can only end."""

    def fork(self) -> Matcher:
        """An independent copy at the same place."""


class GrammarMatcher:
    """Follows a compiled grammar from the first token on.

    known: ids below it are in the vocabulary. A model may have more, which drafts can propose; asked about one of
    them, the engine of the grammar would give up.
    """

    __slots__ = ("_ends", "_inner", "_known", "_past", "_words")

    def __init__(self, inner: LLMatcher, words: int, ends: frozenset[int], known: int) -> None:
        self._inner = inner
        self._known = known
        self._words = words
        self._ends = ends
        self._past = 0

    @property
    def finished(self) -> bool:
        return bool(self._inner.is_stopped())

    @property
    def error(self) -> str | None:
        return str(self._inner.get_error()).splitlines()[0] if self._inner.is_error() else None

    def mask(self) -> Mask:
        if self.finished:
            return mask_of(self._ends, self._words)
        found = np.frombuffer(self._inner.compute_bitmask(), np.uint32)
        return np.pad(found, (0, max(0, self._words - len(found))))[: self._words]

    def accept(self, token: int) -> bool:
        if self.finished:
            self._past += token in self._ends
            return token in self._ends
        return token < self._known and bool(self._inner.try_consume_tokens([token]) == 1)

    def accepts(self, tokens: Sequence[int]) -> int:
        if self.finished:
            return int(bool(tokens) and tokens[0] in self._ends)
        known = next((i for i, token in enumerate(tokens) if token >= self._known), len(tokens))
        return int(self._inner.validate_tokens(list(tokens[:known])))

    def rollback(self, tokens: int) -> None:
        past = min(tokens, self._past)
        self._past -= past
        if tokens > past:
            self._inner.rollback(tokens - past)

    def fork(self) -> GrammarMatcher:
        copy = GrammarMatcher(self._inner.deep_copy(), self._words, self._ends, self._known)
        copy._past = self._past
        return copy


class AfterThinking:
    """Lets thinking run free up to its closing tag; the grammar begins behind it. Thinking cannot end the reply."""

    __slots__ = ("_close", "_free", "_inner", "_spell", "_states", "_taken")

    def __init__(self, inner: GrammarMatcher, close: str, spell: Callable[[int], bytes], free: Mask) -> None:
        self._inner = inner
        self._close = automaton((close.encode().decode("latin-1"),))
        self._spell = spell
        self._free = free
        self._states = [0]
        self._taken = 0

    @property
    def _thinking(self) -> bool:
        return self._close.hit(self._states[-1]) is None

    @property
    def finished(self) -> bool:
        return not self._thinking and self._inner.finished

    @property
    def error(self) -> str | None:
        return self._inner.error

    def mask(self) -> Mask:
        return self._free.copy() if self._thinking else self._inner.mask()

    def accept(self, token: int) -> bool:
        if not self._thinking:
            taken = self._inner.accept(token)
            self._taken += taken
            return taken
        if not allowed(self._free, token):
            return False
        self._states.append(self._after(token))
        return True

    def _after(self, token: int) -> int:
        """The tag reader's state after a token; at the tag it stays there."""
        state = self._states[-1]
        for c in self._spell(token).decode("latin-1"):
            state = self._close.step(state, c)
            if self._close.hit(state) is not None:
                break
        return state

    def accepts(self, tokens: Sequence[int]) -> int:
        trial = self.fork()
        return next((i for i, token in enumerate(tokens) if not trial.accept(token)), len(tokens))

    def rollback(self, tokens: int) -> None:
        inner = min(tokens, self._taken)
        self._inner.rollback(inner)
        self._taken -= inner
        if tokens > inner:
            del self._states[inner - tokens :]

    def fork(self) -> AfterThinking:
        copy = AfterThinking.__new__(AfterThinking)
        copy._close, copy._spell, copy._free = self._close, self._spell, self._free
        copy._inner, copy._states, copy._taken = self._inner.fork(), list(self._states), self._taken
        return copy


class Grammars:
    """Compiles grammars for one vocabulary. width: how many logits the model gives (at least the vocabulary's size).

    The vocabulary is read on first use. The last compiled grammars are kept.
    """

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self._tokenizer = tokenizer
        self._words = (width + 31) // 32
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar, thinking: Tags | None = None) -> Matcher:
        """A fresh matcher; raises BadRequest (or Unsupported) that says what is wrong with the grammar.

        thinking: the prompt opened this tag, so the grammar begins after it closes.
        """
        ends, known = self._tokenizer.eos_ids, self._tokenizer.vocab_size
        inner = GrammarMatcher(self._compiled(grammar).deep_copy(), self._words, ends, known)
        return AfterThinking(inner, thinking.close, self._spelled, self._free) if thinking else inner

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        if grammar not in self._kept:
            self._kept[grammar] = self._compile(grammar)
        self._kept.move_to_end(grammar)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return self._kept[grammar]

    def _compile(self, grammar: Grammar) -> LLMatcher:
        param = _PARAMS[grammar.kind]
        if len(grammar.text) > LARGEST:
            raise BadRequest(f"The grammar has {len(grammar.text)} characters; {LARGEST} are allowed.", param=param)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, _SOURCES[grammar.kind](grammar.text), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(str(matcher.get_error()), param)
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        if not self._tokenizer.eos_ids:
            raise Unsupported("The model names no end token, so replies cannot be constrained.")
        return LLTokenizer(_Wrapper(self._tokenizer, self._spelled), eos_token=sorted(self._tokenizer.eos_ids))

    def _spelled(self, token: int) -> bytes:
        if self._tokenizer.is_special(token):
            return self._tokenizer.token_text(token).encode()
        return self._tokenizer.token_bytes(token)

    @cached_property
    def _free(self) -> Mask:
        """Every token but the end tokens."""
        every = mask_of(range(self._tokenizer.vocab_size), self._words)
        return every & ~mask_of(self._tokenizer.eos_ids, self._words)


class _Wrapper:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, spelled: Callable[[int], bytes]) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [spelled(token) for token in ids]
        self.special_token_ids = [token for token in ids if tokenizer.is_special(token)]

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, special=False)


def mask_of(tokens: Sequence[int] | frozenset[int], words: int) -> Mask:
    """The mask with exactly these tokens set."""
    bits = np.zeros(words * 32, np.uint8)
    bits[[token for token in tokens if token < words * 32]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def allowed(mask: Mask, token: int) -> bool:
    """Whether the mask has this token's bit."""
    return token // 32 < len(mask) and bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def _refusal(error: str, param: str) -> BadRequest:
    first = error.strip().splitlines()[0]
    kind = Unsupported if "Unimplemented" in first or "not supported" in first else BadRequest
    return kind(f"The grammar cannot be used: {first}", param=param)


def _json_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The schema is not JSON: {error}", param=_PARAMS["json_schema"]) from error
    if not isinstance(schema, dict | bool):
        raise BadRequest("A schema is an object.", param=_PARAMS["json_schema"])
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=LAYOUT))


def _choice(text: str) -> str:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"The choices are not JSON: {error}", param=_PARAMS["choice"]) from error
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise BadRequest("Choices are a list of non-empty strings.", param=_PARAMS["choice"])
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)))


_SOURCES: dict[str, Callable[[str], Any]] = {
    "json_schema": _json_schema,
    "json_object": lambda _: _json_schema('{"type": "object"}'),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "lark": LLMatcher.grammar_from_lark,
}
_PARAMS = {
    "json_schema": "response_format.json_schema.schema",
    "json_object": "response_format",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "lark": "guided_grammar",
}
