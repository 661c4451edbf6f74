"""The text between a call's marks, in two ways: read when it is whole, or shown while it is written."""

from __future__ import annotations

import json
from typing import Any

from .arguments import Arguments
from .coerce import coerce
from .formats import Call, ToolFormat
from .json_walk import Malformed, Members, Role
from .ledger import Edge, Ledger
from .scan import Scanner
from .spans import Span, dropped

_ARGUMENTS = ("arguments", "parameters")


class WholeBody:
    """A call in a format that is read once it is whole. text: what of the body is known already."""

    __slots__ = ("_edge", "_format", "_ledger", "_mark", "_parts", "_quoted", "_scanner")

    def __init__(self, format_: ToolFormat, ledger: Ledger, edge: Edge, text: str = "") -> None:
        self._format = format_
        self._ledger = ledger
        self._edge = edge
        self._mark = format_.end or format_.start
        self._scanner = Scanner(self._mark, *(format_.quotes or ()))
        self._parts = [text]
        self._quoted = False

    def feed(self, text: str, spans: list[Span]) -> str | None:
        """Take text up to the end mark: what follows it, or None while the call goes on."""
        hit: str | None = ""
        while hit is not None:
            before, hit, text = self._scanner.feed(text)
            self._parts.append(before)
            if hit == self._mark and not self._quoted:
                return text if self._format.end else hit + text
            self._parts.append(hit or "")
            self._quote(hit)
        return None

    def _quote(self, hit: str | None) -> None:
        opening, closing = self._format.quotes or (None, None)
        if hit is not None and hit in (opening, closing):
            self._quoted = hit == opening and not (self._quoted and opening == closing)

    def _body(self) -> str:
        self._parts = ["".join(self._parts) + self._scanner.flush()]
        return self._parts[0]

    def close(self, end: str) -> list[Span]:
        """The end mark came: the calls, or the text as it was."""
        body = self._body()
        try:
            calls = [self._checked(call) for call in self._format.parse(body, list(self._ledger.tools.values()))]
        except Malformed:
            return self.text(end)
        raw = len(self._format.start) + len(body) + len(end)
        return [*self._edge.flush(drop=True), *self._spans(calls, raw)]

    def text(self, end: str) -> list[Span]:
        """The whole call as the text it is."""
        return self._edge.text(self._format.start + self._body() + end)

    def _checked(self, call: Call) -> tuple[str, str]:
        """Name and arguments of a call of a tool we know; raises Malformed."""
        if call.name not in self._ledger.tools:
            raise Malformed("unknown tool")
        return call.name, dumped(call.arguments, self._ledger.tools[call.name].parameters)

    def _spans(self, calls: list[tuple[str, str]], raw: int) -> list[Span]:
        spans: list[Span] = []
        for name, arguments in calls:
            if not self._ledger.full:
                spans += [self._ledger.begin(name, raw), self._ledger.end(arguments, 0)]
                raw = 0
        return spans

    def cut(self, *, finished: bool) -> list[Span]:
        """The reply ended inside the call. finished: the model ended it, so only the end mark may be missing."""
        whole = (finished and self._format.strict) or not self._format.end
        return self.close("") if whole else self.text("")


def dumped(arguments: Any, schema: Any) -> str:
    """Arguments as JSON, typed by the schema; raises Malformed for what JSON cannot say."""
    try:
        return json.dumps(coerce(arguments, schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise Malformed(str(error)) from error


class JsonBody:
    """A call as {"name": ..., "arguments": {...}}: announced when its name is known, arguments shown as they come.

    What does not fit (members in another order, a list of calls, no JSON at all) is read again by `WholeBody`. A call
    that breaks after it was announced stays open, and its text comes out as text.
    """

    __slots__ = (
        "_arguments",
        "_counted",
        "_edge",
        "_end",
        "_first",
        "_format",
        "_ledger",
        "_members",
        "_name",
        "_parts",
        "_raw",
        "_spelled",
        "_whole",
    )

    def __init__(self, format_: ToolFormat, ledger: Ledger, edge: Edge) -> None:
        self._format = format_
        self._ledger = ledger
        self._edge = edge
        self._end = Scanner(format_.end)
        self._members = Members()
        self._arguments: Arguments | None = None
        self._whole: WholeBody | None = None
        self._name: Any = None
        self._spelled = ""
        self._parts: list[str] = []
        self._first = False
        self._raw = len(format_.start)
        self._counted = 0

    def feed(self, text: str, spans: list[Span]) -> str | None:
        """Take text up to the end mark: what follows it, or None while the call goes on."""
        if self._whole is not None:
            return self._whole.feed(text, spans)
        self._parts.append(text)
        try:
            return self._walk(text, spans)
        except Malformed:
            self._whole = WholeBody(self._format, self._ledger, self._edge)
            return self._whole.feed("".join(self._parts), spans)

    def _walk(self, text: str, spans: list[Span]) -> str | None:
        out: list[str] = []
        try:
            for at, c in enumerate(text):
                if self._members.done:
                    return self._trail(text[at:])
                out.append(self._step(c, spans))
                self._raw += 1
            return None
        finally:
            if self._arguments is not None:
                spans.append(self._ledger.more("".join(out), self._count()))

    def _count(self) -> int:
        raw, self._raw = self._raw, 0
        self._counted += raw
        return raw

    def _trail(self, text: str) -> str | None:
        """Past the object: only space, then the end mark."""
        before, hit, rest = self._end.feed(text)
        if before.strip():
            raise Malformed("text after the call")
        self._raw += len(text) - len(rest)
        if hit is None:
            return None
        self._parts = ["".join(self._parts)]
        self._parts[0] = self._parts[0][: len(self._parts[0]) - len(rest) - len(hit)]
        return rest

    def _step(self, c: str, spans: list[Span]) -> str:
        role = self._members.step(c)
        first, self._first = self._first, role is Role.SYNTAX
        if role is Role.SYNTAX:
            return ""
        key = self._members.key
        if first:
            self._begin(key, c, spans)
        if key == "name":
            self._spell(c)
        return self._arguments.feed(c) if self._arguments is not None and key in _ARGUMENTS else ""

    def _begin(self, key: str, c: str, spans: list[Span]) -> None:
        """A member's value begins. The arguments of an allowed tool open the call."""
        if self._arguments is not None and (key == "name" or key in _ARGUMENTS):
            raise Malformed("a member twice")
        self._spelled = ""
        if key in _ARGUMENTS and c == "{" and self._name in self._ledger.tools:
            spans += self._edge.flush(drop=True)
            spans.append(self._ledger.begin(self._name, self._count()))
            self._arguments = Arguments(self._ledger.tools[self._name].parameters)

    def _spell(self, c: str) -> None:
        self._spelled += c
        if self._members.ended and self._spelled.startswith('"'):
            self._name = json.loads(self._spelled)

    def _fallen(self) -> WholeBody:
        """The reader of the whole body; without one yet, with all the text so far."""
        if self._whole is None:
            self._whole = WholeBody(self._format, self._ledger, self._edge, "".join(self._parts))
        return self._whole

    def close(self, end: str) -> list[Span]:
        """The end mark came."""
        if self._arguments is None:
            return self._fallen().close(end)
        if self._whole is not None:
            return [dropped(-self._counted), *self._whole.text(end)]
        return [self._ledger.end(self._arguments.rest(), self._count())]

    def cut(self, *, finished: bool) -> list[Span]:
        """The reply ended inside the call. finished: the model ended it, so only the end mark may be missing."""
        if self._arguments is None:
            return self._fallen().cut(finished=finished)
        if self._whole is not None:
            return [dropped(-self._counted), *self._whole.text("")]
        if finished and self._members.done and not self._end.held:
            return [self._ledger.end(self._arguments.rest(), self._count())]
        return [self._ledger.more(self._arguments.pending(), self._count())]
