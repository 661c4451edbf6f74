"""What `send` gives back: one turn, as pieces while they come or as a whole answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator

from onecopy.actors.service import Service
from onecopy.runtime.errors import Conflict, OnecopyError
from onecopy.runtime.turn import Finished, Piece, TurnSpec

from .answer import Answer
from .errors import known
from .feed import Feed, Put, Stream
from .reply import Reply

Open = Callable[["Sent"], Awaitable[Feed[Piece]]]


class Sent(Stream[Piece]):
    """One turn. `async for piece in sent` reads it as it comes, `await sent` reads all of it; nothing runs before.

    Leaving the loop early, an error or a cancellation ends the turn within one round; its conversation is then as it
    was before, and rows already computed serve the next try. `async with` makes that end wait for the lane.
    """

    def __init__(self, open: Open, done: Callable[[Sent], None]) -> None:
        super().__init__()
        self._opening = open
        self._done = done
        self._reply = Reply()

    async def answer(self) -> Answer:
        """The whole answer: the rest is read, and what was read before counts. `await sent` is the same."""
        while await self.next():
            pass
        return self.whole

    def __await__(self) -> Generator[object, None, Answer]:
        return self.answer().__await__()

    @property
    def whole(self) -> Answer:
        """The answer of a turn that was read to its end; Conflict before."""
        if self._reply.finished is None:
            raise Conflict("This turn was not read to its end, so it has no answer.")
        return Answer.of(self._reply)

    @property
    def finished(self) -> bool:
        """Whether the turn was read to its end."""
        return self._reply.finished is not None

    async def _open(self) -> Feed[Piece]:
        return await self._opening(self)

    def _take(self, batch: list[Piece]) -> None:
        for piece in batch:
            self._reply.add(piece)

    def _closed(self) -> None:
        self._done(self)


def turn(service: Service, spec: TurnSpec) -> Callable[[Put[Piece]], Awaitable[None]]:
    """One turn as work for a feed. Its errors are members of the one tree; a bug keeps its cause."""

    async def work(put: Put[Piece]) -> None:
        try:
            await _pour(service, spec, put)
        except OnecopyError:
            raise
        except Exception as bug:
            raise known(bug) from bug

    return work


async def _pour(service: Service, spec: TurnSpec, put: Put[Piece]) -> None:
    ended = False
    async with service.turn(spec) as pieces:
        async for piece in pieces:
            ended = isinstance(piece, Finished)
            await put(piece)
    if not ended:
        raise OnecopyError("The turn ended without a result.")


__all__ = ["Sent", "turn"]
