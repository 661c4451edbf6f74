"""Turns side by side, read as one bounded sequence: the only place where doors wait for the system.

Each turn has a pump that moves its pieces into one bounded channel. A reader that stops reading fills the channel,
the pumps stop, and the turns behind them pause: no round waits for a slow client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup
from onecopy.actors.service import Service
from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.turn import Finished, Piece, TurnSpec

from .errors import known
from .meter import Meter, Watch

PIECES = 256
"""Pieces that may wait for one client, over all choices of its request."""


@dataclass(frozen=True, slots=True)
class Failure:
    error: OnecopyError


Item = tuple[int, Piece | Failure]


class Turns:
    """The turns of one request. `start` spawns their pumps into a task group that the caller owns and cancels."""

    def __init__(self, service: Service, specs: Sequence[TurnSpec], meter: Meter) -> None:
        self._service, self._specs, self._meter = service, specs, meter
        self._channel = Channel()
        self._left = len(specs)
        self._failure: OnecopyError | None = None

    def start(self, group: TaskGroup) -> None:
        for index, spec in enumerate(self._specs):
            group.start_soon(_pump, self._service, index, spec, self._meter.watch(), self._channel)

    @property
    def done(self) -> bool:
        return self._left == 0

    async def next(self, patience: float | None = None) -> list[tuple[int, Piece]]:
        """Everything that is ready, waiting for at least one piece. Empty after `patience` seconds without any.

        Raises the error of the first turn that failed.
        """
        if self._failure is None:
            await self._channel.wait(patience)
        batch: list[tuple[int, Piece]] = []
        while self._failure is None and self._left and (item := self._channel.take()) is not None:
            self._sort(item, batch)
        if self._failure is not None and not batch:
            raise self._failure
        return batch

    def close(self) -> None:
        self._channel.close()

    def _sort(self, item: Item, batch: list[tuple[int, Piece]]) -> None:
        """What was delivered before a failure still goes out."""
        index, piece = item
        if isinstance(piece, Failure):
            self._failure = piece.error
        else:
            self._left -= isinstance(piece, Finished)
            batch.append((index, piece))


class Channel:
    """Items of several writers for one reader: a full channel makes writers wait. Who need not wait goes right on."""

    def __init__(self, size: int = PIECES) -> None:
        self._size = size
        self._items: deque[Item] = deque()
        self._closed = False
        self._news = anyio.Event()
        self._room = anyio.Event()

    async def put(self, item: Item) -> None:
        """Waits while the reader is behind by `size` items. After `close` items go nowhere."""
        while len(self._items) >= self._size and not self._closed:
            if self._room.is_set():  # else others wait for it already
                self._room = anyio.Event()
            await self._room.wait()
        if not self._closed:
            self._items.append(item)
            self._news.set()

    async def wait(self, patience: float | None = None) -> None:
        """Until there is an item, or for `patience` seconds."""
        if self._items:
            return
        self._news = anyio.Event()
        with anyio.move_on_after(patience):
            await self._news.wait()

    def take(self) -> Item | None:
        """The oldest item; None when there is none."""
        if not self._items:
            return None
        self._room.set()
        return self._items.popleft()

    def close(self) -> None:
        self._closed = True
        self._items.clear()
        self._room.set()


async def _pump(service: Service, index: int, spec: TurnSpec, watch: Watch, out: Channel) -> None:
    """Move one turn's pieces into the channel; its error travels as the last item."""
    with watch:
        try:
            await _pour(service, index, spec, watch, out)
        except Exception as error:
            failure = known(error)
            watch.failed(failure)
            await out.put((index, Failure(failure)))


async def _pour(service: Service, index: int, spec: TurnSpec, watch: Watch, out: Channel) -> None:
    ended = False
    async with service.turn(spec) as pieces:
        async for piece in pieces:
            watch.saw(piece)
            ended = isinstance(piece, Finished)
            await out.put((index, piece))
    if not ended:
        raise OnecopyError("The turn ended without a result.")


__all__ = ["PIECES", "Turns"]
