"""A turn, as data: what a client asks of a conversation (`TurnSpec`) and what comes back (`Piece`s).

The doors build a spec, a session runs it, the lane sees its token ids and its `Sampling`. Nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
Priority = Literal["normal", "background"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is picked: a pure function of (seed, absolute position, logits, tokens so far).

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and penalties 0 (repetition 1) are off.
    logit_bias maps token id to an added bias. logprobs: None is none; n adds the n best alternatives (0 to 20).
    seed: 64-bit unsigned; every spec has one (a request without a seed draws one and reports it).
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the reply. kind: how `text` is read; json_schema text is the schema as JSON."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class Tool:
    """One function tool. parameters: its JSON schema ({} when the client sent none)."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the reply's text is read: stop strings, reasoning split, tool calls.

    reasoning: split thinking from content when the template thinks. opened: the template already opened the
    thinking tag. tool_choice: "auto", "none", "required" or the name of a tool. parallel: more than one call allowed.
    """

    stop: tuple[str, ...] = ()
    reasoning: bool = False
    opened: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel: bool = True
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One request to one conversation.

    tokens: the whole prompt as ids; the bank finds by token identity how much of it is already kept.
    max_new: tokens at most to generate (already clamped to the context). salt: separates API keys.
    hint: prompt_cache_key / session id / user; only ever a hint. ignore_eos: end tokens do not end the reply.
    """

    tokens: tuple[int, ...]
    max_new: int
    sampling: Sampling
    format: ReplyFormat = field(default_factory=ReplyFormat)
    grammar: Grammar | None = None
    priority: Priority = "normal"
    draft: bool = True
    ignore_eos: bool = False
    salt: bytes = b""
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One delivered token's log probability (natural log), its bytes, and the best alternatives in order."""

    token: int
    logprob: float
    raw: bytes
    top: tuple[tuple[int, float, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a turn cost and how it was served. Bytes; rows are tokens.

    how: adopted, extended, resized, forked, restored, copied, eager (the design's admission words) or "fresh".
    diverged_at: position of the first prompt token that no kept row matched. copied: bytes by reason.
    bytes_written: to disk, for this conversation since its turn before was admitted: saves follow a turn.
    compiled: of the rounds, those that a graph ran which was kept from others; the rest ran eagerly.
    price_bytes: memory that admission took more than was held. peak_bytes: the same at its worst moment.
    """

    how: str
    rows_adopted: int = 0
    rows_forked: int = 0
    rows_restored: int = 0
    rows_prefilled: int = 0
    diverged_at: int = 0
    copied: tuple[tuple[str, int], ...] = ()
    bytes_written: int = 0
    price_bytes: int = 0
    peak_bytes: int = 0
    queued_s: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    compiled: int = 0
    exact: str = "unknown"

    @property
    def bytes_copied(self) -> int:
        return sum(n for _, n in self.copied)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. cached ≤ prompt - 1: at least one prompt token is always evaluated."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Queued:
    """The turn waits for memory. position 1 is next; estimate in seconds, None when nothing is known."""

    position: int
    estimate: float | None


@dataclass(frozen=True, slots=True)
class Started:
    """The turn was admitted. cached: rows found by token prefix, at most prompt - 1."""

    session: str
    prompt: int
    cached: int
    seed: int


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Progress of a long prompt: rows done of rows needed."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Text:
    """Delivered answer text. tokens may be empty (text held back earlier) and text may be empty (held back now)."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Delivered thinking text, never part of the answer."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A fragment of tool call number `index`. id and name are set in a call's first fragment only."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last piece of a turn. stop: the stop string that ended it. detail: why, when the reason alone is unclear.

    token_sha: hex digest over the delivered token ids, the same for the same reply however it was computed.
    """

    reason: FinishReason
    usage: Usage
    receipt: Receipt
    token_sha: str
    seed: int
    stop: str | None = None
    detail: str | None = None


Piece = Queued | Started | Prefilling | Text | Reasoning | ToolCall | Finished
