"""Which records exist and where: the manifest's log applied in order. In memory only, derived from the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

from . import manifest as log
from .record import Kind, padded

K = TypeVar("K")
Cold = tuple[int, bytes]
"""When a chain's tail was last used, and its key."""
STALE = 4
"""Items a record may have in the heap of tails, on average, before the heap is made anew."""


@dataclass(slots=True)
class Entry:
    """One record. Fields as in `manifest.Add`; `used` moves with touches."""

    key: bytes
    parent: bytes
    kind: Kind
    pack: int
    offset: int
    length: int
    start: int
    rows: int
    used: int
    model: int

    @property
    def at(self) -> int:
        return self.start + self.rows

    @property
    def size(self) -> int:
        """Bytes it takes in its pack."""
        return padded(self.length)

    def op(self) -> log.Add:
        return log.Add(
            self.key,
            self.parent,
            self.kind,
            self.pack,
            self.offset,
            self.length,
            self.start,
            self.rows,
            self.used,
            self.model,
        )


class Index:
    """entries by key; live bytes and keys, in order of arrival, per pack; children and anchor tails per parent key.

    tails: for a block's key, how many anchors there are at each tail length, so that a lookup knows what to try.
    """

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.children: Counter[bytes] = Counter()
        self.tails: dict[bytes, Counter[int]] = {}
        self.live: Counter[int] = Counter()
        self.packed: dict[int, dict[bytes, None]] = {}
        self.models: dict[int, log.Model] = {}
        self.packs: set[int] = set()
        self.next_pack = 1
        self.quarantined = 0
        self.anchors = 0
        self._cold: list[Cold] = []

    def apply(self, op: log.Op) -> None:
        """Brings the index to what `op` says. Keys that are not there are passed over."""
        self._table[type(op)](self, op)

    def model_id(self, fingerprint: bytes) -> int | None:
        return next((m.id for m in self.models.values() if m.fingerprint == fingerprint), None)

    @property
    def next_model(self) -> int:
        return max(self.models, default=0) + 1

    def snapshot(self) -> Iterator[log.Op]:
        """The shortest log that rebuilds this index (quarantine counts start anew)."""
        yield log.Packs(self.next_pack, tuple(sorted(self.packs)))
        yield from self.models.values()
        for entry in self.entries.values():
            yield entry.op()

    def chain(self, key: bytes) -> list[Entry]:
        """The records from the root to `key`, as far back as they exist without a gap."""
        found: list[Entry] = []
        while (entry := self.entries.get(key)) is not None:
            found.append(entry)
            key = entry.parent
        return found[::-1]

    def coldest(self, pinned: Collection[bytes]) -> Iterator[Entry]:
        """Records in the order they should go: oldest-used chains first, each from its tail; never a pinned one
        nor what a pinned one needs. Consume it without changing the index; drop what was taken afterwards.

        Logarithmic in the index for each record that is looked at: the chains' tails are kept in a heap, in which
        records that were used, extended or dropped since leave stale items to be passed over.
        """
        seen, taken, parents = list[Cold](), Counter[bytes](), list[Cold]()
        try:
            while self._cold or parents:
                kept = not parents or (bool(self._cold) and self._cold[0] <= parents[0])
                used, key = item = heappop(self._cold if kept else parents)
                if kept and (not self._is_cold(item) or (seen and seen[-1] == item)):
                    continue
                if kept:
                    seen.append(item)
                if key in pinned:
                    continue
                entry = self.entries[key]
                yield entry
                taken[entry.parent] += 1
                parent = self.entries.get(entry.parent)
                if parent is not None and taken[parent.key] == self.children[parent.key]:
                    heappush(parents, (max(used, parent.used), parent.key))
        finally:
            for item in seen:
                heappush(self._cold, item)

    def _is_cold(self, item: Cold) -> bool:
        used, key = item
        entry = self.entries.get(key)
        return entry is not None and entry.used == used and not self.children[key]

    def _cool(self, key: bytes) -> None:
        """Keeps `key` in the heap of tails, if it is one."""
        entry = self.entries.get(key)
        if entry is None or self.children[key]:
            return
        heappush(self._cold, (entry.used, key))
        if len(self._cold) > STALE * len(self.entries) + STALE:
            self._cold = [(e.used, e.key) for e in self.entries.values() if not self.children[e.key]]
            heapify(self._cold)

    def _add(self, op: log.Add) -> None:
        self._forget(op.key)
        parent = self.entries.get(op.parent)
        above = op.parent if parent is None else parent.key
        entry = Entry(op.key, above, op.kind, op.pack, op.offset, op.length, op.start, op.rows, op.used, op.model)
        self.entries[op.key] = entry
        self.packed.setdefault(entry.pack, {})[entry.key] = None
        self._count(entry, 1)
        self._cool(entry.key)

    def _drop(self, op: log.Drop) -> None:
        for key in op.keys:
            self._forget(key)

    def _touch(self, op: log.Touch) -> None:
        for key in op.keys:
            if (entry := self.entries.get(key)) is not None:
                entry.used = max(entry.used, op.used)
                self._cool(key)

    def _quarantine(self, op: log.Quarantine) -> None:
        self.quarantined += sum(self._forget(key) for key in op.keys)

    def _packs(self, op: log.Packs) -> None:
        self.next_pack, self.packs = op.next, set(op.numbers)

    def _model(self, op: log.Model) -> None:
        self.models[op.id] = op

    def _forget(self, key: bytes) -> bool:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._unpack(entry)
            self._count(entry, -1)
            self._cool(entry.parent)
        return entry is not None

    def _unpack(self, entry: Entry) -> None:
        packed = self.packed[entry.pack]
        del packed[entry.key]
        if not packed:
            del self.packed[entry.pack]

    def _count(self, entry: Entry, n: int) -> None:
        _bump(self.children, entry.parent, n)
        _bump(self.live, entry.pack, n * entry.size)
        if entry.kind is Kind.ANCHOR:
            self.anchors += n
            tails = self.tails.setdefault(entry.parent, Counter())
            _bump(tails, entry.rows, n)
            if not tails:
                del self.tails[entry.parent]

    _table: dict[type, Callable[[Index, Any], None]] = {  # noqa: RUF012
        log.Add: _add,
        log.Drop: _drop,
        log.Touch: _touch,
        log.Quarantine: _quarantine,
        log.Packs: _packs,
        log.Model: _model,
    }


def _bump(counter: Counter[K], key: K, n: int) -> None:
    counter[key] += n
    if not counter[key]:
        del counter[key]
