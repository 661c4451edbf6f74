"""Finds the longest kept prefix of a prompt, by token identity.

A trie whose edges are whole blocks of tokens, and shorter at the tips. Edges of a node are sorted, so the edge that
shares most with a prompt is a neighbour of where the prompt would be: the cost grows with the prompt's blocks and the
logarithm of what is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from .layout import BLOCK
from .segments import Segment

_TOKEN = 4

LOOK = 32
"""Holders of one block that are looked at. More of them have the very same rows, so any will do."""


@dataclass(slots=True, eq=False)
class Node:
    """The tokens so far, and who holds the last block of them."""

    edges: list[bytes] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    holders: dict[Segment, None] = field(default_factory=dict)

    def child(self, edge: bytes) -> Node | None:
        i = bisect_left(self.edges, edge)
        return self.nodes[i] if i < len(self.edges) and self.edges[i] == edge else None

    def grow(self, edge: bytes) -> Node:
        i = bisect_left(self.edges, edge)
        if i < len(self.edges) and self.edges[i] == edge:
            return self.nodes[i]
        made = Node()
        self.edges.insert(i, edge)
        self.nodes.insert(i, made)
        return made

    def prune(self, edge: bytes) -> None:
        i = bisect_left(self.edges, edge)
        if i < len(self.edges) and self.edges[i] == edge and not self.nodes[i].holders and not self.nodes[i].edges:
            del self.edges[i], self.nodes[i]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest kept prefix: its length in tokens and the segments that physically hold its last row.

    ends: idle conversations that end on a prefix of the prompt, longest first: they can go on without a fork.
    """

    length: int
    holders: tuple[Segment, ...]
    ends: tuple[Segment, ...] = ()


class Prefixes:
    """Segments by the tokens of their rows, one trie for each salt.

    For each segment: its salt, its edges, and the nodes from where its own tokens begin to where they end.
    """

    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._edges: dict[Segment, tuple[bytes, list[bytes], list[Node]]] = {}

    def __len__(self) -> int:
        return len(self._edges)

    def salt(self, segment: Segment) -> bytes | None:
        """The salt an indexed segment was indexed under; None for others."""
        return self._edges[segment][0] if segment in self._edges else None

    def update(self, segment: Segment, salt: bytes) -> None:
        """Makes the index agree with the segment's tokens. Its ancestors must be indexed.

        Call it after every cut: between two calls the tokens may only have grown past the last whole block.
        """
        if segment not in self._edges:
            self._edges[segment] = (salt, [], [self._base(segment, salt)])
        _, edges, nodes = self._edges[segment]
        sure = min(max(0, len(edges) - 1), len(segment.tokens) // BLOCK)
        new = _edges(segment, sure)
        if new == edges[sure:]:
            return
        _drop(segment, edges, nodes, sure)
        for edge in new:
            nodes.append(nodes[-1].grow(edge))
            nodes[-1].holders[segment] = None
        edges += new

    def remove(self, segment: Segment) -> None:
        _, edges, nodes = self._edges.pop(segment, (b"", [], []))
        _drop(segment, edges, nodes, 0)

    def longest(self, tokens: Sequence[int], limit: int, salt: bytes) -> Match:
        """The longest prefix of `tokens[:limit]` that some segment holds."""
        at = self._roots.get(salt)
        length, nodes, ends = 0, [], []
        wanted = _pack(tokens[:limit])
        for start in range(0, len(wanted), BLOCK * _TOKEN):
            if at is None:
                break
            block = wanted[start : start + BLOCK * _TOKEN]
            whole = at.child(block) if len(block) == BLOCK * _TOKEN else None
            if whole is None:
                shared, near = _nearest(at, block)
                ends += _ends(at, block, start // _TOKEN, shared)
                if shared:
                    length, nodes = start // _TOKEN + shared, near
                break
            length, nodes, at = (start + len(block)) // _TOKEN, [whole], whole
            ends += _idle_ends(whole, length)
        holders = dict.fromkeys(s for node in nodes for s in islice(node.holders, LOOK))
        return Match(length, tuple(holders), tuple(sorted(ends, key=lambda s: -s.frontier)))

    def _base(self, segment: Segment, salt: bytes) -> Node:
        """The node where the segment's own tokens begin: its parent holds the rows before, so the node is there."""
        parent = segment.parent
        if parent is None:
            return self._roots.setdefault(salt, Node())
        return self._edges[parent][2][(segment.start - parent.start) // BLOCK]


def _drop(segment: Segment, edges: list[bytes], nodes: list[Node], keep: int) -> None:
    """Takes a segment out of its nodes past the first `keep` edges."""
    while len(edges) > keep:
        nodes.pop().holders.pop(segment, None)
        nodes[-1].prune(edges.pop())


def _pack(tokens: Sequence[int]) -> bytes:
    # Big-endian, so that the order of the bytes is the order of the tokens.
    return np.asarray(tokens, dtype=">u4").tobytes()


def _edges(segment: Segment, first: int = 0) -> list[bytes]:
    """The segment's tokens as edges, from block `first` on."""
    packed = _pack(segment.tokens[first * BLOCK :])
    return [packed[i : i + BLOCK * _TOKEN] for i in range(0, len(packed), BLOCK * _TOKEN)]


def _common(a: bytes, b: bytes) -> int:
    """How many leading tokens two packed runs share."""
    n = min(len(a), len(b)) // _TOKEN
    x, y = (np.frombuffer(v, dtype=">u4", count=n) for v in (a, b))
    differ = np.flatnonzero(x != y)
    return int(differ[0]) if len(differ) else n


def _nearest(at: Node, block: bytes) -> tuple[int, list[Node]]:
    """The most tokens an edge shares with `block`, and every neighbouring node that shares as many."""
    i = bisect_left(at.edges, block)
    shared = {j: _common(at.edges[j], block) for j in (i - 1, i) if 0 <= j < len(at.edges)}
    most = max(shared.values(), default=0)
    return most, [at.nodes[j] for j, n in shared.items() if n == most]


END_SLACK = 64
"""Tokens by which a conversation that ends on a prefix may be shorter than the longest prefix and still be preferred:
computing so few rows again costs less than a fork's copies and a second tail."""


def _ends(at: Node, block: bytes, start: int, shared: int) -> list[Segment]:
    out = []
    for n in range(shared, max(0, shared - END_SLACK), -1):
        node = at.child(block[: n * _TOKEN])
        if node is not None:
            out += _idle_ends(node, start + n)
    return out


def _idle_ends(node: Node, length: int) -> list[Segment]:
    return [s for s in islice(node.holders, LOOK) if s.tip is not None and s.lease is None and s.frontier == length]
