"""How messages are spelled: events of blocks while pieces come, one body when they are all there."""

from __future__ import annotations

from typing import Any

from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.turn import Finished, Piece, Reasoning, Started, Text, ToolCall, Usage

from .. import sse
from ..codec import encode
from ..errors import Shape, body_of
from ..reply import Block, Reply, arguments, receipt_of

PING = sse.event("ping", {"type": "ping"})
REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessagesWire:
    shape: Shape = "anthropic"

    def __init__(self, id: str, model: str) -> None:
        self.id, self.model = id, model
        self.reply = Reply()
        self.replies = [self.reply]
        self.told = 0

    def piece(self, index: int, piece: Piece) -> bytes:
        """Events for one piece. `told` counts blocks that were opened."""
        self.reply.add(piece)
        match piece:
            case Started():
                return sse.event("message_start", {"type": "message_start", "message": self._message(piece)})
            case Text() | Reasoning() | ToolCall():
                return self._delivered(piece)
            case Finished():
                return self._finished(piece)
        return b""

    def idle(self) -> bytes:
        return PING

    def close(self) -> bytes:
        return b""

    def failure(self, error: OnecopyError) -> bytes:
        return sse.event("error", body_of(error, self.shape))

    def body(self) -> bytes:
        end = self.reply.end
        found = self._message(self.reply.started)
        found["content"] = [content(block) for block in self.reply.whole()]
        found |= {"stop_reason": reason(end), "stop_sequence": end.stop, "usage": usage_body(end.usage)}
        found["onecopy"] = receipt_of(self.reply)
        return encode(found)

    def _message(self, started: Started | None) -> dict[str, Any]:
        counts = Usage(started.prompt, 0, started.cached) if started else Usage(0, 0, 0)
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_body(counts),
        }

    def _delivered(self, piece: Text | Reasoning | ToolCall) -> bytes:
        events = b""
        if len(self.reply.blocks) > self.told:
            events = self._stop() + self._start(self.reply.blocks[-1])
        if change := delta(piece):
            events += _event("content_block_delta", index=self.told - 1, delta=change)
        return events

    def _start(self, block: Block) -> bytes:
        self.told += 1
        return _event("content_block_start", index=self.told - 1, content_block=opened(block))

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self.told - 1) if self.told else b""

    def _finished(self, end: Finished) -> bytes:
        change = {"stop_reason": reason(end), "stop_sequence": end.stop}
        usage = usage_body(end.usage)
        last = _event("message_delta", delta=change, usage=usage, onecopy=receipt_of(self.reply))
        return self._stop() + last + _event("message_stop")


def opened(block: Block) -> dict[str, Any]:
    """A block at its start: everything but what its deltas bring."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def content(block: Block) -> dict[str, Any]:
    """A whole block."""
    found = opened(block)
    if block.kind == "call":
        found["input"] = arguments(block.text)
    else:
        found["text" if block.kind == "text" else "thinking"] = block.text
    return found


def delta(piece: Text | Reasoning | ToolCall) -> dict[str, Any] | None:
    match piece:
        case Text(text=text) if text:
            return {"type": "text_delta", "text": text}
        case Reasoning(text=text) if text:
            return {"type": "thinking_delta", "thinking": text}
        case ToolCall(arguments=fragment) if fragment:
            return {"type": "input_json_delta", "partial_json": fragment}
    return None


def reason(end: Finished) -> str:
    return REASONS.get(end.reason) or ("stop_sequence" if end.stop is not None else "end_turn")


def usage_body(usage: Usage) -> dict[str, Any]:
    """input_tokens are those that were evaluated; with cache_read_input_tokens they make the whole prompt."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _event(name: str, **fields: Any) -> bytes:
    return sse.event(name, {"type": name, **fields})
