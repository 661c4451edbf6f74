"""Prompts that begin like an earlier one are tokenised from where they differ: a turn costs its new text."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from onecopy.runtime.text.tokenizer import Tokenizer

KEPT = 1 << 21
"""Characters of earlier prompts that are remembered, over all of them; the newest is kept whatever its size."""
CLOSE = 4096
"""Characters of new text below which no better earlier prompt is looked for."""
SMALL = 1024
"""Characters below which remembering costs more than tokenising."""


@dataclass(frozen=True, slots=True)
class Known:
    """An earlier prompt. marks: start and end in characters, and index among the ids, of each control token."""

    text: str
    ids: array[int]
    marks: Sequence[tuple[int, int, int]]

    def split(self, text: str) -> tuple[int, int]:
        """(characters, ids) that `text` shares, up to a control token that both have; (0, 0) when there is none."""
        at = bisect_left(self.marks, True, key=lambda mark: not text.startswith(self.text[: mark[1]]))
        return (self.marks[at - 1][0], self.marks[at - 1][2]) if at else (0, 0)


class RememberingTokenizer(Tokenizer):
    """A tokenizer whose `encode` of rendered prompts goes on from earlier ones. Same ids, for the text is cut only in
    front of control tokens, which no token reaches across. Safe to call from several threads.
    """

    def __init__(self, source: Tokenizer) -> None:
        control = [i for i in range(source.vocab_size) if source.is_special(i)]
        super().__init__(
            source.inner,
            eos_ids=source.eos_ids,
            bos_id=source.bos_id,
            template=source.template,
            names=source.names,
            control=control,
        )
        added = source.inner.get_added_tokens_decoder().items()
        self._walls = frozenset(i for i, t in added if t.special and not (t.normalized or t.lstrip or t.single_word))
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        if bos or not special or len(text) < SMALL:
            return super().encode(text, special=special, bos=bos)
        base, at, index = self._nearest(text)
        new = self.inner.encode(text[at:], add_special_tokens=False)
        ids = base.ids[:index] + array("I", new.ids) if base else array("I", new.ids)
        marks = [mark for mark in base.marks if mark[2] < index] if base else []
        for i, (token, (start, end)) in enumerate(zip(new.ids, new.offsets, strict=True), index):
            if token in self._walls:
                marks.append((at + start, at + end, i))
        self._remember(Known(text, ids, marks))
        return ids.tolist()

    def _nearest(self, text: str) -> tuple[Known | None, int, int]:
        """The earlier prompt to go on from, how much of its text and how many of its ids."""
        best: tuple[Known | None, int, int] = (None, 0, 0)
        with self._lock:
            newest_first = list(reversed(self._known.values()))
        for known in newest_first:
            at, index = known.split(text)
            if at > best[1]:
                best = (known, at, index)
            if len(text) - best[1] <= CLOSE:
                break
        return best

    def _remember(self, new: Known) -> None:
        with self._lock:
            old = self._known.pop(new.text, None)
            self._known[new.text] = new
            self._held += len(new.text) - (len(old.text) if old else 0)
            while self._held > KEPT and len(self._known) > 1:
                self._held -= len(self._known.popitem(last=False)[0])


__all__ = ["RememberingTokenizer"]
