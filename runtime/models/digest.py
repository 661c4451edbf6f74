"""The identity of a model's weights: other weights under the same name never reuse rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import blake3


def digest(files: Iterable[Path]) -> str:
    """Hex digest over the names and every byte of `files`, in name order. Cached while size and time stay the same."""
    total = blake3.blake3()
    for path in sorted(files, key=lambda p: p.name):
        total.update(path.name.encode() + b"\0" + _file(path))
    return total.hexdigest()


def _file(path: Path) -> bytes:
    stat = path.stat()
    return _hash(path.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache(maxsize=1024)
def _hash(path: Path, size: int, changed: int, inode: int) -> bytes:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    if size:
        hasher.update_mmap(path)
    return hasher.digest()
