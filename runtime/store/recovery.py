"""From a directory to an index: read the manifest to its last whole frame, or rebuild it from the packs.

What the manifest names but the packs do not hold is dropped here, so no index entry is without its data's room.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from ..seams import Disk, read_all
from . import manifest as log
from .index import Index
from .journal import NAME
from .packs import Packs
from .record import BadRecord, Header, OtherVersion
from .safetensors import BadImage, decode

logger = logging.getLogger("onecopy.store")

How = Literal["new", "read", "cut", "rebuilt"]


@dataclass(slots=True)
class Recovered:
    """An index, and how it was come by.

    how: new (empty directory), read (whole manifest), cut (manifest truncated at its first bad frame), rebuilt.
    log: the manifest as read, None when it was not. lost: entries dropped because their pack does not hold them.
    skipped: records of other versions met while rebuilding.
    """

    index: Index
    how: How
    log: log.Log | None = None
    lost: int = 0
    skipped: int = 0
    versions: set[str] = field(default_factory=set)


def recover(disk: Disk, path: str, packs: Packs) -> Recovered:
    """Reads the directory; changes nothing. `packs` must have looked. Raises OSError."""
    found = _read(disk, path, packs)
    found.index.next_pack = max(found.index.next_pack, packs.highest + 1)
    found.index.packs &= packs.sizes.keys()
    found.lost += drop_lost(found.index, packs)
    return found


def _read(disk: Disk, path: str, packs: Packs) -> Recovered:
    try:
        read = log.decode_log(read_all(disk, os.path.join(path, NAME)))
    except FileNotFoundError:
        return _rebuilt(Index(), packs, ()) if packs.sizes else Recovered(Index(), "new")
    except (BadRecord, OtherVersion) as error:
        logger.warning("the manifest cannot be used (%s); rebuilding it from the packs", error)
        return _rebuilt(Index(), packs, ())
    index, gone = Index(), set[bytes]()
    for op in read.ops:
        index.apply(op)
        if isinstance(op, log.Drop | log.Quarantine):
            gone.update(op.keys)
    if read.damaged:
        logger.warning("the manifest is damaged after %d entries; reading the packs for the rest", len(read.ops))
        return _rebuilt(index, packs, gone)
    whole = disk.stat(os.path.join(path, NAME)).size == read.good
    return Recovered(index, "read" if whole else "cut", read)


def _rebuilt(index: Index, packs: Packs, gone: Collection[bytes]) -> Recovered:
    """Adds to `index` every intact record that it does not name, except keys known to be gone."""
    found = Recovered(index, "rebuilt")
    found.lost = drop_lost(index, packs)
    for number in sorted(packs.sizes):
        index.packs.add(number)
        for offset, record in packs.scan(number):
            if isinstance(record, OtherVersion):
                found.skipped += 1
                found.versions.add(str(record))
            elif record.key not in index.entries and record.key not in gone:
                index.apply(_add(index, packs, number, offset, record))
    for version in sorted(found.versions):
        logger.warning("records skipped while rebuilding: %s", version)
    return found


def _add(index: Index, packs: Packs, number: int, offset: int, record: Header) -> log.Add:
    model = index.model_id(record.fingerprint)
    if model is None:
        model = index.next_model
        index.apply(log.Model(model, record.fingerprint, _model_name(packs, number, offset, record)))
    where = (number, offset, record.total)
    return log.Add(record.key, record.parent, record.kind, *where, record.start, record.rows, record.created, model)


def _model_name(packs: Packs, number: int, offset: int, record: Header) -> str:
    try:
        return decode(packs.load(number, offset, record.total)[1]).metadata.get("model", "")
    except BadImage:
        return ""


def drop_lost(index: Index, packs: Packs) -> int:
    """Drops entries whose bytes the packs do not have; returns how many. Mutates `index`."""
    lost = [e.key for e in index.entries.values() if e.offset + e.length > packs.sizes.get(e.pack, 0)]
    if lost:
        logger.warning("%d records named by the manifest are missing from the packs and were dropped", len(lost))
        index.apply(log.Drop(tuple(lost)))
    return len(lost)
