"""Room on the disk: a byte quota over everything in the directory, a floor of free bytes, and the sweep of dead bytes.

The quota evicts: oldest-used chains first, a chain from its tail. The floor never does: a disk that others filled is
no reason to throw away what is kept; writing just stops until there is space again.
"""

from __future__ import annotations

import errno
from collections.abc import Collection
from dataclasses import dataclass

from ..seams import Disk
from . import manifest as log
from .index import Entry
from .packs import START
from .record import BadRecord, OtherVersion
from .shelf import Shelf

MOST_PACK = 1 << 30
LEAST_PACK = 16 * 1024
IDLE_DEAD = 0.5
"""Share of a pack that must be dead before the idle sweep copies the rest out: a byte freed costs a byte copied."""
PRESSED_DEAD = 0.25
"""The same when room is needed now. Less would copy more than it frees; more could evict live chains needlessly."""
_SPARE_PACKS = 2
"""Packs' worth of quota left unused: one to copy into while sweeping, one for the manifest and its replacement."""


class StoreFull(OSError):
    """No room under the quota or above the free-disk floor. The message carries the numbers.

    lasting: the quota is the limit, so that trying again soon cannot help.
    """

    def __init__(self, message: str, *, lasting: bool) -> None:
        super().__init__(errno.ENOSPC, message)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Swept:
    """One step of the sweep: bytes of live records moved, bytes of files freed, and whether more is to be done."""

    moved: int
    freed: int
    more: bool


def pack_bytes(quota: int) -> int:
    """Size at which a pack is full: a sixteenth of the quota, so that one can be rewritten within it; at most 1 GiB."""
    return max(LEAST_PACK, min(MOST_PACK, quota // 16))


class Room:
    """Keeps a shelf within its limits. quota: bytes of all files. floor: bytes that stay free on the disk."""

    def __init__(self, disk: Disk, path: str, shelf: Shelf, quota: int, floor: int) -> None:
        self._disk = disk
        self._path = path
        self._shelf = shelf
        self.quota = quota
        self.floor = floor
        self.evicted = 0

    def make(self, n: int, pinned: Collection[bytes], used: int) -> None:
        """Makes room for `n` more bytes of something last used then, without touching `pinned` chains or what was used
        later. Raises StoreFull."""
        ceiling = self.quota - _SPARE_PACKS * self._shelf.pack_bytes
        while self._shelf.size + n > ceiling:
            if n > ceiling or not self._free(n, pinned, used):
                raise StoreFull(
                    f"{n} bytes do not fit the quota of {self.quota} bytes beside what must stay", lasting=True
                )
        if self._lacks(n):
            while self._remove_dead():
                pass
            if self._lacks(n):
                raise StoreFull(
                    f"fewer than {self.floor} bytes would stay free on the disk after writing {n}", lasting=False
                )

    def sweep_step(self, most: int, dead: float = IDLE_DEAD) -> Swept:
        """Frees dead bytes a little: removes one empty pack, or moves up to `most` bytes out of the emptiest one.

        dead: the share of a pack that must be dead. At least one record is moved, whatever its size.
        """
        before = self._shelf.size
        if self._remove_dead():
            return Swept(0, before - self._shelf.size, more=True)
        number = self._deadest(dead)
        if number is None or not self.dead(number):
            return Swept(0, 0, more=False)
        return Swept(self._move_out(number, most), 0, more=True)

    def dead(self, number: int) -> int:
        """Bytes of a pack that no live record takes."""
        return self._shelf.packs.sizes[number] - START - self._shelf.index.live[number]

    def retire_active(self) -> bool:
        """Closes the active pack when it has dead bytes, so that the next step can free them."""
        active = self._shelf.packs.active
        if active is None or not self.dead(active):
            return False
        self._shelf.packs.close()
        return True

    def _lacks(self, n: int) -> bool:
        return self._disk.free_bytes(self._path) - n < self.floor

    def _free(self, n: int, pinned: Collection[bytes], used: int) -> bool:
        """One step towards room. False: nothing more can go."""
        self._shelf.commit()
        if self._remove_dead() or self._shelf.compact():
            return True
        return (
            self._rewrite(PRESSED_DEAD)
            or self._evict(max(n, self._shelf.pack_bytes // 4), pinned, used)
            or self.retire_active()
            or self._rewrite(0.0)
        )

    def _rewrite(self, share: float) -> bool:
        """Moves everything out of the deadest pack, if it has dead bytes and at least that share of them."""
        number = self._deadest(share)
        if number is None or not self.dead(number):
            return False
        self._move_out(number, self._shelf.packs.sizes[number])
        return True

    def _remove_dead(self) -> bool:
        active = self._shelf.packs.active
        packed = self._shelf.index.packed
        number = next((n for n in self._shelf.packs.sizes if n != active and n not in packed), None)
        if number is not None:
            self._shelf.remove_pack(number)
        return number is not None

    def _deadest(self, share: float) -> int | None:
        """The closed pack with the largest dead share, if that is at least `share`."""
        sizes = self._shelf.packs.sizes
        shares = {n: self.dead(n) / sizes[n] for n in sizes if n != self._shelf.packs.active}
        best = max(shares, key=shares.__getitem__, default=None)
        return best if best is not None and shares[best] >= share else None

    def _move_out(self, number: int, most: int) -> int:
        moved = 0
        index = self._shelf.index
        for key in list(index.packed.get(number, ())):
            if moved >= most:
                break
            moved += self._move(index.entries[key])
        self._shelf.commit()
        return moved

    def _move(self, entry: Entry) -> int:
        try:
            return self._shelf.move(entry)
        except (BadRecord, FileNotFoundError):
            self._shelf.say(log.Quarantine((entry.key,)))
        except OtherVersion:
            self._shelf.say(log.Drop((entry.key,)))
        return 0

    def _evict(self, n: int, pinned: Collection[bytes], used: int) -> bool:
        keys, size = list[bytes](), 0
        for entry in self._shelf.index.coldest(pinned):
            if size >= n or entry.used > used:
                break
            keys.append(entry.key)
            size += entry.size
        if keys:
            self._shelf.say(log.Drop(tuple(keys)))
            self._shelf.commit()
            self.evicted += len(keys)
        return bool(keys)
