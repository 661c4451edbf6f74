"""Conversations as the index shows them: chains of records from a first block to a tip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .index import Entry, Index
from .keys import ROOT
from .record import Kind


@dataclass(frozen=True, slots=True)
class Conversation:
    """One tip and what it stands on.

    tip: key of the last record. block: of the last whole block. tokens: the position where it ends. size: bytes of all
    its records, size_own: of those that no other conversation shares. used: Unix seconds. whole: every block from
    position 0 is there.
    """

    tip: bytes
    block: bytes
    tokens: int
    records: int
    size: int
    size_own: int
    model: str
    fingerprint: bytes
    used: int
    whole: bool


def conversations(index: Index) -> list[Conversation]:
    """All of them, last used first. An anchor whose block goes on is a waypoint of that chain, and no tip."""
    onward = _onward(index)
    tips = [entry for entry in index.entries.values() if _is_tip(entry, index, onward)]
    return sorted((_describe(tip, index) for tip in tips), key=lambda c: c.used, reverse=True)


def tail_of(index: Index, tip: bytes) -> Iterator[Entry]:
    """The records that only this conversation needs, from `tip` down, with the anchors along the way."""
    onward = _onward(index)
    entry, below = index.entries.get(tip), b""
    while entry is not None and onward.get(entry.key, set()) <= {below}:
        yield from (e for e in _anchors(index, entry.key) if e.key != below)
        yield entry
        below = entry.key
        entry = index.entries.get(entry.parent)


def _onward(index: Index) -> dict[bytes, set[bytes]]:
    """The blocks that follow each block."""
    onward = dict[bytes, set[bytes]]()
    for entry in index.entries.values():
        if entry.kind is Kind.BLOCK:
            onward.setdefault(entry.parent, set()).add(entry.key)
    return onward


def _is_tip(entry: Entry, index: Index, onward: dict[bytes, set[bytes]]) -> bool:
    if entry.kind is Kind.BLOCK:
        return not index.children[entry.key]
    return entry.parent == ROOT or entry.parent not in onward


def _anchors(index: Index, parent: bytes) -> list[Entry]:
    if parent not in index.tails:
        return []
    return [e for e in index.entries.values() if e.kind is Kind.ANCHOR and e.parent == parent]


def _describe(tip: Entry, index: Index) -> Conversation:
    chain = index.chain(tip.key)
    model = index.models.get(tip.model)
    own = 0
    for entry in reversed(chain):
        if index.children[entry.key] > 1:
            break
        own += entry.length
    return Conversation(
        tip=tip.key,
        block=tip.key if tip.kind is Kind.BLOCK else tip.parent,
        tokens=tip.at,
        records=len(chain),
        size=sum(e.length for e in chain),
        size_own=own,
        model=model.name if model else "",
        fingerprint=model.fingerprint if model else b"",
        used=tip.used,
        whole=chain[0].start == 0,
    )
