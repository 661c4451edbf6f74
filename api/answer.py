"""A whole answer, put together from a turn's pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecopy.runtime.turn import FinishReason, Receipt, TokenLogprob, Usage

from .reply import Reply, arguments


@dataclass(frozen=True, slots=True)
class Requested:
    """A tool the model wants called. arguments: JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as an object; {} when the model wrote something else."""
        found = arguments(self.arguments)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished turn. text: what was said; reasoning: what was thought; calls: tools to be called.

    reason: why it ended. session: the conversation's id at the bank. receipt: what the turn cost and how it was
    served. token_sha: a digest of the delivered tokens, the same however they were computed. seed: repeats it.
    """

    text: str
    reasoning: str
    calls: tuple[Requested, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    usage: Usage
    receipt: Receipt
    token_sha: str
    seed: int
    session: str

    @classmethod
    def of(cls, reply: Reply) -> Answer:
        end = reply.end
        calls = tuple(Requested(block.id, block.name, block.text or "{}") for block in reply.whole_calls())
        return cls(
            reply.text(),
            reply.reasoning(),
            calls,
            tuple(reply.tokens),
            tuple(reply.logprobs),
            end.reason,
            end.usage,
            end.receipt,
            end.token_sha,
            end.seed,
            reply.started.session if reply.started else "",
        )

    @property
    def message(self) -> dict[str, Any]:
        """The answer as the assistant's message, for the next turn."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [_written(call) for call in self.calls]
        return found


def _written(call: Requested) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


__all__ = ["Answer", "Requested"]
