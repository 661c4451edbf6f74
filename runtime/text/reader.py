"""The one pipeline from token ids to what a client sees: bytes, characters, thinking, calls, stop strings.

A reply read token by token and a reply read at once go through the same code, so what was streamed, joined, is what
was not streamed. Each token is attached to exactly one piece: the one that shows, or swallows, its last character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Protocol

from ..turn import FinishReason, Reasoning, ReplyFormat, Text, TokenLogprob, Tool, ToolCall
from .formats import ToolFormat
from .reasoning import Splitter, Tags
from .spans import Span, merged, shown
from .stop import Stop
from .tools import Calls
from .utf8 import Utf8

Shown = Text | Reasoning | ToolCall


class Vocabulary(Protocol):
    """What the reader needs of a tokenizer. token_bytes: b"" for control tokens. token_text: the name of any token."""

    @property
    def eos_ids(self) -> Set[int]: ...
    def token_bytes(self, token: int) -> bytes: ...
    def token_text(self, token: int) -> str: ...
    def is_special(self, token: int) -> bool: ...
    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A token not yet attached: `end` characters of the reply must be used up first."""

    token: int
    logprob: TokenLogprob | None
    end: int


class Reader:
    """Reads one reply. Mutable, one per reply, never shared.

    tags: how the template marks thinking; tools: how it writes calls; None where it does not. new_id makes call ids.
    """

    def __init__(
        self,
        tokenizer: Vocabulary,
        format_: ReplyFormat,
        *,
        tags: Tags | None = None,
        tools: ToolFormat | None = None,
        new_id: Callable[[], str],
    ) -> None:
        self._tokenizer = tokenizer
        self._utf8 = Utf8()
        self._splitter = Splitter(tags, format_.opened) if tags is not None and format_.reasoning else None
        allowed = callable_tools(format_)
        self._calls = Calls(tools, allowed, parallel=format_.parallel, new_id=new_id) if tools and allowed else None
        self._stop = Stop(format_.stop, format_.include_stop)
        self._marks = _marks(tags if self._splitter else None, tools if self._calls else None)
        self._waiting: deque[_Waiting] = deque()
        self._read = 0
        self._used = 0
        self._begun = False
        self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether the reply is over before its end: a stop string, or the one call wanted is complete."""
        return self._stop.hit is not None or (self._calls is not None and self._calls.done)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the reply. It ended in the token fed last."""
        return self._stop.hit

    @property
    def calls(self) -> int:
        """How many tool calls are complete."""
        return self._calls.complete if self._calls else 0

    @property
    def broken_call(self) -> bool:
        """Whether a call was announced that never became complete; its joined arguments are no valid JSON."""
        return self._calls is not None and self._calls.open

    def finish_reason(self, default: FinishReason) -> FinishReason:
        """The reason a client is told. A reply with a call that never became complete is never "tool_calls"."""
        if default != "stop":
            return default
        if self.broken_call:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> list[Shown]:
        """One more token of the reply, and what it lets out. After `stopped` nothing more comes."""
        if self.stopped or self._ended:
            return []
        text = self._utf8.feed(self._bytes(token) if self._begun else self._first(token))
        self._begun = True
        self._read += len(text)
        self._waiting.append(_Waiting(token, logprob, self._read + self._utf8.pending))
        return self._pieces(self._split(text))

    def finish(self, *, cut: bool = False) -> list[Shown]:
        """The reply is over: everything held comes out. cut: it was cut off (length, cancel), not ended by the model.

        Calling it again returns nothing.
        """
        if self.stopped or self._ended:
            return []
        self._ended = True
        text = self._utf8.flush()
        self._read += len(text)
        return self._pieces(self._flushed(text, cut))

    def _bytes(self, token: int) -> bytes:
        """Control tokens are read only where they are marks: in a call, or as part of a tag."""
        if not self._tokenizer.is_special(token):
            return self._tokenizer.token_bytes(token)
        name = self._tokenizer.token_text(token)
        inside = self._calls is not None and self._calls.inside and token not in self._tokenizer.eos_ids
        return name.encode() if inside or any(name in mark for mark in self._marks) else b""

    def _first(self, token: int) -> bytes:
        """A vocabulary that marks word starts writes a space before the first word; its decoder takes it away."""
        raw = self._bytes(token)
        strips = raw.startswith(b" ") and not self._tokenizer.decode((token,)).startswith(" ")
        return raw[1:] if strips else raw

    def _split(self, text: str) -> Iterator[Span]:
        for span in self._splitter.feed(text) if self._splitter else [shown(text)]:
            yield from self._answer(span)

    def _answer(self, span: Span) -> Iterator[Span]:
        """Answer text goes on to the calls, up to a stop string; what earlier stages dropped passes by."""
        if self.stop is not None:
            return
        if span.kind != "text" or not span.text or self._calls is None:
            yield from self._stoppable(span)
            return
        for part in self._calls.feed(span.text):
            yield from self._stoppable(part)
            if self._stop.hit is not None:
                return

    def _stoppable(self, span: Span) -> Iterator[Span]:
        """Answer text is searched for stop strings; behind one, nothing comes."""
        if self._stop.hit is not None:
            return
        if span.kind == "text" and span.text:
            yield from self._stop.feed(span.text)
            return
        if span.kind == "call":
            yield from self._stop.flush()
        yield span

    def _flushed(self, text: str, cut: bool) -> Iterator[Span]:
        yield from self._split(text)
        for span in self._splitter.flush() if self._splitter else []:
            yield from self._answer(span)
        for span in self._calls.flush(cut=cut) if self._calls else []:
            yield from self._stoppable(span)
        yield from self._stop.flush()

    def _pieces(self, spans: Iterator[Span]) -> list[Shown]:
        found = merged(spans)
        if self._waiting and (self.stopped or self._ended):
            found = merged([*found, self._remainder(found)])
        return [piece for piece in map(self._piece, found) if _says(piece)]

    def _remainder(self, found: list[Span]) -> Span:
        """Uses up the reply to its end, as part of its last piece."""
        last = found[-1] if found else Span("text", "", 0)
        return Span(last.kind, "", self._read + 1, last.index)

    def _piece(self, span: Span) -> Shown:
        self._used += span.raw
        tokens = self._attached()
        ids = tuple(w.token for w in tokens)
        logprobs = tuple(w.logprob for w in tokens if w.logprob is not None)
        if span.kind == "call":
            return ToolCall(span.index, span.text, span.id, span.name, ids, logprobs)
        return (Reasoning if span.kind == "reasoning" else Text)(span.text, ids, logprobs)

    def _attached(self) -> list[_Waiting]:
        tokens: list[_Waiting] = []
        while self._waiting and self._waiting[0].end <= self._used:
            tokens.append(self._waiting.popleft())
        return tokens


def _says(piece: Shown) -> bool:
    text = piece.arguments if isinstance(piece, ToolCall) else piece.text
    return bool(text or piece.tokens or (isinstance(piece, ToolCall) and piece.name is not None))


def _marks(tags: Tags | None, tools: ToolFormat | None) -> tuple[str, ...]:
    """Everything that is markup in this reply."""
    own = (tags.open, tags.close, *tags.markup) if tags else ()
    return (*own, *((tools.start, tools.end) if tools else ()))


def callable_tools(format_: ReplyFormat) -> tuple[Tool, ...]:
    """The tools a reply may call: all, none, or the one that tool_choice names."""
    if format_.tool_choice == "none":
        return ()
    if format_.tool_choice in ("auto", "required"):
        return format_.tools
    return tuple(tool for tool in format_.tools if tool.name == format_.tool_choice)
