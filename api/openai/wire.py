"""How chat completions are spelled: chunks while pieces come, one body when they are all there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.turn import (
    Finished,
    Piece,
    Prefilling,
    Queued,
    Reasoning,
    Started,
    Text,
    TokenLogprob,
    ToolCall,
    Usage,
)

from .. import sse
from ..codec import encode
from ..errors import Shape, body_of
from ..reply import Block, Reply, receipt_of, usage_of

Delta = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk and body of one request starts with, and what the client wants to see."""

    id: str
    created: int
    model: str
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    prompt: tuple[int, ...] = ()
    echo: str | None = None


@dataclass(slots=True)
class Held:
    """Tokens of one choice whose text is still held back: they travel with the next delta."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, piece: Text | Reasoning | ToolCall) -> None:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs

    def take(self) -> Held:
        taken = Held(self.tokens, self.logprobs)
        self.tokens, self.logprobs = [], []
        return taken


class OpenAIWire:
    """What chat and text completions share: per-choice state, signs of life, errors, the closing chunks."""

    shape: Shape = "openai"
    kind = ""
    chunk_kind = ""

    def __init__(self, head: Head, n: int, prompts: int = 1) -> None:
        self.head = head
        self.per_prompt = n // prompts
        self.replies: Sequence[Reply] = [Reply() for _ in range(n)]
        self.held = [Held() for _ in range(n)]
        self.progress = "waiting"

    def piece(self, index: int, piece: Piece) -> bytes:
        self.replies[index].add(piece)
        match piece:
            case Text() | Reasoning() | ToolCall():
                return self._delivered(index, piece)
            case Started():
                return self._started(index)
            case Finished():
                return self._finished(index, piece)
            case Queued() | Prefilling():
                self.progress = describe(piece)
        return b""

    def idle(self) -> bytes:
        return sse.comment(self.progress)

    def close(self) -> bytes:
        tail = b""
        if self.head.usage:
            tail = sse.data(self.frame([], usage=usage_body(usage_of(self.replies, self.per_prompt))))
        return tail + sse.DONE

    def failure(self, error: OnecopyError) -> bytes:
        return sse.data(body_of(error, self.shape))

    def body(self) -> bytes:
        whole = self.frame([self.choice(i) for i in range(len(self.replies))])
        whole["object"] = self.kind
        whole["usage"] = usage_body(usage_of(self.replies, self.per_prompt))
        whole["onecopy"] = receipt_of(self.replies[0])
        if self.head.token_ids:
            whole["prompt_token_ids"] = self.head.prompt
        return encode(whole)

    def frame(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        head = self.head
        return {
            "id": head.id,
            "object": self.chunk_kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": "onecopy",
            "choices": choices,
            **more,
        }

    def choice(self, index: int) -> dict[str, Any]:
        """One choice of a whole body."""
        raise NotImplementedError

    def _started(self, index: int) -> bytes:
        raise NotImplementedError

    def _delivered(self, index: int, piece: Text | Reasoning | ToolCall) -> bytes:
        raise NotImplementedError

    def _finished(self, index: int, piece: Finished) -> bytes:
        raise NotImplementedError


class ChatWire(OpenAIWire):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int) -> dict[str, Any]:
        reply = self.replies[index]
        found: dict[str, Any] = {
            "index": index,
            "message": message_body(reply),
            "logprobs": {"content": items(reply.logprobs)} if self.head.logprobs else None,
            "finish_reason": reply.end.reason,
        }
        if self.head.token_ids:
            found["token_ids"] = reply.tokens
        return found

    def _started(self, index: int) -> bytes:
        more: dict[str, Any] = {"prompt_token_ids": self.head.prompt} if self.head.token_ids and index == 0 else {}
        return sse.data(self.frame([self._chunk(index, {"role": "assistant", "content": ""})], **more))

    def _delivered(self, index: int, piece: Text | Reasoning | ToolCall) -> bytes:
        held = self.held[index]
        held.add(piece)
        delta = DELTAS[type(piece)](piece)
        if not delta:
            return b""
        return sse.data(self.frame([self._chunk(index, delta, held.take())]))

    def _finished(self, index: int, piece: Finished) -> bytes:
        chunk = self._chunk(index, {}, self.held[index].take())
        chunk["finish_reason"] = piece.reason
        return sse.data(self.frame([chunk], onecopy=receipt_of(self.replies[index])))

    def _chunk(self, index: int, delta: Delta, held: Held | None = None) -> dict[str, Any]:
        chunk: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if held and self.head.logprobs and held.logprobs:
            chunk["logprobs"] = {"content": items(held.logprobs)}
        if held and self.head.token_ids:
            chunk["token_ids"] = held.tokens
        return chunk


def text_delta(piece: Text) -> Delta:
    return {"content": piece.text} if piece.text else {}


def reasoning_delta(piece: Reasoning) -> Delta:
    return {"reasoning_content": piece.text} if piece.text else {}


def call_delta(piece: ToolCall) -> Delta:
    """A call's first fragment carries id and name; the others arguments only."""
    if piece.name is None:
        if not piece.arguments:
            return {}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}


DELTAS: dict[type, Callable[[Any], Delta]] = {Text: text_delta, Reasoning: reasoning_delta, ToolCall: call_delta}


def message_body(reply: Reply) -> dict[str, Any]:
    """An assistant message. content is null beside calls when no text was written."""
    calls = [call_body(block) for block in reply.whole_calls()]
    text = reply.text()
    found: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning := reply.reasoning():
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = calls
    return found


def call_body(block: Block) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}


def items(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Chat's logprobs: one item per delivered token."""
    return [
        {
            **item(entry.logprob, entry.raw),
            "top_logprobs": [item(logprob, raw) for _, logprob, raw in entry.top],
        }
        for entry in logprobs
    ]


def item(logprob: float, raw: bytes) -> dict[str, Any]:
    """A token as text (U+FFFD where its bytes are part of a character), its log probability and its bytes."""
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def describe(piece: Queued | Prefilling) -> str:
    """What a waiting client is told in a comment."""
    if isinstance(piece, Prefilling):
        return f"prefill {piece.done}/{piece.total}"
    return f"queued, position {piece.position}"
