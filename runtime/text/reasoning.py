"""Splits a reply into thinking and answer by the tags of the model's chat template."""

from __future__ import annotations

from dataclasses import dataclass

from .scan import Scanner
from .spans import Span, dropped, shown


@dataclass(frozen=True, slots=True)
class Tags:
    """How a template marks thinking. markup: further marks around the answer, never shown."""

    open: str
    close: str
    markup: tuple[str, ...] = ()


# The first pair that the template names, or that the vocabulary has as a single token, is the model's.
KNOWN_TAGS = (
    Tags("<think>", "</think>"),
    Tags("<longcat_think>", "</longcat_think>"),
    Tags("<|think:start|>", "<|think:end|>"),
    Tags("<|channel>thought", "<channel|>"),
    Tags(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    Tags(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>", "<|end|>"),
    ),
)


class Splitter:
    """Thinking, then answer. Feed text, get spans of kind "reasoning" and "text".

    An opening tag counts only at the start of the reply, a closing tag only inside thinking: tags quoted later in the
    answer are the answer. Newlines that touch the tags belong to the markup. Thinking that never closes stays
    thinking. opened: the prompt already ended in the opening tag.
    """

    __slots__ = ("_close", "_head", "_markup", "_newlines", "_open", "_space", "_state", "_tags")

    def __init__(self, tags: Tags, opened: bool = False) -> None:
        self._tags = tags
        self._close = Scanner(tags.close)
        self._markup = Scanner(*tags.markup)
        self._space = ""
        self._head = ""
        self._newlines = 0
        self._state = self._opening if not opened else self._entering

    def feed(self, text: str) -> list[Span]:
        """More of the reply. Each state takes what is its own and leaves the rest to the next one."""
        spans: list[Span] = []
        while text:
            text = self._state(text, spans)
        return spans

    def _opening(self, text: str, spans: list[Span]) -> str:
        """Nothing but space so far: is the next thing the opening tag?"""
        if not self._head:
            rest = text.lstrip()
            self._space += text[: len(text) - len(rest)]
            text = rest
        want = self._tags.open
        take = len(want) - len(self._head)
        self._head += text[:take]
        if self._head == want:
            spans.append(dropped(len(self._space) + len(want), "reasoning"))
            self._space, self._head, self._state = "", "", self._entering
        elif not want.startswith(self._head):
            self._state = self._answering
            return self._unread() + text[take:]
        return text[take:]

    def _unread(self) -> str:
        text, self._space, self._head = self._space + self._head, "", ""
        return text

    def _entering(self, text: str, spans: list[Span]) -> str:
        """Inside thinking, before its first character. A model may repeat the tag its prompt already opened."""
        rest = text.lstrip("\n") if not self._head else text
        spans.append(dropped(len(text) - len(rest), "reasoning"))
        want = self._tags.open
        take = len(want) - len(self._head)
        self._head += rest[:take]
        if self._head == want:
            spans.append(dropped(len(want), "reasoning"))
            self._head = ""
        elif not want.startswith(self._head):
            self._state = self._thinking
            return self._unread() + rest[take:]
        return rest[take:]

    def _thinking(self, text: str, spans: list[Span]) -> str:
        before, hit, rest = self._close.feed(text)
        spans += self._thought(before)
        if hit is not None:
            spans.append(dropped(self._newlines + len(hit), "reasoning"))
            self._newlines, self._state = 0, self._leaving
        return rest

    def _thought(self, text: str) -> list[Span]:
        """Newlines at the end wait: before the closing tag they are markup."""
        body = text.rstrip("\n")
        waiting, self._newlines = self._newlines, len(text) - len(body)
        if not body:
            self._newlines += waiting
            return []
        return [shown("\n" * waiting + body, "reasoning")]

    def _leaving(self, text: str, spans: list[Span]) -> str:
        rest = text.lstrip("\n")
        spans.append(dropped(len(text) - len(rest)))
        if rest:
            self._state = self._answering
        return rest

    def _answering(self, text: str, spans: list[Span]) -> str:
        for before, hit in self._markup.split(text):
            spans.append(shown(before))
            spans.append(dropped(len(hit or "")))
        return ""

    def flush(self) -> list[Span]:
        """End of input: everything held comes out, in its place."""
        if self._state == self._opening:
            return [shown(self._unread())]
        thought = self._unread() + self._close.flush()
        return [*self._thought(thought), shown("\n" * self._newlines, "reasoning"), shown(self._markup.flush())]
