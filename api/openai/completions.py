"""`POST /v1/completions`: bare text or token ids, several prompts at once, echo, the legacy logprobs shape."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from onecopy.actors.service import ModelCard
from onecopy.runtime.errors import BadRequest, Unsupported
from onecopy.runtime.turn import Finished, Reasoning, Text, TokenLogprob, ToolCall, TurnSpec
from starlette.requests import Request
from starlette.responses import Response

from .. import sse
from ..codec import decode
from ..doors import Call
from ..order import Order, Prompt, check_model, encode_text, plain_side, specs
from .chat import Caller
from .fields import grammar_of, order, top_logprobs
from .types import CompletionRequest
from .wire import Head, Held, OpenAIWire

PROMPTS = 64


async def create(request: Request) -> Response:
    call = await Call.of(request)
    wanted = decode(call.body, CompletionRequest)
    card = call.service.card
    check_model(card, wanted.model, call.options.aliases)
    made = order_of(wanted, call)
    prompts = [await ids_of(card, raw) for raw in prompts_of(wanted.prompt)]
    head = Head(
        id=call.service.new_id("cmpl-"),
        created=call.now(),
        model=card.id,
        usage=bool(wanted.stream_options and wanted.stream_options.include_usage),
        logprobs=wanted.logprobs is not None,
        token_ids=bool(wanted.return_token_ids),
    )
    wire = CompletionWire(head, [spec_echo(card, p, wanted.echo) for p in prompts for _ in range(made.n)], prompts)
    return call.exchange(all_specs(call, made, prompts), wire, stream=bool(wanted.stream))


def order_of(wanted: CompletionRequest, call: Caller) -> Order:
    logprobs = None
    if wanted.logprobs is not None:
        logprobs = top_logprobs(wanted.logprobs, "logprobs")
    if wanted.echo and wanted.logprobs is not None:
        raise Unsupported("echo together with logprobs is not offered here.", param="echo")
    made = order(wanted, call.service.card, logprobs=logprobs, salt=call.salt, hint=call.hint)
    return replace(made, max_new=made.max_new or 16, grammar=grammar_of(wanted, wanted.response_format))


def prompts_of(raw: str | list[Any] | None) -> list[str | tuple[int, ...]]:
    """The prompts of a request: a text, ids, or a list of either."""
    if isinstance(raw, str):
        return [raw]
    if not raw:
        raise BadRequest("prompt must not be empty.", param="prompt")
    if _ids(raw):
        return [tuple(raw)]
    if len(raw) > PROMPTS:
        raise BadRequest(f"At most {PROMPTS} prompts.", param="prompt")
    return [_one(item, i) for i, item in enumerate(raw)]


async def ids_of(card: ModelCard, raw: str | tuple[int, ...]) -> tuple[int, ...]:
    return await encode_text(card, raw) if isinstance(raw, str) else raw


def all_specs(call: Call, made: Order, prompts: Sequence[tuple[int, ...]]) -> list[TurnSpec]:
    return [spec for tokens in prompts for spec in specs(call.service, made, Prompt(tokens), param="prompt")]


def spec_echo(card: ModelCard, tokens: Sequence[int], echo: bool | None) -> str:
    """The prompt's text, when it is to be repeated in front of the reply."""
    return plain_side(card).decode(tokens) if echo else ""


class CompletionWire(OpenAIWire):
    """`echoes` has one text per choice; choices of one prompt stand side by side."""

    kind = chunk_kind = "text_completion"

    def __init__(self, head: Head, echoes: Sequence[str], prompts: Sequence[tuple[int, ...]]) -> None:
        super().__init__(head, len(echoes), len(prompts))
        self.echoes = echoes
        self.prompts = prompts
        self.offsets = [Offsets(len(echo)) for echo in echoes]

    def choice(self, index: int) -> dict[str, Any]:
        reply = self.replies[index]
        found = self._choice(index, self.echoes[index] + reply.text())
        found["finish_reason"] = reply.end.reason
        if self.head.logprobs:
            found["logprobs"] = legacy(reply.logprobs, self.offsets[index])
        if self.head.token_ids:
            found |= {"token_ids": reply.tokens, "prompt_token_ids": self._prompt(index)}
        return found

    def _started(self, index: int) -> bytes:
        if not self.echoes[index] and not self.head.token_ids:
            return b""
        more = {"prompt_token_ids": self._prompt(index)} if self.head.token_ids else {}
        return sse.data(self.frame([self._choice(index, self.echoes[index]) | more]))

    def _delivered(self, index: int, piece: Text | Reasoning | ToolCall) -> bytes:
        held = self.held[index]
        held.add(piece)
        if not isinstance(piece, Text) or not piece.text:
            return b""
        return sse.data(self.frame([self._chunk(index, piece.text, held.take())]))

    def _finished(self, index: int, piece: Finished) -> bytes:
        chunk = self._chunk(index, "", self.held[index].take())
        chunk["finish_reason"] = piece.reason
        return sse.data(self.frame([chunk]))

    def _chunk(self, index: int, text: str, held: Held) -> dict[str, Any]:
        chunk = self._choice(index, text)
        if self.head.logprobs and held.logprobs:
            chunk["logprobs"] = legacy(held.logprobs, self.offsets[index])
        if self.head.token_ids:
            chunk["token_ids"] = held.tokens
        return chunk

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _prompt(self, index: int) -> tuple[int, ...]:
        return self.prompts[index // self.per_prompt]


class Offsets:
    """Where each token begins in the text, in characters: a character belongs to the token that completes it."""

    def __init__(self, start: int) -> None:
        self.at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, raw: bytes) -> int:
        """The offset of the next token, whose bytes are `raw`."""
        at = self.at
        self.at += len(self._decoder.decode(raw))
        return at


def legacy(logprobs: Iterable[TokenLogprob], offsets: Offsets) -> dict[str, Any]:
    """Parallel lists, one entry per delivered token."""
    entries = list(logprobs)
    return {
        "tokens": [shown(entry.raw) for entry in entries],
        "token_logprobs": [max(entry.logprob, -9999.0) for entry in entries],
        "top_logprobs": [{shown(raw): max(value, -9999.0) for _, value, raw in entry.top} for entry in entries],
        "text_offset": [offsets.next(entry.raw) for entry in entries],
    }


def shown(raw: bytes) -> str:
    """A token as text; one that is part of a character by its bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _one(item: object, index: int) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _ids(item):
        return tuple(item)
    raise BadRequest("A prompt is a text or a list of token ids.", param=f"prompt[{index}]")


def _ids(raw: list[Any]) -> bool:
    return bool(raw) and all(type(item) is int for item in raw)
