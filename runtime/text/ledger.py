"""What the calls of one reply share: their numbers and ids, and the text between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..turn import Tool
from .spans import Span, dropped, shown


class Ledger:
    """The calls of one reply: which names are allowed, how many are out, how many are complete."""

    __slots__ = ("_limit", "_new_id", "complete", "started", "tools")

    def __init__(self, tools: Sequence[Tool], parallel: bool, new_id: Callable[[], str]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self._limit = None if parallel else 1
        self._new_id = new_id
        self.started = 0
        self.complete = 0

    @property
    def full(self) -> bool:
        """Whether no further call is wanted."""
        return self.complete == self._limit

    @property
    def open(self) -> bool:
        """Whether a call was announced that never became complete."""
        return self.started > self.complete

    def begin(self, name: str, raw: int) -> Span:
        """Announce the next call."""
        self.started += 1
        return Span("call", "", raw, self.started - 1, self._new_id(), name)

    def more(self, arguments: str, raw: int) -> Span:
        """More arguments of the call at hand."""
        return Span("call", arguments, raw, self.started - 1)

    def end(self, arguments: str, raw: int) -> Span:
        """The last arguments of the call at hand: it is complete."""
        self.complete += 1
        return self.more(arguments, raw)


class Edge:
    """Answer text between calls. Space at its end waits: next to a call it is layout, before text it is text."""

    __slots__ = ("_space",)

    def __init__(self) -> None:
        self._space: list[str] = []

    def text(self, text: str) -> list[Span]:
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return []
        held, self._space = "".join(self._space), [text[len(body) :]]
        return [shown(held + body)]

    def flush(self, drop: bool) -> list[Span]:
        """The text ends here. drop: it was layout."""
        held, self._space = "".join(self._space), []
        return [dropped(len(held)) if drop else shown(held)]
