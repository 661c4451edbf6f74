"""Stop strings in the answer's text, over token and character edges."""

from __future__ import annotations

from .scan import Scanner
from .spans import Span, dropped, shown


class Stop:
    """Ends the answer at the first stop string. Holds back only what may still become one.

    Among several, the one that ends first wins; of those that end together, the longest. Stop strings are read in the
    answer's text only: not in thinking, not in a tool call, not across either.
    """

    __slots__ = ("_include", "_scanner", "hit")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._scanner = Scanner(*stops)
        self._include = include
        self.hit: str | None = None

    def feed(self, text: str) -> list[Span]:
        """More answer text. After a hit nothing more comes out."""
        if self.hit is not None:
            return [dropped(len(text))]
        before, self.hit, after = self._scanner.feed(text)
        return [shown(before), *self._ending(after)]

    def _ending(self, after: str) -> list[Span]:
        if self.hit is None:
            return []
        return [Span("text", self.hit if self._include else "", len(self.hit)), dropped(len(after))]

    def flush(self) -> list[Span]:
        """The text ends here (end of input, or a tool call begins): what was held is text."""
        return [shown(self._scanner.flush())]
