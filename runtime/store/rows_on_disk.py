"""The rows store's engine: content-addressed, append-only, verified on every read. Pure on the `Disk` seam.

Threads: `have`, `find`, `locate` and `load` may run beside anything. Everything else changes state and must run one
call at a time, on any thread; the rows store actor sees to it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..errors import StoreUnusable
from ..seams import Disk
from . import manifest as log
from .content import Found, Record, Stored, Verified, encode_content
from .conversations import Conversation, conversations, tail_of
from .index import Entry
from .keys import ROOT, anchor_key, block_keys
from .owners import owner_of
from .packs import Packs
from .reader import Reader
from .record import OtherVersion
from .recovery import Recovered, recover
from .room import IDLE_DEAD, Room, Swept, pack_bytes
from .shelf import Shelf

logger = logging.getLogger("onecopy.store")

LOCK = "lock"
GIB = 1 << 30
DEFAULT_QUOTA = 32 * GIB
DEFAULT_FLOOR = 2 * GIB
_TOUCH_EVERY = 60
_SWEEP_STEP = 64 << 20

Progress = Callable[[int, int], None]


class ReadOnly(OSError):
    """Another process holds the directory's lock, or it was opened to read."""

    def __init__(self) -> None:
        super().__init__(errno.EROFS, "the rows store is open for reading only")


class RowsOnDisk:
    """Blocks and anchors of one directory. Use `open`; fingerprint and model name go into what this process writes."""

    def __init__(
        self, disk: Disk, path: str, fingerprint: bytes, model: str, room: Room, shelf: Shelf, wall: Callable[[], float]
    ) -> None:
        self._disk = disk
        self.path = path
        self.fingerprint = fingerprint
        self._model_name = model
        self._room = room
        self._shelf = shelf
        self._wall = wall
        self.read_only = False
        self.owner: int | None = None  # process id of the writer that keeps this one read-only
        self.recovered = "new"
        self.lost = 0
        self._pins: Counter[bytes] = Counter()
        self._strikes: Counter[bytes] = Counter()
        self._versions: Counter[str] = Counter()
        self._owners: dict[bytes, bytes] = {}
        self._written = self._writes = self._read = self._reads = self._failures = self._misses = 0

    @classmethod
    def open(
        cls,
        disk: Disk,
        path: str,
        *,
        fingerprint: bytes,
        wall: Callable[[], float],
        model: str = "",
        quota: int = DEFAULT_QUOTA,
        floor: int = DEFAULT_FLOOR,
        read_only: bool = False,
    ) -> RowsOnDisk:
        """Opens or makes the store in directory `path`. wall: Unix seconds now.

        Another process that holds the lock makes this one read-only (`read_only`, `owner`). Raises StoreUnusable.
        """
        locked = False
        try:
            locked = not read_only and _take(disk, path)
            packs = Packs(disk, path)
            packs.look()
            found = recover(disk, path, packs)
            shelf = Shelf(disk, path, packs, found, pack_bytes(quota))
            store = cls(disk, path, fingerprint, model, Room(disk, path, shelf, quota, floor), shelf, wall)
            store._begin(found, locked)
        except OSError as error:
            if locked:
                disk.unlock(os.path.join(path, LOCK))
            raise StoreUnusable(f"The rows store cannot use {path}: {error.strerror or error}.") from error
        if not (locked or read_only):
            logger.warning("%s is in use by process %s: reading what is there, saving nothing", path, store.owner)
        return store

    # -- reading ------------------------------------------------------------------------------------------------

    def have(self, keys: Iterable[bytes]) -> int:
        """How many of the leading `keys` are on disk. Takes no more keys than it needs."""
        count = 0
        for key in keys:
            if not self._shelf.has(key):
                break
            count += 1
        return count

    def find(self, tokens: Sequence[int], salt: bytes) -> Found:
        """The leading whole blocks of `tokens` that are on disk, and every anchor within or just past them."""
        keys = list[bytes]()
        for key in block_keys(tokens, self.fingerprint, salt):
            if not self._shelf.has(key):
                break
            keys.append(key)
        chain = [ROOT, *keys]
        anchors = [found for i in range(len(keys), -1, -1) for found in self._anchors(chain[i], i, tokens, salt)]
        return Found(tuple(keys), tuple(anchors))

    def locate(self, key: bytes) -> Entry | None:
        """Where a record lies now, for `load`."""
        return self._shelf.index.entries.get(key)

    def reader(self) -> Reader:
        """For records from `locate`. Changes nothing: it may be used beside everything else."""
        return Reader(self._disk, self._shelf.packs.file)

    def load(self, entry: Entry) -> Stored:
        """Reads and verifies one record. Changes nothing. Raises OSError, OtherVersion, BadRecord or BadImage."""
        with self.reader() as reader:
            return reader.load(entry)

    def read(self, key: bytes) -> Stored | None:
        """The verified record, or None: not there, damaged (quarantined), of another version, or unreadable."""
        entry = self.locate(key)
        if entry is None:
            self._misses += 1
            return None
        try:
            stored = self.load(entry)
        except (OSError, ValueError) as error:
            self.failed(key, error)
            return None
        self.loaded(stored)
        return stored

    def loaded(self, stored: Stored) -> None:
        """Counts a successful `load`."""
        self._strikes.pop(stored.key, None)
        self._reads += 1
        self._read += stored.size

    def failed(self, key: bytes, error: Exception) -> None:
        """Acts on a failed `load` of `key`, so that no record is tried for ever.

        Damage: quarantined. Another version or a vanished pack: out of the index, and the next save replaces it.
        Any other disk error: the second time in a row it is treated as damage.
        """
        self._misses += 1
        if isinstance(error, OtherVersion):
            self._skip(key, str(error))
        elif isinstance(error, FileNotFoundError):
            self._say(log.Drop((key,)))
        elif isinstance(error, OSError) and not self._strikes[key]:
            self._strikes[key] += 1
        else:
            logger.warning("a damaged record was quarantined and will be computed again: %s", error)
            self._say(log.Quarantine((key,)))

    # -- writing ------------------------------------------------------------------------------------------------

    def put(self, records: Iterable[Record]) -> tuple[bytes, ...]:
        """Writes the records that are not there yet, under one commit; returns their keys once they are durable.

        Raises OSError (StoreFull, ReadOnly, the disk's own). Records before the failing one may be kept: `have` tells.
        """
        try:
            new = [record.key for record in records if self.append(record)]
        except OSError:
            self._commit_what_is_whole()
            raise
        self.commit()
        return tuple(key for key in new if self._shelf.has(key))

    def append(self, record: Record) -> int:
        """Writes one record, to exist from the next `commit` on; returns its bytes, 0 when it is there already."""
        if self._shelf.has(record.key) or record.key in self._shelf.pending:
            return 0
        self._writable()
        header, raw = encode_content(record, self.fingerprint, self._model_name, int(self._wall()))
        try:
            used = int(self._wall()) if record.used is None else record.used
            self._room.make(len(raw), self._kept(record.parent), used)
            self._shelf.stage(header, raw, used, self._model())
        except OSError:
            self._failures += 1
            raise
        self._written += len(raw)
        return len(raw)

    def commit(self) -> None:
        """Makes what was appended, dropped and touched durable. `locate` then tells what exists.

        Raises OSError: then nothing appended since the last commit exists.
        """
        if self.read_only:
            return
        try:
            keys = self._shelf.commit()
        except OSError:
            self._failures += 1
            raise
        self._writes += len(keys)

    def note_use(self, keys: Iterable[bytes], used: int | None = None) -> None:
        """Notes that these records were in use at `used`, now by default. Written with the next commit, at most once a
        minute for each."""
        now = int(self._wall()) if used is None else used
        entries = self._shelf.index.entries
        stale = tuple(key for key in keys if key in entries and now - entries[key].used >= _TOUCH_EVERY)
        if stale:
            self._say(log.Touch(now, stale))

    def drop(self, keys: Iterable[bytes]) -> int:
        """Forgets these records; returns how many there were. Their bytes go with a later sweep."""
        present = tuple(key for key in dict.fromkeys(keys) if self._shelf.has(key))
        if present:
            self._say(log.Drop(present))
        return len(present)

    def drop_conversation(self, tip: bytes) -> int:
        """Forgets a conversation from its tip to where another one shares it; returns the records dropped."""
        return self.drop(entry.key for entry in tail_of(self._shelf.index, tip))

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keeps these records, and what they build on, from eviction until `unpin`. Pins are counted."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        self._pins.subtract(keys)
        self._pins = +self._pins

    def sweep_step(self, most: int = _SWEEP_STEP, dead: float = IDLE_DEAD) -> Swept:
        """Frees dead bytes a little: at most `most` bytes copied. dead: the dead share that makes a pack worth it."""
        self._writable()
        return self._room.sweep_step(most, dead)

    def sweep(self, progress: Progress = lambda done, total: None) -> int:
        """Frees every dead byte there is; returns how many. progress(bytes freed, bytes dead at first)."""
        self._writable()
        self.commit()
        before = self._shelf.size
        dead = sum(map(self._room.dead, self._shelf.packs.sizes))
        self._room.retire_active()
        while self._room.sweep_step(_SWEEP_STEP, dead=0.0).more:
            progress(min(dead, max(0, before - self._shelf.size)), dead)
        return max(0, before - self._shelf.size)

    def verify(self, progress: Progress = lambda done, total: None) -> Verified:
        """Reads every record. progress(bytes done, bytes in all). Damaged ones are quarantined."""
        entries = list(self._shelf.index.entries.values())
        total, done, counts = sum(e.length for e in entries), 0, Counter[str]()
        for entry in entries:
            counts[self._check(entry)] += 1
            done += entry.length
            progress(done, total)
        return Verified(counts["good"], counts["bad"], counts["skipped"], counts["unread"], done)

    def close(self) -> None:
        """Commits, closes the files and lets go of the lock."""
        if self.read_only:
            return
        try:
            self._shelf.close()
        finally:
            self._disk.unlock(os.path.join(self.path, LOCK))
            self.read_only = True

    # -- telling ------------------------------------------------------------------------------------------------

    def conversations(self) -> list[Conversation]:
        """What is kept, by conversation, last used first."""
        return conversations(self._shelf.index)

    def owned(self, salts: Collection[bytes]) -> list[tuple[Conversation, bytes]]:
        """This model's conversations that are there from their beginning and belong to one of these salts, with it."""
        found = [(c, self._owner(c.tip, salts)) for c in self.conversations() if self._ours(c)]
        self._owners = {c.tip: salt for c, salt in found if salt is not None}
        return [(c, salt) for c, salt in found if salt is not None]

    def chain(self, tip: bytes) -> list[Entry]:
        """The records of a conversation from its first block to `tip`."""
        return self._shelf.index.chain(tip)

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, and what is kept now. Sizes in bytes."""
        index = self._shelf.index
        return {
            "blocks": len(index.entries) - index.anchors,
            "anchors": index.anchors,
            "live_bytes": sum(index.live.values()),
            "disk_bytes": self._shelf.size,
            "quota_bytes": self._room.quota,
            "packs": len(self._shelf.packs.sizes),
            "models": len(index.models),
            "writes": self._writes,
            "written_bytes": self._written,
            "write_failures": self._failures,
            "reads": self._reads,
            "read_bytes": self._read,
            "misses": self._misses,
            "quarantined": index.quarantined,
            "skipped": sum(self._versions.values()),
            "evicted": self._room.evicted,
            "lost": self.lost,
            "recovered": self.recovered,
            "read_only": self.read_only,
        }

    # -- inside -------------------------------------------------------------------------------------------------

    def _begin(self, found: Recovered, locked: bool) -> None:
        self.recovered, self.lost, self.read_only = found.how, found.lost, not locked
        if locked:
            self._shelf.resume(found)
        else:
            self.owner = self._disk.lock_owner(os.path.join(self.path, LOCK))

    def _ours(self, conversation: Conversation) -> bool:
        return conversation.whole and conversation.fingerprint == self.fingerprint

    def _owner(self, tip: bytes, salts: Collection[bytes]) -> bytes | None:
        if self._owners.get(tip) in salts:
            return self._owners[tip]
        try:
            return owner_of(self._shelf.packs, self._shelf.index.entries[tip], self.fingerprint, salts)
        except OSError:
            return None

    def _anchors(self, parent: bytes, i: int, tokens: Sequence[int], salt: bytes) -> Iterable[tuple[int, bytes]]:
        start = 256 * i
        for rows in sorted(self._shelf.index.tails.get(parent, ()), reverse=True):
            if start + rows <= len(tokens):
                key = anchor_key(parent, tokens[start : start + rows], self.fingerprint, salt)
                if self._shelf.has(key):
                    yield start + rows, key

    def _model(self) -> int:
        known = self._shelf.index.model_id(self.fingerprint)
        if known is not None:
            return known
        fresh = self._shelf.index.next_model
        self._shelf.say(log.Model(fresh, self.fingerprint, self._model_name))
        return fresh

    def _kept(self, parent: bytes) -> set[bytes]:
        return {parent, *self._pins, *self._shelf.pending}

    def _writable(self) -> None:
        if self.read_only:
            raise ReadOnly
        if not self._disk.exists(os.path.join(self.path, LOCK)):
            self._reestablish()

    def _reestablish(self) -> None:
        """The directory was removed under us: make it anew, with whatever of the index is still true."""
        logger.warning("%s was removed; starting it anew", self.path)
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlock(os.path.join(self.path, LOCK))
        if not _take(self._disk, self.path):
            self.read_only = True
            raise ReadOnly
        self._shelf.reopen()

    def _commit_what_is_whole(self) -> None:
        try:
            self.commit()
        except OSError as error:
            logger.debug("the commit after a failed write failed too: %s", error)

    def _say(self, op: log.Op) -> None:
        if self.read_only:
            self._shelf.index.apply(op)
        else:
            self._shelf.say(op)

    def _skip(self, key: bytes, version: str) -> None:
        self._versions[version] += 1
        if self._versions[version] == 1:
            logger.warning("stored rows are skipped and will be replaced: %s", version)
        self._say(log.Drop((key,)))

    def _check(self, entry: Entry) -> str:
        try:
            self.load(entry)
        except OtherVersion:
            return "skipped"
        except OSError:
            return "unread"
        except ValueError as error:
            self.failed(entry.key, error)
            return "bad"
        return "good"


def _take(disk: Disk, path: str) -> bool:
    """Makes the directory, durably with its new parents, and locks it. False: another process has it."""
    made = [path]
    while not disk.exists(parent := os.path.dirname(os.path.abspath(made[-1]))):
        made.append(parent)
    disk.mkdir(path)
    for name in reversed(made):
        with contextlib.suppress(PermissionError):
            disk.sync_dir(os.path.dirname(os.path.abspath(name)))
    return disk.lock(os.path.join(path, LOCK))
