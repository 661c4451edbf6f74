"""The machine, as a seam: how much memory it has and how much this process uses."""

from __future__ import annotations

from typing import Protocol

import psutil


class Machine(Protocol):
    """total: bytes of memory of the machine. footprint: bytes this process uses now, whoever allocated them."""

    def total(self) -> int: ...
    def footprint(self) -> int: ...


class RealMachine:
    """Asks the operating system."""

    def total(self) -> int:
        return int(psutil.virtual_memory().total)

    def footprint(self) -> int:
        return int(psutil.Process().memory_info().rss)
