"""What the stages of the reader hand to each other: runs of output, each with the input it used up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of output of one kind. raw: how many input characters it used up (markup is used up and not shown).

    index, id and name belong to kind "call"; id and name are set in a call's first span only.
    """

    kind: Kind
    text: str
    raw: int
    index: int = 0
    id: str | None = None
    name: str | None = None

    def follows(self, other: Span) -> bool:
        """Whether this span only continues `other`."""
        return self.kind == other.kind and self.index == other.index and self.name is None


def shown(text: str, kind: Kind = "text") -> Span:
    """Text that passes as it is."""
    return Span(kind, text, len(text))


def dropped(raw: int, kind: Kind = "text") -> Span:
    """Markup: used up, never shown."""
    return Span(kind, "", raw)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same output in the fewest spans; empty ones are left out."""
    out: list[Span] = []
    for span in spans:
        if out and span.follows(out[-1]):
            out[-1] = replace(out[-1], text=out[-1].text + span.text, raw=out[-1].raw + span.raw)
        elif span.raw or span.text or span.name is not None:
            out.append(span)
    return out
