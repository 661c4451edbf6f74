"""A bounded stream of pieces from a session to whoever reads its reply."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator

import trio
from onecopy.runtime.turn import Piece

SIZE = 64
"""Pieces held for a reader: a second or two of a fast reply. A slower reader makes the session wait, not the lane."""


class Outbox:
    """One writer, one reader. The reader gets every piece put before `close`, then the error if there was one."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._pieces: deque[Piece] = deque()
        self._closed = False
        self._error: Exception | None = None
        self._news = trio.Event()
        self._room = trio.Event()

    async def put(self, pieces: list[Piece]) -> None:
        """Waits while the reader is behind by more than `size` pieces."""
        while len(self._pieces) >= self._size and not self._closed:
            self._room = trio.Event()
            await self._room.wait()
        self._pieces += pieces
        self._news.set()

    def close(self, error: Exception | None = None) -> None:
        """Nothing follows. The first close counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._news.set()
            self._room.set()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                if len(self._pieces) < self._size:
                    self._room.set()
                yield piece
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            self._news = trio.Event()
            await self._news.wait()
