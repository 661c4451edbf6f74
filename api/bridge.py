"""A running system for doors on another event loop: `Service`, each call of which goes to the trio thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from onecopy.actors.service import Health, ModelCard, SessionInfo
from onecopy.runtime.seams.clock import Clock
from onecopy.runtime.turn import Piece, TurnSpec

from .feed import Feed
from .portal import Portal
from .runtime import Runtime


class PortalService:
    """Implements `Service`. Made on the loop that uses it; ends with the runtime it was made from."""

    def __init__(self, runtime: Runtime, portal: Portal) -> None:
        self._runtime = runtime
        self._portal = portal
        self._service = runtime.service

    @property
    def card(self) -> ModelCard:
        return self._runtime.card

    @property
    def clock(self) -> Clock:
        return self._service.clock

    @asynccontextmanager
    async def turn(self, spec: TurnSpec) -> AsyncIterator[AsyncIterator[Piece]]:
        feed = await self._portal.acall(self._started, spec)
        try:
            yield self._pieces(feed)
        finally:
            with anyio.CancelScope(shield=True):
                await self._portal.acall(feed.close)

    async def _started(self, spec: TurnSpec) -> Feed[Piece]:
        return self._runtime.start(spec)

    async def _pieces(self, feed: Feed[Piece]) -> AsyncIterator[Piece]:
        while batch := await self._portal.acall(feed.next):
            for piece in batch:
                yield piece

    async def sessions(self) -> Sequence[SessionInfo]:
        return await self._portal.acall(self._service.sessions)

    async def session(self, id: str) -> SessionInfo:
        return await self._portal.acall(self._service.session, id)

    async def pin(self, id: str, on: bool = True) -> SessionInfo:
        return await self._portal.acall(self._service.pin, id, on)

    async def park(self, id: str) -> SessionInfo:
        return await self._portal.acall(self._service.park, id)

    async def fork(self, id: str, at: int | None = None) -> SessionInfo:
        return await self._portal.acall(self._service.fork, id, at)

    async def export(self, id: str) -> bytes:
        return await self._portal.acall(self._service.export, id)

    async def import_(self, data: bytes, salt: bytes = b"") -> SessionInfo:
        return await self._portal.acall(self._service.import_, data, salt)

    async def drop(self, id: str) -> None:
        await self._portal.acall(self._service.drop, id)

    async def cancel(self, id: str) -> bool:
        return await self._portal.acall(self._service.cancel, id)

    async def health(self) -> Health:
        return await self._portal.acall(self._service.health)

    async def metrics(self) -> Mapping[str, Any]:
        return await self._portal.acall(self._service.metrics)

    def seed64(self) -> int:
        return self._service.seed64()

    def new_id(self, prefix: str) -> str:
        return self._service.new_id(prefix)


__all__ = ["PortalService"]
