"""Import slots of a library that is already mapped: where a call to `symbol` from that library goes.

A shared library calls imported functions through pointers the dynamic linker fills in (JUMP_SLOT and GLOB_DAT
relocations, System V ABI, "Dynamic Linking"). Reading the mapped dynamic section finds those pointers; writing one
redirects every later call, in this process only. 64-bit little-endian ELF on glibc and musl.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

PT_DYNAMIC, PT_GNU_RELRO = 2, 0x6474E552
DT_NULL, DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 0, 2, 5, 6, 7, 8, 23
PROT_READ, PROT_WRITE = 1, 2
RELOCATIONS = {"x86_64": (6, 7), "aarch64": (1025, 1026)}
"""Per machine: the relocation types GLOB_DAT and JUMP_SLOT."""


class _Phdr(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("vaddr", ctypes.c_uint64),
        ("paddr", ctypes.c_uint64),
        ("filesz", ctypes.c_uint64),
        ("memsz", ctypes.c_uint64),
        ("align", ctypes.c_uint64),
    )


class _Info(ctypes.Structure):
    _fields_ = (
        ("addr", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("phdr", ctypes.POINTER(_Phdr)),
        ("phnum", ctypes.c_uint16),
    )


_VISIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Library:
    """One mapped library. base: load address. dynamic: address of its dynamic section. relro: read-only range."""

    name: str
    base: int
    dynamic: int
    relro: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Slot:
    """One import pointer: the call target of `symbol` in its library. sealed: lies in the read-only (RELRO) range."""

    symbol: str
    address: int
    sealed: bool

    def read(self) -> int:
        return ctypes.c_uint64.from_address(self.address).value

    def write(self, target: int) -> None:
        """Point the slot at `target`. OSError when the page cannot be made writable; the slot is then unchanged."""
        _protect(self.address, PROT_READ | PROT_WRITE)
        ctypes.c_uint64.from_address(self.address).value = target
        if self.sealed:
            _protect(self.address, PROT_READ)


def library(suffix: str) -> Library | None:
    """The mapped library whose file name ends with `suffix`, or None."""
    found: list[Library] = []

    def visit(info: ctypes._Pointer[_Info], size: int, data: int | None) -> int:
        entry = info.contents
        name = (entry.name or b"").decode(errors="replace")
        if name.endswith(suffix):
            found.append(_library(name, entry))
        return len(found)

    ctypes.CDLL(None).dl_iterate_phdr(_VISIT(visit), None)
    return found[0] if found else None


def slots(lib: Library, symbols: frozenset[str]) -> list[Slot]:
    """Every import slot `lib` has for one of `symbols`. KeyError on a machine whose relocations are not known."""
    kinds = RELOCATIONS[platform.machine()]
    tags = _dynamic(lib)
    found = []
    for offset, info in _relocations(tags):
        symbol = _symbol(tags, info >> 32)
        if info & 0xFFFFFFFF in kinds and symbol in symbols:
            address = lib.base + offset
            found.append(Slot(symbol, address, lib.relro[0] <= address < lib.relro[1]))
    return found


def _library(name: str, entry: _Info) -> Library:
    spans = {entry.phdr[i].type: entry.phdr[i] for i in range(entry.phnum)}
    base = int(entry.addr)
    relro = (0, 0)
    if PT_GNU_RELRO in spans:
        start = base + spans[PT_GNU_RELRO].vaddr
        relro = (start, start + spans[PT_GNU_RELRO].memsz)
    return Library(name, base, base + spans[PT_DYNAMIC].vaddr, relro)


def _dynamic(lib: Library) -> dict[int, int]:
    """Tag to value. glibc relocates the table's pointers in place, musl leaves them relative; here all are absolute."""
    tags: dict[int, int] = {}
    at = lib.dynamic
    while True:
        tag, value = struct.unpack("<QQ", ctypes.string_at(at, 16))
        if tag == DT_NULL:
            break
        tags.setdefault(tag, value)
        at += 16
    pointers = (DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL)
    return {t: v + lib.base if t in pointers and v < lib.base else v for t, v in tags.items()}


def _relocations(tags: dict[int, int]) -> Iterator[tuple[int, int]]:
    for table, size in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        raw = ctypes.string_at(tags[table], tags[size]) if table in tags else b""
        for offset, info, _addend in struct.iter_unpack("<QQq", raw):
            yield offset, info


def _symbol(tags: dict[int, int], index: int) -> str:
    (name,) = struct.unpack("<I", ctypes.string_at(tags[DT_SYMTAB] + 24 * index, 4))
    return ctypes.string_at(tags[DT_STRTAB] + name).decode(errors="replace")


def _protect(address: int, mode: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    page: int = libc.getpagesize()
    start = address - address % page
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), mode) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mprotect of the import table failed (errno {number})")
