"""One turn's pieces put together: the same object feeds a whole body and the closing events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from onecopy.runtime.turn import (
    Finished,
    Piece,
    Queued,
    Reasoning,
    Receipt,
    Started,
    Text,
    TokenLogprob,
    ToolCall,
    Usage,
)

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """A run of one kind of output. For a call, `parts` are its argument fragments."""

    kind: BlockKind
    parts: list[str] = field(default_factory=list)
    id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def complete(self) -> bool:
        """Whether a call's arguments are a whole JSON object; always true for other kinds."""
        return self.kind != "call" or isinstance(arguments(self.text), dict)


@dataclass(slots=True)
class Reply:
    """What one turn has delivered so far. `add` mutates it; everything else is derived."""

    blocks: list[Block] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    queued: Queued | None = None
    calls: dict[int, Block] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        match piece:
            case Text() | Reasoning() | ToolCall():
                self._deliver(piece)
            case Started():
                self.started = piece
            case Finished():
                self.finished = piece
            case Queued():
                self.queued = piece

    def text(self) -> str:
        return self._joined("text")

    def reasoning(self) -> str:
        return self._joined("reasoning")

    def whole(self) -> list[Block]:
        """The blocks that may be shown as finished: a call that was cut is left out."""
        return [block for block in self.blocks if block.complete]

    def whole_calls(self) -> list[Block]:
        return [block for block in self.whole() if block.kind == "call"]

    @property
    def end(self) -> Finished:
        assert self.finished is not None, "a turn ends in Finished"
        return self.finished

    def _joined(self, kind: BlockKind) -> str:
        return "".join(part for block in self.blocks if block.kind == kind for part in block.parts)

    def _deliver(self, piece: Text | Reasoning | ToolCall) -> None:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        if isinstance(piece, ToolCall):
            self._call(piece)
        elif piece.text:
            self._open("text" if isinstance(piece, Text) else "reasoning").parts.append(piece.text)

    def _open(self, kind: BlockKind) -> Block:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        return self.blocks[-1]

    def _call(self, piece: ToolCall) -> None:
        if piece.index not in self.calls:
            self.calls[piece.index] = Block("call", id=piece.id or "", name=piece.name or "")
            self.blocks.append(self.calls[piece.index])
        if piece.arguments:
            self.calls[piece.index].parts.append(piece.arguments)


def arguments(text: str) -> Any:
    """A call's arguments as a value, or None when the text is not JSON."""
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def usage_of(replies: Sequence[Reply], per_prompt: int) -> Usage:
    """Usage over all choices of a request: each prompt is counted once, by the first of its choices."""
    uses = [reply.end.usage for reply in replies]
    firsts = uses[::per_prompt]
    return Usage(
        prompt=sum(use.prompt for use in firsts),
        cached=sum(use.cached for use in firsts),
        completion=sum(use.completion for use in uses),
        reasoning=sum(use.reasoning for use in uses),
    )


def receipt_of(reply: Reply) -> dict[str, Any]:
    """The `onecopy` object of a response: what was reused, why not more, and what it cost."""
    end = reply.end
    receipt: Receipt = end.receipt
    found = msgspec.to_builtins(receipt)
    found["copied"] = dict(receipt.copied)
    return {
        "session": reply.started.session if reply.started else None,
        "seed": end.seed,
        "token_sha": end.token_sha,
        "bytes_copied": receipt.bytes_copied,
        "stop": end.stop,
        "detail": end.detail,
        **found,
    }
