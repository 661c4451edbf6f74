"""One turn over its sessions: when the first round on rows from disk fails, the turn runs once more without them.

Any other round that fails is the client's to try again: what failed with computed rows may fail each time, and every
time costs all that run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import trio
from onecopy.runtime.errors import LaneCrashed
from onecopy.runtime.turn import Piece, Reasoning, Started, Text, ToolCall

from .outbox import Outbox
from .session import Session

Spawn = Callable[[Outbox], Awaitable[Session]]
"""Starts a session that writes to an outbox."""

Stop = Callable[[Session], Awaitable[None]]
"""Ends a session in order."""


class Attempts:
    """`begin`, read `pieces`, `end`. A second attempt shows in nothing but its receipt."""

    def __init__(self, spawn: Spawn, stop: Stop) -> None:
        self._spawn = spawn
        self._stop = stop
        self._again = False
        self._outbox = Outbox()
        self._session: Session | None = None

    async def begin(self) -> None:
        """Raises what starting a session raised."""
        self._outbox = Outbox()
        self._session = await self._spawn(self._outbox)

    async def end(self) -> None:
        """Cancels what runs; returns once the lease is on its way back."""
        session, self._session = self._session, None
        with trio.CancelScope(shield=True):
            if session is not None:
                await self._stop(session)
            self._outbox.close()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of the attempt that counts; raises its error."""
        started = sent = False
        while True:
            try:
                async with aclosing(self._outbox.pieces()) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, Started) and started:
                            continue
                        started = started or isinstance(piece, Started)
                        sent = sent or isinstance(piece, Text | Reasoning | ToolCall)
                        yield piece
                return
            except LaneCrashed:
                if sent or self._again or self._session is None or not self._session.doubtful:
                    raise
            self._again = True
            await self.end()
            await self.begin()
