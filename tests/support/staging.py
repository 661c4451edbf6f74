"""A rows store and a stager on a simulated disk, and segments to save from and restore into."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio
from onecopy.actors.messages.stager import Save, SaveReport
from onecopy.actors.messages.store import Lookup
from onecopy.actors.rows_store import RowsStore
from onecopy.actors.stager import Stager
from onecopy.runtime.core import Child, Supervisor
from onecopy.runtime.errors import NotFound
from onecopy.runtime.seams import VirtualClock
from onecopy.runtime.store import Found, Tensors

from tests.sim.disk import SimDisk
from tests.support.rows import open_store, rows_of

ROW = 64
"""Bytes of one row of `Segments`: keys and values, two heads of four f32."""


@dataclass(frozen=True)
class RowLayout:
    """Prices what `Segments` holds. state: bytes of recurrent state."""

    state: int = 0

    @property
    def block_bytes(self) -> int:
        return 256 * ROW

    def anchor_bytes(self, at: int) -> int:
        return self.state + at % 256 * ROW


class Unpriced:
    block_bytes = None

    def anchor_bytes(self, at: int) -> None:
        return None


@dataclass
class Segments:
    """Rows by segment; reads and writes are noted. gone: segments whose rows are not there any more."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)
    written: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    anchor: tuple[int, dict[str, np.ndarray]] | None = None
    gone: set[int] = field(default_factory=set)

    async def read_block(self, segment: int, block: int) -> Tensors:
        await trio.lowlevel.checkpoint()
        if segment in self.gone:
            raise NotFound(f"segment {segment} is gone")
        self.reads.append(block)
        return rows_of(self.tokens[segment][: 256 * block + 256])

    async def read_anchor(self, segment: int, at: int) -> Tensors:
        await trio.lowlevel.checkpoint()
        self.reads.append(at)
        return rows_of(self.tokens[segment][:at])

    async def place(self, segment: int, block: int) -> None:
        return None

    async def write_block(self, segment: int, block: int, tensors: Tensors) -> None:
        await trio.lowlevel.checkpoint()
        self.written[block] = {name: array.copy() for name, array in tensors.items()}

    async def write_anchor(self, segment: int, at: int, tensors: Tensors) -> None:
        await trio.lowlevel.checkpoint()
        self.anchor = (at, {name: array.copy() for name, array in tensors.items()})

    def holds(self, tokens: list[int]) -> int:
        """How many leading blocks were written as these tokens' rows; a wrong one is an error."""
        for block, rows in self.written.items():
            wanted = rows_of(tokens[: 256 * block + 256])
            assert all(np.array_equal(rows[name], wanted[name]) for name in wanted)
        return len(self.written)


class Bench:
    """What a test drives. disk, segments: to look at. store, stager: refs."""

    def __init__(self, disk: SimDisk, supervisor: Supervisor) -> None:
        self.disk = disk
        self.segments = Segments()
        self.supervisor = supervisor
        self.store = supervisor.ref("rows store")
        self.stager = supervisor.ref("stager")

    async def save(self, tokens: list[int], owner: str = "c1", **options: Any) -> SaveReport:
        segment = len(self.segments.tokens)
        self.segments.tokens[segment] = tokens
        return await self.stager.ask(Save(owner, tuple(tokens), segment, self.segments, **options))

    async def found(self, tokens: list[int]) -> Found:
        return await self.store.ask(Lookup(tuple(tokens)))


@asynccontextmanager
async def bench(
    disk: SimDisk,
    *,
    permit: int = 1 << 30,
    layout: Any = None,
    pause: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    strict: bool = True,
    **options: Any,
) -> AsyncIterator[Bench]:
    """Runs both actors under a supervisor."""
    clock = VirtualClock()

    def store() -> RowsStore:
        return RowsStore(lambda: open_store(disk, **options), disk, clock, strict=strict)

    def stager() -> Stager:
        return Stager(supervisor.ref("rows store"), layout or RowLayout(), permit, clock, pause)

    supervisor = Supervisor([Child("rows store", store), Child("stager", stager)])
    async with supervisor:
        yield Bench(disk, supervisor)
