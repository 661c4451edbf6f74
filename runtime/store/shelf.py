"""The kernel of every write: data durable, then manifest durable, then in the index. Nothing else adds to the index.

Removing goes the other way: out of the index at once, out of the manifest with the next commit, and only then may the
bytes go. So at every instant what the manifest names is on disk.
"""

from __future__ import annotations

from ..seams import Disk
from . import manifest as log
from .index import Entry
from .journal import Journal
from .packs import START, Packs
from .record import Header, decode_record
from .recovery import Recovered, drop_lost

_SHORT_LOG = 64
"""Ops of a log that is never worth replacing for its room."""


class Shelf:
    """Index, packs and journal of one directory, kept in step. One call at a time; OSErrors pass through.

    pack_bytes: a pack that has reached this many bytes gets no more records.
    """

    def __init__(self, disk: Disk, path: str, packs: Packs, found: Recovered, pack_bytes: int) -> None:
        self.packs = packs
        self.index = found.index
        self.journal = Journal(disk, path, lambda: self.index.snapshot())
        self.pack_bytes = pack_bytes
        self._pending: list[log.Add] = []
        self._queue: list[log.Op] = []

    def resume(self, found: Recovered) -> None:
        """Opens for writing what recovery found, under a manifest written anew.

        What a killed process left may be readable and yet never reach the disk, if its last sync failed: nothing is
        appended to that, and no pack is cut back or continued before a manifest of our own is durable.
        """
        self.journal.after(found.log.generation if found.log else 0)
        self.journal.write((), len(self.index.entries))
        self._resume_pack()

    @property
    def size(self) -> int:
        """Bytes of all packs and the manifest."""
        return sum(self.packs.sizes.values()) + self.journal.size

    @property
    def pending(self) -> set[bytes]:
        """Keys of records that are written and not yet committed."""
        return {add.key for add in self._pending}

    def has(self, key: bytes) -> bool:
        return key in self.index.entries

    def stage(self, header: Header, raw: bytes | memoryview, used: int, model: int) -> None:
        """Appends a record. It does not exist before `commit`."""
        self._open_pack(len(raw))
        try:
            pack, offset = self.packs.append(raw)
        except OSError:
            self._settle_failure()
            raise
        where = (pack, offset, header.total)
        self._pending.append(
            log.Add(header.key, header.parent, header.kind, *where, header.start, header.rows, used, model)
        )

    def commit(self) -> tuple[bytes, ...]:
        """Makes everything staged and forgotten durable; returns the keys that exist from now on.

        On an error nothing staged exists, and must be staged again.
        """
        if not self._pending and not self._queue and self.journal.sound:
            return ()
        try:
            self.packs.sync()
            self.journal.write([*self._queue, *self._pending], len(self.index.entries))
        except OSError:
            self._pending.clear()
            if not self.journal.sound:
                self._queue.clear()  # the snapshot that comes next is made from the index, which has them
            raise
        added = tuple(self._pending)
        self._queue.clear()
        self._pending.clear()
        for add in added:
            self.index.apply(add)
        return tuple(add.key for add in added)

    def say(self, op: log.Op) -> None:
        """Applies an op that removes or describes now, and writes it with the next commit."""
        self.index.apply(op)
        self._queue.append(op)

    def move(self, entry: Entry) -> int:
        """Stages a copy of a record at the end of the active pack; returns its bytes. Raises BadRecord as `load`."""
        raw = self.packs.read(entry.pack, entry.offset, entry.size)
        header, _ = decode_record(raw)
        self.stage(header, raw, entry.used, entry.model)
        return len(raw)

    def remove_pack(self, number: int) -> None:
        """Deletes a pack that holds no live record. What was forgotten becomes durable first."""
        self.commit()
        self.packs.remove(number)
        self.index.packs.discard(number)
        self._say_packs()

    def compact(self) -> bool:
        """Replaces a manifest that has grown to more than twice its snapshot. False: not worth it."""
        live = len(self.index.entries)
        if self.journal.surplus(live) <= live + _SHORT_LOG:
            return False
        self.commit()
        self.journal.after(self.journal.generation)
        self.journal.write((), live)
        return True

    def reopen(self) -> None:
        """After the directory changed under us: look again, forget what is gone, and write a new manifest next."""
        self.packs.close()
        self.journal.after(self.journal.generation)
        self._pending.clear()
        self._queue.clear()
        self.packs.look()
        self.index.packs = set(self.packs.sizes)
        drop_lost(self.index, self.packs)

    def close(self) -> None:
        """Commits what can be committed and closes the files."""
        try:
            self.commit()
        finally:
            self.packs.close()
            self.journal.close()

    def _open_pack(self, size: int) -> None:
        active = self.packs.active
        if active is not None and (self.packs.sizes[active] + size <= self.pack_bytes or not self._used(active)):
            return
        self.commit()
        number = self.index.next_pack
        self.index.next_pack += 1
        self.packs.begin(number)
        self.index.packs.add(number)
        self._say_packs()

    def _used(self, number: int) -> bool:
        return self.packs.sizes[number] > START

    def _say_packs(self) -> None:
        self._queue = [op for op in self._queue if not isinstance(op, log.Packs)]
        self._queue.append(log.Packs(self.index.next_pack, tuple(sorted(self.index.packs))))

    def _settle_failure(self) -> None:
        if self.packs.active is None:
            self._pending.clear()

    def _resume_pack(self) -> None:
        """Goes on in the last pack if it has room. A pack without a named record may not even have its header."""
        last = max(self.packs.sizes, default=0)
        ends = [e.offset + e.size for e in self.index.entries.values() if e.pack == last]
        end = max(ends, default=self.pack_bytes)
        if end < self.pack_bytes and end <= self.packs.sizes[last]:
            self.packs.resume(last, end)
