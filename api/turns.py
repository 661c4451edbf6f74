"""Turns side by side, read as one bounded sequence: the only place where doors wait for the system.

Each turn has a pump that moves its pieces into one bounded channel. A reader that stops reading fills the channel,
the pumps stop, and the turns behind them pause: no round waits for a slow client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
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
        self._items: MemoryObjectReceiveStream[Item] | None = None
        self._left = len(specs)
        self._failure: OnecopyError | None = None

    def start(self, group: TaskGroup) -> None:
        send, self._items = anyio.create_memory_object_stream[Item](PIECES)
        for index, spec in enumerate(self._specs):
            group.start_soon(_pump, self._service, index, spec, self._meter.watch(), send.clone())
        send.close()

    @property
    def done(self) -> bool:
        return self._left == 0

    async def next(self, patience: float | None = None) -> list[tuple[int, Piece]]:
        """Everything that is ready, waiting for at least one piece. Empty after `patience` seconds without any.

        Raises the error of the first turn that failed.
        """
        if self._failure:
            raise self._failure
        assert self._items is not None, "start comes first"
        with anyio.move_on_after(patience):
            return self._take(await self._items.receive(), self._items)
        return []

    def close(self) -> None:
        if self._items:
            self._items.close()

    def _take(self, item: Item, items: MemoryObjectReceiveStream[Item]) -> list[tuple[int, Piece]]:
        """`item` and what waits behind it, up to a failure: what was delivered before it still goes out."""
        batch: list[tuple[int, Piece]] = []
        while self._checked(item, batch) and self._left and items.statistics().current_buffer_used:
            item = items.receive_nowait()
        return batch

    def _checked(self, item: Item, batch: list[tuple[int, Piece]]) -> bool:
        index, piece = item
        if isinstance(piece, Failure):
            self._failure = piece.error
            if not batch:
                raise piece.error
            return False
        self._left -= isinstance(piece, Finished)
        batch.append((index, piece))
        return True


async def _pump(service: Service, index: int, spec: TurnSpec, watch: Watch, out: MemoryObjectSendStream[Item]) -> None:
    """Move one turn's pieces into the channel; its error travels as the last item."""
    with watch, out:
        try:
            await _pour(service, index, spec, watch, out)
        except Exception as error:
            failure = known(error)
            watch.failed(failure)
            await out.send((index, Failure(failure)))


async def _pour(service: Service, index: int, spec: TurnSpec, watch: Watch, out: MemoryObjectSendStream[Item]) -> None:
    ended = False
    async with service.turn(spec) as pieces:
        async for piece in pieces:
            watch.saw(piece)
            ended = isinstance(piece, Finished)
            await out.send((index, piece))
    if not ended:
        raise OnecopyError("The turn ended without a result.")


__all__ = ["PIECES", "Turns"]
