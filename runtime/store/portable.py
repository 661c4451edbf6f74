"""One conversation as one safetensors file, to move it between machines. Any tool can open it.

Metadata: format, version, fingerprint, model. Tensors: `tokens`; `000000.NAME` for each tensor of block 0, and so on;
`anchor.NAME` for the state at the end. Keys are not in the file: they are computed from its tokens when it comes in,
so a file cannot pass rows off as another conversation's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import BadRequest, NotFound
from ..rows.layout import BLOCK
from ..seams import Disk, append_all
from .content import TOKENS, Record, Stored
from .index import Entry
from .keys import KEY_BYTES, ROOT, anchor_key, block_key, block_keys
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
    chain = _whole_chain(store, tip)
    half = sum(entry.length for entry in chain)
    exported, infos = _survey(store, chain, lambda n: progress(n, 2 * half))
    _write(disk, path, _pieces(store, chain, exported, infos, lambda n: progress(half + n, 2 * half)))
    return exported


def export_image(store: RowsOnDisk, tip: bytes) -> bytes:
    """The same as bytes in memory. Raises NotFound."""
    chain = _whole_chain(store, tip)
    exported, infos = _survey(store, chain, lambda n: None)
    return b"".join(_pieces(store, chain, exported, infos, lambda n: None))


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
        return import_image(store, file, salt, progress)
    finally:
        file.close()


def import_image(
    store: RowsOnDisk, image: Image, salt: bytes, progress: Progress = lambda done, total: None
) -> tuple[Exported, int]:
    """As `import_conversation`, from what is open already."""
    reader = _Reader(image)
    if reader.about.fingerprint != store.fingerprint:
        raise BadRequest("The file's rows were computed by another model than the store was opened for.")
    new, total = 0, reader.about.blocks + reader.about.anchor
    for done, record in enumerate(reader.records(salt), 1):
        new += len(store.put([record]))
        progress(done, total)
    return reader.about, new


def tip_of(about: Exported, salt: bytes) -> bytes:
    """Key of an imported conversation's last record."""
    *_, above = [ROOT, *block_keys(about.tokens, about.fingerprint, salt)]
    tail = about.tokens[about.blocks * BLOCK :]
    return anchor_key(above, tail, about.fingerprint, salt) if about.anchor else above


class Image(Protocol):
    """What an import reads from: a `File`, or `Memory`."""

    def pread(self, offset: int, n: int) -> bytes: ...
    def size(self) -> int: ...


class Memory:
    """An `Image` in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def pread(self, offset: int, n: int) -> bytes:
        return bytes(self._data[offset : offset + n])

    def size(self) -> int:
        return len(self._data)


def _whole_chain(store: RowsOnDisk, tip: bytes) -> list[Entry]:
    chain = store.chain(tip)
    if not chain or chain[0].start:
        raise NotFound("This conversation is not on disk from its beginning, so it cannot be exported.")
    return chain


def _survey(store: RowsOnDisk, chain: Sequence[Entry], read: Callable[[int], None]) -> tuple[Exported, dict[str, Info]]:
    """Reads a chain once, for the header that comes before its data. read(bytes read)."""
    infos, tokens, about, done = dict[str, Info](), list[int](), None, 0
    for entry in chain:
        stored = _read(store, entry)
        about = about or (stored.fingerprint, stored.metadata.get("model", ""))
        tokens += stored.tokens
        infos |= {f"{_prefix(entry)}.{name}": info_of(array) for name, array in stored.tensors.items()}
        read(done := done + entry.length)
    assert about is not None
    return Exported(*about, tuple(tokens), chain[-1].kind is Kind.ANCHOR), infos


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

    def __init__(self, file: Image) -> None:
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
