"""One conversation as one safetensors file, to move it between machines. Any tool can open it.

Metadata: format, version, fingerprint, model. Tensors: `tokens`; `000000.NAME` for each tensor of block 0, and so on;
`anchor.NAME` for the state at the end. Keys are not in the file: they are computed from its tokens when it comes in,
so a file cannot pass rows off as another conversation's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import BadRequest, NotFound
from ..rows.layout import BLOCK
from ..seams import Disk, File, append_all
from .content import TOKENS, Record, Stored
from .index import Entry
from .keys import KEY_BYTES, ROOT, anchor_key, block_key
from .record import Kind
from .rows_on_disk import RowsOnDisk
from .safetensors import (
    Array,
    BadImage,
    Head,
    Info,
    Tensors,
    array_bytes,
    array_of,
    decode_head,
    encode_head,
    head_bytes,
    info_of,
)

FORMAT = "onecopy.conversation"
VERSION = "1"
_ANCHOR = "anchor"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """A conversation file's description. tokens: ids. blocks: whole ones. anchor: it has a state at its end."""

    fingerprint: bytes
    model: str
    tokens: tuple[int, ...]
    anchor: bool

    @property
    def blocks(self) -> int:
        return len(self.tokens) // BLOCK


def export_conversation(
    store: RowsOnDisk, tip: bytes, disk: Disk, path: str, progress: Progress = lambda done, total: None
) -> Exported:
    """Writes the conversation that ends at `tip` to `path`, one record in memory at a time.

    progress(bytes done, bytes in all). Raises NotFound when a record is missing or damaged, and OSError.
    """
    chain = store.chain(tip)
    if not chain or chain[0].start:
        raise NotFound("This conversation is not on disk from its beginning, so it cannot be exported.")
    total, done = 2 * sum(entry.length for entry in chain), 0
    infos, tokens, about = dict[str, Info](), list[int](), None
    for entry in chain:
        stored = _read(store, entry)
        about = about or (stored.fingerprint, stored.metadata.get("model", ""))
        tokens += stored.tokens
        infos |= {f"{_prefix(entry)}.{name}": info_of(array) for name, array in stored.tensors.items()}
        progress(done := done + entry.length, total)
    assert about is not None
    exported = Exported(*about, tuple(tokens), chain[-1].kind is Kind.ANCHOR)
    _write(disk, path, _pieces(store, chain, exported, infos, lambda n: progress(done + n, total)))
    return exported


def read_exported(disk: Disk, path: str) -> Exported:
    """What a conversation file holds. Raises BadRequest when it is none, and OSError."""
    file = disk.open_read(path)
    try:
        return _Reader(file).about
    finally:
        file.close()


def import_conversation(
    store: RowsOnDisk, disk: Disk, path: str, salt: bytes, progress: Progress = lambda done, total: None
) -> tuple[Exported, int]:
    """Puts a conversation file's records into `store`, under keys computed from its tokens and `salt`.

    store: opened with the file's fingerprint. progress(records done, records in all).
    Returns what the file holds and how many records were new. Raises BadRequest for a bad file, and OSError.
    """
    file = disk.open_read(path)
    try:
        reader = _Reader(file)
        if reader.about.fingerprint != store.fingerprint:
            raise BadRequest("The file's rows were computed by another model than the store was opened for.")
        new, total = 0, reader.about.blocks + reader.about.anchor
        for done, record in enumerate(reader.records(salt), 1):
            new += len(store.put([record]))
            progress(done, total)
        return reader.about, new
    finally:
        file.close()


def _prefix(entry: Entry) -> str:
    return _ANCHOR if entry.kind is Kind.ANCHOR else _block_prefix(entry.start // BLOCK)


def _block_prefix(block: int) -> str:
    return f"{block:06d}"


def _read(store: RowsOnDisk, entry: Entry) -> Stored:
    stored = store.read(entry.key)
    if stored is None:
        raise NotFound(f"The rows at position {entry.start} are damaged, so the conversation cannot be exported.")
    return stored


def _pieces(
    store: RowsOnDisk, chain: Sequence[Entry], about: Exported, infos: dict[str, Info], wrote: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    tokens = np.asarray(about.tokens, "<u4")
    metadata = {"format": FORMAT, "version": VERSION, "fingerprint": about.fingerprint.hex(), "model": about.model}
    yield encode_head({TOKENS: info_of(tokens), **infos}, metadata)
    yield array_bytes(tokens)
    written = 0
    for entry in chain:
        yield from (array_bytes(array) for array in _read(store, entry).tensors.values())
        wrote(written := written + entry.length)


def _write(disk: Disk, path: str, pieces: Iterator[bytes | memoryview]) -> None:
    """Writes a whole new file, or none."""
    part = f"{path}.part"
    if disk.exists(part):
        disk.unlink(part)
    file = disk.open_append(part)
    try:
        for piece in pieces:
            append_all(file, piece)
        file.sync()
    except BaseException:
        disk.unlink(part)
        raise
    finally:
        file.close()
    disk.rename(part, path)
    disk.sync_dir(os.path.dirname(os.path.abspath(path)))


class _Reader:
    """A conversation file, checked before it is used."""

    def __init__(self, file: File) -> None:
        self._file = file
        try:
            total = file.size()
            size = head_bytes(file.pread(0, 8), total)
            self._head: Head = decode_head(memoryview(file.pread(0, size)), total)
            self._groups = _by_prefix(self._head.infos)
            self.about = self._describe()
        except BadImage as error:
            raise BadRequest(f"This is not a conversation file: {error}.") from None

    def records(self, salt: bytes) -> Iterator[Record]:
        about, parent = self.about, ROOT
        for block in range(about.blocks):
            start = block * BLOCK
            tokens = about.tokens[start : start + BLOCK]
            key = block_key(parent, tokens, about.fingerprint, salt)
            yield Record(Kind.BLOCK, key, parent, start, tokens, self._tensors(_block_prefix(block)))
            parent = key
        if about.anchor:
            start = about.blocks * BLOCK
            tail = about.tokens[start:]
            key = anchor_key(parent, tail, about.fingerprint, salt)
            yield Record(Kind.ANCHOR, key, parent, start, tail, self._tensors(_ANCHOR))

    def _describe(self) -> Exported:
        metadata, infos = self._head.metadata, self._head.infos
        if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
            raise BadImage(f"its format is {metadata.get('format')!r}, version {metadata.get('version')!r}")
        print_ = _fingerprint(metadata.get("fingerprint", ""))
        info = infos.get(TOKENS)
        if info is None or info.dtype != "U32" or len(info.shape) != 1:
            raise BadImage("it has no token ids")
        tokens = tuple(self._array(info).tolist())
        anchor = _ANCHOR in self._groups
        wanted = {_block_prefix(i) for i in range(len(tokens) // BLOCK)}
        if self._groups.keys() - {_ANCHOR} != wanted or (not anchor and len(tokens) % BLOCK):
            raise BadImage("its blocks are not those of its tokens")
        return Exported(print_, metadata.get("model", ""), tokens, anchor)

    def _tensors(self, prefix: str) -> Tensors:
        return {name: self._array(info) for name, info in self._groups[prefix].items()}

    def _array(self, info: Info) -> Array:
        start, end = info.data_offsets
        try:
            return array_of(info, memoryview(self._file.pread(self._head.size + start, end - start)))
        except BadImage as error:
            raise BadRequest(f"The conversation file is damaged: {error}.") from None


def _by_prefix(infos: Mapping[str, Info]) -> dict[str, dict[str, Info]]:
    groups = dict[str, dict[str, Info]]()
    for name, info in infos.items():
        if name != TOKENS:
            prefix, _, rest = name.partition(".")
            groups.setdefault(prefix, {})[rest] = info
    return groups


def _fingerprint(text: str) -> bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != KEY_BYTES:
        raise BadImage("it has no fingerprint")
    return raw
