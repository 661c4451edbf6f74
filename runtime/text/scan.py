"""Finds the first of several strings in a stream of text, holding back as little as possible.

The automaton is Aho and Corasick's (1975): one transition per character on average, however many patterns. The state
after a character is the longest suffix of the text that begins some pattern, and exactly that suffix is held back.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(slots=True)
class _Node:
    next: dict[str, int]
    fail: int
    depth: int
    hit: str | None


class Automaton:
    """The immutable part, shared by all scanners of the same patterns. Empty patterns are ignored."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._nodes = [_Node({}, 0, 0, None)]
        for pattern in filter(None, patterns):
            self._insert(pattern)
        self._link()
        first = "".join(re.escape(c) for c in self._nodes[0].next)
        self._first = re.compile(f"[{first}]") if first else None

    def _insert(self, pattern: str) -> None:
        state = 0
        for depth, c in enumerate(pattern, 1):
            following = self._nodes[state].next
            if c not in following:
                following[c] = len(self._nodes)
                self._nodes.append(_Node({}, 0, depth, None))
            state = following[c]
        self._nodes[state].hit = pattern

    def _link(self) -> None:
        queue = deque(self._nodes[0].next.values())
        while queue:
            node = self._nodes[queue.popleft()]
            for c, child in node.next.items():
                self._nodes[child].fail = self.step(node.fail, c)
                self._inherit(self._nodes[child])
                queue.append(child)

    def _inherit(self, node: _Node) -> None:
        if node.hit is None:
            node.hit = self._nodes[node.fail].hit

    def step(self, state: int, c: str) -> int:
        """The state after one more character; 0 is the start."""
        nodes = self._nodes
        while c not in nodes[state].next:
            if state == 0:
                return 0
            state = nodes[state].fail
        return nodes[state].next[c]

    def depth(self, state: int) -> int:
        """How many characters at the end of the text may still become a pattern."""
        return self._nodes[state].depth

    def hit(self, state: int) -> str | None:
        """The longest pattern that ends here."""
        return self._nodes[state].hit

    def skip(self, text: str, at: int) -> int:
        """The next position from `at` where a pattern can begin."""
        found = self._first.search(text, at) if self._first else None
        return found.start() if found else len(text)


@lru_cache(maxsize=256)
def automaton(patterns: tuple[str, ...]) -> Automaton:
    """The automaton of these patterns, built once."""
    return Automaton(patterns)


class Scanner:
    """The mutable part: one stream. `feed` stops at the first hit (the one that ends first; then the longest)."""

    __slots__ = ("_automaton", "_held", "_state")

    def __init__(self, *patterns: str) -> None:
        self._automaton = automaton(patterns)
        self._state = 0
        self._held = ""

    @property
    def held(self) -> str:
        """Text kept because it may still become a pattern; shorter than the longest pattern."""
        return self._held

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """(text that is surely no pattern, the pattern hit or None, the rest of `text` after the hit)."""
        whole, at = self._held + text, len(self._held)
        find, state, size = self._automaton, self._state, len(whole)
        while at < size:
            if state == 0 and (at := find.skip(whole, at)) == size:
                break
            state = find.step(state, whole[at])
            at += 1
            if (hit := find.hit(state)) is not None:
                self._state, self._held = 0, ""
                return whole[: at - len(hit)], hit, whole[at:]
        sure = size - find.depth(state)
        self._state, self._held = state, whole[sure:]
        return whole[:sure], None, ""

    def flush(self) -> str:
        """End of input: what was held is text after all."""
        text, self._state, self._held = self._held, 0, ""
        return text

    def split(self, text: str) -> Iterator[tuple[str, str | None]]:
        """`feed` over and over: (text, the pattern that followed it) until the input is used up."""
        hit: str | None = ""
        while hit is not None:
            before, hit, text = self.feed(text)
            yield before, hit
