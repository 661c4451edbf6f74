"""Large memory pages: rows and weights are read from end to end, and a page fault or TLB miss every 4 KiB costs time.

glibc decides at the start of a process whether its large allocations ask for transparent huge pages, from the
environment variable GLIBC_TUNABLES. It asks for those of its main heap alone, not for those that it gives to further
threads, and rows are made on such a thread: so all threads are to share the main heap. Source: the glibc manual,
"Memory Allocation Tunables".
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
HUGE = "glibc.malloc.hugetlb"
ARENAS = "glibc.malloc.arena_max"
OLDEST = (2, 35)
"""The first glibc that knows how to ask."""
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")

Exec = Callable[[str, list[str], dict[str, str]], object]


def wanted(environ: Mapping[str, str], libc: tuple[str, str], switch: str) -> dict[str, str] | None:
    """The environment with large pages asked for; None where that is done, decided otherwise, or of no use.

    libc: as `platform.libc_ver` answers. switch: what the kernel's switch says; only `madvise` waits to be asked.
    """
    name, version = libc
    known = name == "glibc" and _numbers(version) >= OLDEST
    set_before = environ.get(TUNABLES, "")
    if not known or "[madvise]" not in switch or HUGE in set_before:
        return None
    shared = "" if ARENAS in set_before else f"{ARENAS}=1"
    return {**environ, TUNABLES: ":".join(part for part in (set_before, f"{HUGE}=1", shared) if part)}


def ask_for_large_pages(start: Exec = os.execve) -> None:
    """Starts this program again, in the same process, with large pages asked for. Returns where it need not."""
    if sys.platform != "linux":
        return
    try:
        environ = wanted(os.environ, platform.libc_ver(), SWITCH.read_text(encoding="ascii"))
    except OSError:
        return
    if environ is not None and sys.executable:
        start(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
