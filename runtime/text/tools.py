"""Tool calls in a reply: text outside them passes, calls come out as they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..turn import Tool
from .bodies import JsonBody, WholeBody
from .formats import ToolFormat
from .ledger import Edge, Ledger
from .scan import Scanner
from .spans import Span, dropped


class Calls:
    """The stage between the answer's text and its calls. Feed text, get spans of kind "text" and "call".

    tools: the tools that may be called (for a named choice, that one). parallel False: at most one call, and `done`
    once it is complete. new_id: makes each call's id. What is no well-formed call of an allowed tool stays text.
    """

    __slots__ = ("_body", "_edge", "_format", "_ledger", "_start", "_state")

    def __init__(
        self, format_: ToolFormat, tools: Sequence[Tool], *, parallel: bool = True, new_id: Callable[[], str]
    ) -> None:
        self._format = format_
        self._ledger = Ledger(tools, parallel, new_id)
        self._edge = Edge()
        self._start = Scanner(format_.start)
        self._body: WholeBody | JsonBody = WholeBody(format_, self._ledger, self._edge)
        self._state = self._outside

    @property
    def inside(self) -> bool:
        """Whether the text at hand belongs to a call."""
        return self._state == self._inside

    @property
    def complete(self) -> int:
        """How many calls are complete."""
        return self._ledger.complete

    @property
    def open(self) -> bool:
        """Whether a call was announced that is not complete (yet, or ever)."""
        return self._ledger.open

    @property
    def done(self) -> bool:
        """Whether the reply ends here: the one call wanted is complete."""
        return self._ledger.full

    def feed(self, text: str) -> Iterator[Span]:
        """More of the answer. Behind the one call wanted, nothing comes.

        Reads only as far as its spans are taken: who stops taking them leaves the calls behind unread.
        """
        while text and not self.done:
            spans: list[Span] = []
            text = self._state(text, spans)
            yield from spans
        if text:
            yield dropped(len(text))

    def _outside(self, text: str, spans: list[Span]) -> str:
        before, hit, rest = self._start.feed(text)
        spans += self._edge.text(before)
        if hit is not None:
            self._body = self._new_body()
            self._state = self._inside
        return rest

    def _new_body(self) -> WholeBody | JsonBody:
        body = JsonBody if self._format.json else WholeBody
        return body(self._format, self._ledger, self._edge)

    def _inside(self, text: str, spans: list[Span]) -> str:
        rest = self._body.feed(text, spans)
        if rest is None:
            return ""
        spans += self._body.close(self._format.end)
        self._state = self._outside
        return rest

    def flush(self, *, cut: bool) -> list[Span]:
        """End of input. cut: the reply was cut off (length, a client that left), so an open call stays open.

        Otherwise the model ended it: a call that lacks nothing but its end mark is complete.
        """
        spans = self._body.cut(finished=not cut) if self.inside else []
        self._state = self._outside
        return [*spans, *self._edge.text(self._start.flush()), *self._edge.flush(drop=self._ledger.started > 0)]
