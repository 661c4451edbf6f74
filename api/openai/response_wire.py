"""How responses are spelled: items with their own beginning, deltas and end, numbered in one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.turn import Finished, Piece, Reasoning, Started, Text, ToolCall, Usage

from .. import sse
from ..codec import encode
from ..errors import Shape
from ..reply import Block, Reply, receipt_of
from .wire import describe, items

PREFIX = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class ResponsesWire:
    """head: the response object's fixed fields. done: called with the finished body, once."""

    shape: Shape = "openai"

    def __init__(
        self,
        head: dict[str, Any],
        *,
        logprobs: bool,
        new_id: Callable[[str], str],
        done: Callable[[bytes, Reply], None],
    ) -> None:
        self.head = head
        self.logprobs = logprobs
        self.reply = Reply()
        self.replies = [self.reply]
        self.ids: list[str] = []
        self.sequence = 0
        self.progress = "waiting"
        self._new_id, self._done = new_id, done

    def piece(self, index: int, piece: Piece) -> bytes:
        self.reply.add(piece)
        match piece:
            case Started():
                return self._event("created", response=self._response("in_progress")) + self._event(
                    "in_progress", response=self._response("in_progress")
                )
            case Text() | Reasoning() | ToolCall():
                return self._delivered(piece)
            case Finished():
                return self._finished()
        self.progress = describe(piece)
        return b""

    def idle(self) -> bytes:
        return sse.comment(self.progress)

    def close(self) -> bytes:
        return b""

    def failure(self, error: OnecopyError) -> bytes:
        failed = self._response("failed")
        failed["error"] = {"code": error.code, "message": error.message}
        return self._event("failed", response=failed)

    def body(self) -> bytes:
        whole = encode(self._response(self.status))
        self._done(whole, self.reply)
        return whole

    @property
    def status(self) -> str:
        return "incomplete" if self.reply.end.reason in ("length", "content_filter") else "completed"

    def _delivered(self, piece: Text | Reasoning | ToolCall) -> bytes:
        events = b""
        if len(self.reply.blocks) > len(self.ids):
            events = self._end() + self._begin(self.reply.blocks[-1])
        return events + self._delta(piece)

    def _begin(self, block: Block) -> bytes:
        self.ids.append(self._new_id(PREFIX[block.kind]))
        at = len(self.ids) - 1
        events = self._event("output_item.added", output_index=at, item=self._item(at, "in_progress", empty=True))
        if block.kind == "text":
            events += self._event("content_part.added", **self._place(at), part=part(""))
        return events

    def _delta(self, piece: Text | Reasoning | ToolCall) -> bytes:
        at = len(self.ids) - 1
        match piece:
            case Text(text=text) if text:
                logprobs = items(piece.logprobs) if self.logprobs else []
                return self._event("output_text.delta", **self._place(at), delta=text, logprobs=logprobs)
            case Reasoning(text=text) if text:
                return self._event("reasoning_text.delta", **self._place(at), delta=text)
            case ToolCall(arguments=fragment) if fragment:
                return self._event(
                    "function_call_arguments.delta", item_id=self.ids[at], output_index=at, delta=fragment
                )
        return b""

    def _end(self) -> bytes:
        """The closing events of the block that is open, if one is."""
        if not self.ids:
            return b""
        at = len(self.ids) - 1
        block = self.reply.blocks[at]
        status = "completed" if block.complete else "incomplete"
        return self._closing(at, block) + self._event("output_item.done", output_index=at, item=self._item(at, status))

    def _closing(self, at: int, block: Block) -> bytes:
        if block.kind == "reasoning":
            return self._event("reasoning_text.done", **self._place(at), text=block.text)
        if block.kind == "call":
            place = {"item_id": self.ids[at], "output_index": at, "name": block.name}
            return self._event("function_call_arguments.done", **place, arguments=block.text)
        done = self._event("output_text.done", **self._place(at), text=block.text, logprobs=[])
        return done + self._event("content_part.done", **self._place(at), part=part(block.text))

    def _finished(self) -> bytes:
        events = self._end()
        whole = self._response(self.status)
        self._done(encode(whole), self.reply)
        return events + self._event(self.status, response=whole)

    def _response(self, status: str) -> dict[str, Any]:
        found = {**self.head, "status": status, "output": self._output(), "usage": None}
        if self.reply.finished:
            found["usage"] = usage_body(self.reply.end.usage)
            found["onecopy"] = receipt_of(self.reply)
            if status == "incomplete":
                cut = "max_output_tokens" if self.reply.end.reason == "length" else "content_filter"
                found["incomplete_details"] = {"reason": cut}
        return found

    def _output(self) -> list[dict[str, Any]]:
        """Finished items; before the end there are none."""
        if not self.reply.finished:
            return []
        while len(self.ids) < len(self.reply.blocks):
            self.ids.append(self._new_id(PREFIX[self.reply.blocks[len(self.ids)].kind]))
        return [self._item(at, "completed") for at, block in enumerate(self.reply.blocks) if block.complete]

    def _item(self, at: int, status: str, *, empty: bool = False) -> dict[str, Any]:
        block = self.reply.blocks[at]
        text = "" if empty else block.text
        found: dict[str, Any] = {"id": self.ids[at], "status": status}
        if block.kind == "call":
            return {**found, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": text}
        if block.kind == "reasoning":
            content = [] if empty else [{"type": "reasoning_text", "text": text}]
            return {**found, "type": "reasoning", "summary": [], "content": content}
        content = [] if empty else [part(text)]
        return {**found, "type": "message", "role": "assistant", "content": content}

    def _place(self, at: int) -> dict[str, Any]:
        return {"item_id": self.ids[at], "output_index": at, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        self.sequence += 1
        return sse.event(name, {"type": name, "sequence_number": self.sequence - 1, **fields})


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
    }
