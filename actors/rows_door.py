"""The stager's way to rows: finds the segment of a chain that has a block, and reads or fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import trio
from onecopy.runtime.errors import NotPersisting, OnecopyError, Unavailable
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ledger import Ledger
from onecopy.runtime.rows.segments import Segment
from onecopy.runtime.rows.transfer import (
    Slots,
    Tensors,
    believed,
    fill,
    place_of,
    read_rows,
    read_state,
    row_ratios,
    row_slots,
    split_state,
    write_rows,
    write_state,
)
from onecopy.runtime.seams.device import Device
from onecopy.runtime.seams.disk import Disk
from onecopy.runtime.store import Place

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def saving(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """On the device thread: what fails here costs this save one attempt, and nobody a reply."""
    return _or(NotPersisting, "read the rows", fn, *args)


def restoring(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """On the device thread: what fails here ends this restore, and the rows not written yet are computed."""
    return _or(Unavailable, "write the rows", fn, *args)


def _or(kind: type[OnecopyError], deed: str, fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Only the error of this call: that of an earlier `Device.post` is raised outside of it, to whom it concerns."""
    try:
        return fn(*args)
    except Exception as error:
        raise kind(f"The device could not {deed}: {type(error).__name__}: {error}") from error


class RowsDoor:
    """A `RowsReader`. Reads show the buffers themselves: the rows must be under a hold until the answer is used."""

    def __init__(self, ledger: Ledger, pool: Pool, device: Device, disk: Disk) -> None:
        self._ledger = ledger
        self._pool = pool
        self._device = device
        self._disk = disk

    async def read_block(self, segment: int, block: int) -> Tensors:
        return await self._read(segment, block * BLOCK, (block + 1) * BLOCK)

    async def read_anchor(self, segment: int, at: int) -> Tensors:
        start = at // BLOCK * BLOCK
        return await self._read(segment, start, at) if at > start else {}

    def with_state(self, anchor: int) -> StateDoor:
        return StateDoor(self, self._pool, self._device, anchor)

    def filling(self) -> Filling:
        return Filling(self, self._pool, self._device, self._disk)

    def segment(self, leaf: int, position: int) -> Segment:
        """The segment of a chain that holds the row at `position`. Unavailable when the chain is gone."""
        if leaf not in self._ledger.segments:
            raise Unavailable("The rows are gone.")
        return next(s for s in self._ledger.segments[leaf].ancestors() if s.start <= position)

    async def _read(self, leaf: int, start: int, stop: int) -> Tensors:
        found = self.segment(leaf, start)
        return await self._device.run(saving, read_rows, self._pool, found.id, start, stop)


class StateDoor:
    """A `RowsReader` for one save of a recurrent model: `anchor` is the state at its end."""

    def __init__(self, door: RowsDoor, pool: Pool, device: Device, anchor: int) -> None:
        self._door = door
        self._pool = pool
        self._device = device
        self.anchor = anchor

    async def read_block(self, segment: int, block: int) -> Tensors:
        return await self._door.read_block(segment, block)

    async def read_anchor(self, segment: int, at: int) -> Tensors:
        rows = await self._door.read_anchor(segment, at)
        return {**rows, **await self._device.run(saving, read_state, self._pool, self.anchor)}


class Filling:
    """A `RowsWriter` for one restore: asks the device for a segment's buffers once, then fills them from a thread."""

    def __init__(self, door: RowsDoor, pool: Pool, device: Device, disk: Disk) -> None:
        self._door = door
        self._pool = pool
        self._device = device
        self._disk = disk
        self._slots: dict[int, Slots | None] = {}
        self._asking = trio.Lock()
        self._ratios = row_ratios(pool.layout)

    async def place(self, segment: int, block: int) -> Place | None:
        slots = await self._slots_at(segment, block * BLOCK)
        found = self._door.segment(segment, block * BLOCK)
        return None if slots is None or found.frontier > block * BLOCK else place_of(slots, block)

    async def write_block(self, segment: int, block: int, tensors: Tensors) -> None:
        """Rows before the frontier are there already, bit for bit; only those past it are written."""
        slots = await self._slots_at(segment, block * BLOCK)
        found = self._door.segment(segment, block * BLOCK)  # looked up again: a bank may have ended while it took
        start = max(block * BLOCK, found.frontier)
        try:
            rows = believed(tensors, self._ratios, block * BLOCK, start)
            if slots is None:
                await self._device.run(restoring, write_rows, self._pool, found.id, start, rows)
            else:
                await self._disk.in_thread(fill, slots, start - found.start, rows)
        except ValueError as error:
            raise Unavailable(f"The stored rows do not fit: {error}.") from None

    async def write_anchor(self, segment: int, at: int, tensors: Tensors) -> None:
        rows, state = split_state(tensors)
        if at % BLOCK:
            await self.write_block(segment, at // BLOCK, rows)
        if state:
            found = self._door.segment(segment, at - 1)
            await self._device.run(restoring, write_state, self._pool, found.id, state)

    async def _slots_at(self, segment: int, position: int) -> Slots | None:
        found = self._door.segment(segment, position)
        if found.id not in self._slots:
            async with self._asking:  # two runs are under way, and the device is asked once
                if found.id not in self._slots:
                    self._slots[found.id] = await self._device.run(restoring, row_slots, self._pool, found.id)
        return self._slots[found.id]
