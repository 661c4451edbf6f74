"""The bundled model's own vocabulary and template, through the whole text side."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from onecopy.runtime.models import list_models
from onecopy.runtime.models.gguf_header import read_header
from onecopy.runtime.models.gguf_vocab import tokenizer_of
from onecopy.runtime.text import ChatFormat, Grammars, Reader, Tokenizer, forced_calls
from onecopy.runtime.text.grammar import Matcher
from onecopy.runtime.turn import Grammar, ReplyFormat, Text, Tool, ToolCall

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
}
ADD = Tool("add", "Adds.", SCHEMA)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(read_header(list_models()[0].path))


def walk(matcher: Matcher, tokenizer: Tokenizer, seed: int) -> list[int]:
    """A reply whose every token is any one the mask allows."""
    pick, reply = random.Random(seed), []
    while True:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        token = pick.choice(np.flatnonzero(bits).tolist())
        assert matcher.accept(token)
        if token in tokenizer.eos_ids:
            return reply
        reply.append(token)


@pytest.mark.parametrize("seed", range(3))
def test_any_walk_through_the_masks_is_a_reply_of_the_schema(tokenizer: Tokenizer, seed: int) -> None:
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(Grammar("json_schema", json.dumps(SCHEMA)))
    found = json.loads(tokenizer.decode(walk(matcher, tokenizer, seed)))
    assert found.keys() == {"name", "n", "ok"}
    assert (found["n"] in (1, 2), type(found["ok"])) == (True, bool)


@pytest.mark.parametrize("seed", range(3))
def test_any_walk_through_a_forced_call_reads_back_as_that_call(tokenizer: Tokenizer, seed: int) -> None:
    chat = ChatFormat(tokenizer)
    grammar = forced_calls(chat.tool_format_name, (ADD,), "add", parallel=False, tokenizer=tokenizer)
    assert grammar is not None
    reply = walk(Grammars(tokenizer, tokenizer.vocab_size).matcher(grammar), tokenizer, seed)
    form = ReplyFormat(tools=(ADD,), tool_choice="add", parallel=False)
    reader = Reader(tokenizer, form, tags=chat.tags, tools=chat.tool_format, new_id=lambda: "id")
    pieces = [piece for token in reply for piece in reader.feed(token)] + reader.finish()
    arguments = "".join(piece.arguments for piece in pieces if isinstance(piece, ToolCall))
    assert json.loads(arguments).keys() == {"name", "n", "ok"}
    assert reader.finish_reason("stop") == "tool_calls"
    assert [token for piece in pieces for token in piece.tokens] == reply


def test_the_template_writes_its_own_system_message(tokenizer: Tokenizer) -> None:
    chat = ChatFormat(tokenizer)
    text = chat.render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert chat.tokens([{"role": "user", "content": "Hi"}]) == tokenizer.encode(text)
    assert (chat.thinks, chat.knows_tools, chat.tool_format_name) == (False, False, "json_tools")


def test_a_null_answer_with_calls_and_results_renders(tokenizer: Tokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    text = ChatFormat(tokenizer).render(talk, (ADD,))
    assert '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>" in text


@pytest.mark.parametrize(
    "text", ["\U0001f468‍\U0001f469‍\U0001f467 \U0001f1e9\U0001f1ea", "漢字 e\u0301", " leading", "\n\n"]
)
def test_text_comes_back_through_real_tokens(tokenizer: Tokenizer, text: str) -> None:
    reader = Reader(tokenizer, ReplyFormat(), new_id=lambda: "id")
    pieces = [piece for token in tokenizer.encode(text) for piece in reader.feed(token)] + reader.finish()
    assert "".join(piece.text for piece in pieces if isinstance(piece, Text)) == text
