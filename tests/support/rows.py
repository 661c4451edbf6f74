"""Made-up rows for tests of the store: small, and a function of their tokens, so that a mix-up shows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from onecopy.runtime.seams import Disk
from onecopy.runtime.store import ROOT, Kind, Record, RowsOnDisk, anchor_key, block_keys, fingerprint

PRINT = fingerprint({"weights": "test"})
PATH = "/store"
DAY = 1_700_000_000.0


def rows_of(tokens: Sequence[int], width: int = 4) -> dict[str, np.ndarray]:
    """Keys and values of the last (partial) block of `tokens`, that depend on every token."""
    seed = int.from_bytes(blake3(np.asarray(tokens, "<u4").tobytes()).digest()[:8], "little")
    rng = np.random.default_rng(seed)
    shape = (2, (len(tokens) - 1) % 256 + 1 if tokens else 0, width)
    return {"0.keys": rng.random(shape, "f4"), "0.values": rng.random(shape, "f4")}


def records_of(
    tokens: Sequence[int], salt: bytes = b"", *, anchor: bool = False, print_: bytes = PRINT, width: int = 4
) -> list[Record]:
    """The whole blocks of `tokens`, and an anchor at its end if wanted."""
    keys = list(block_keys(tokens, print_, salt))
    parents = [ROOT, *keys]
    made = []
    for i, key in enumerate(keys):
        block = tokens[256 * i : 256 * i + 256]
        made.append(Record(Kind.BLOCK, key, parents[i], 256 * i, block, rows_of(tokens[: 256 * i + 256], width)))
    if anchor:
        start = 256 * len(keys)
        key = anchor_key(parents[-1], tokens[start:], print_, salt)
        made.append(Record(Kind.ANCHOR, key, parents[-1], start, tokens[start:], rows_of(tokens, width)))
    return made


def talk(seed: int, n: int) -> list[int]:
    """`n` token ids of conversation `seed`."""
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


def open_store(disk: Disk, path: str = PATH, wall: Callable[[], float] = lambda: DAY, **options: Any) -> RowsOnDisk:
    return RowsOnDisk.open(disk, path, **{"fingerprint": PRINT, "wall": wall, "floor": 0, **options})


def same(store: RowsOnDisk, record: Record) -> bool:
    """Whether the store reads exactly this record back."""
    got = store.read(record.key)
    return (
        got is not None
        and (got.kind, got.parent, got.start, list(got.tokens))
        == (record.kind, record.parent, record.start, list(record.tokens))
        and got.tensors.keys() == record.tensors.keys()
        and all(np.array_equal(got.tensors[name], record.tensors[name]) for name in got.tensors)
    )
