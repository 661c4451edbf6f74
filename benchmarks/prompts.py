"""What the benchmarks ask: code, chat, JSON, and plain text of an exact number of tokens."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from onecopy.runtime.models import resolve
from onecopy.runtime.text.tokenizer import Tokenizer

Messages = list[dict[str, str]]

TEXT = """river stone carried morning light over quiet village while trader counted silver coins near old bridge
captain wrote letter about distant island garden filled with winter roses teacher asked children to measure
shadow of tower engine stopped before station and nobody noticed clock running late again through valley"""

CODE = """Rewrite this file with type hints. Keep everything else as it is.

class Basket:
    def __init__(self, owner):
        self.owner = owner
        self.items = {}

    def add(self, name, price, count=1):
        if name in self.items:
            self.items[name] = (price, self.items[name][1] + count)
        else:
            self.items[name] = (price, count)

    def total(self):
        return sum(price * count for price, count in self.items.values())

    def cheapest(self):
        return min(self.items, key=lambda name: self.items[name][0])
"""
CHAT = "Explain to a curious ten-year-old why the sky is blue in the day and red in the evening. Give an example."
JSON = """Write a JSON list of twelve cities. Each entry has "name", "country", "population" and "capital" (true or
false). Start like this: [{"name": "Paris", "country": "France", "population": 2100000, "capital": true}, """

KINDS = {"code": CODE, "chat": CHAT, "json": JSON}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def fresh(text: str, number: object) -> Messages:
    """A prompt that no server can have kept: it differs from every other one in its first words."""
    return [system(f"Task {number}. You help."), user(text)]


@cache
def vocabulary(model: str) -> Tokenizer:
    """The tokenizer of a model, without its weights."""
    source = resolve(model)
    if source.kind == "gguf":
        from onecopy.runtime.models.gguf_header import read_header
        from onecopy.runtime.models.gguf_vocab import tokenizer_of as from_gguf

        return from_gguf(read_header(source.path))
    from onecopy.runtime.models.hf_vocab import tokenizer_of as from_directory

    found = from_directory(source.path, ())
    if found is None:
        raise SystemExit(f"{model} has no tokenizer")
    return found


def prose(model: str, tokens: int, seed: int) -> str:
    """About so many tokens of text; another seed shares none of it beyond a word."""
    draw = random.Random(seed)
    vocab = vocabulary(model)
    words: list[str] = []
    while len(ids := vocab.encode(f"{seed}: " + " ".join(words), special=False)) < tokens:
        words += draw.choices(TEXT.split(), k=max(8, (tokens - len(ids)) // 2))
    return vocab.decode(ids[:tokens])


def without_end(model: str) -> dict[str, Any]:
    """Fields that keep every server from ending a reply early: all give the same number of tokens."""
    return {"logit_bias": {str(i): -100 for i in sorted(vocabulary(model).eos_ids)}}
