"""One request's turns written to its client: a whole body, or events as the pieces come.

Starlette's own streaming response leaves idle connections open on trio servers; this one watches for a client that
leaves in a nursery of its own and has left that nursery before the final message is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.turn import Piece
from starlette.types import Receive, Scope, Send

from . import sse
from .errors import Shape, known, respond
from .reply import Reply
from .turns import Turns

KEEPALIVE = 10.0
"""Seconds without an event after which a stream carries a sign of life."""
GRACE = 0.25
"""Seconds a stream waits for its first piece before its headers leave: a refusal in that time keeps its status."""
STALL = 300.0
"""Seconds one write may take before the turns behind it are given up."""


class Wire(Protocol):
    """How one door spells its replies. A stream feeds `replies` through `piece`; a whole body reads them once full."""

    shape: Shape

    @property
    def replies(self) -> Sequence[Reply]: ...

    def piece(self, index: int, piece: Piece) -> bytes:
        """Take a piece of choice `index` in; answer the events it causes, maybe none."""

    def idle(self) -> bytes:
        """A sign of life."""

    def close(self) -> bytes:
        """The events after the last piece."""

    def failure(self, error: OnecopyError) -> bytes:
        """The event for an error after the stream began."""

    def body(self) -> bytes:
        """The whole reply as JSON."""


@dataclass(slots=True)
class Client:
    """The sending side of one exchange. `last` is what is sent after the nursery is left."""

    send: Send
    began: bool = False
    gone: bool = False
    writing_since: float | None = None
    last: bytes = b""

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.began = True
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, body: bytes) -> None:
        if body and not self.gone:
            await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self) -> None:
        if not self.gone:
            await self._put({"type": "http.response.body", "body": self.last, "more_body": False})

    async def _put(self, message: dict[str, object]) -> None:
        self.writing_since = anyio.current_time()
        try:
            await self.send(message)
        except OSError:
            self.gone = True
        finally:
            self.writing_since = None


@dataclass(slots=True)
class Exchange:
    """An ASGI response that runs turns. Nothing runs before it is called; nothing it started outlives the call."""

    turns: Turns
    wire: Wire
    stream: bool
    keepalive: float = KEEPALIVE
    headers: Mapping[str, str] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(send)
        error: OnecopyError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, receive, client, group.cancel_scope)
            group.start_soon(_guard, client, group.cancel_scope)
            self.turns.start(group)
            error = await self._converse(client)
            group.cancel_scope.cancel()
        self.turns.close()
        if client.gone:
            return
        if error is not None and not client.began:
            await respond(error, self.wire.shape)(scope, receive, send)
        elif client.began:
            await client.finish()

    async def _converse(self, client: Client) -> OnecopyError | None:
        """Write the reply up to its last message. An error is answered, or becomes the stream's last event."""
        try:
            await (self._streamed(client) if self.stream else self._whole(client))
        except Exception as problem:
            error = known(problem)
            client.last = self.wire.failure(error)
            return error
        return None

    async def _streamed(self, client: Client) -> None:
        batch = await self.turns.next(GRACE)
        first = self._spelled(batch)
        await client.begin(200, {**sse.HEADERS, **self.headers, **_facts(self.wire.replies)})
        await client.write(first or self.wire.idle())
        while not self.turns.done:
            batch = await self.turns.next(self.keepalive)
            await client.write(self._spelled(batch) if batch else self.wire.idle())
        client.last = self.wire.close()

    async def _whole(self, client: Client) -> None:
        while not self.turns.done:
            for index, piece in await self.turns.next():
                self.wire.replies[index].add(piece)
        body = self.wire.body()
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await client.begin(200, {**length, **self.headers, **_facts(self.wire.replies)})
        client.last = body

    def _spelled(self, batch: Sequence[tuple[int, Piece]]) -> bytes:
        return b"".join(self.wire.piece(index, piece) for index, piece in batch)


async def _watch(receive: Receive, client: Client, scope: anyio.CancelScope) -> None:
    """End the exchange when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    client.gone = True
    scope.cancel()


async def _guard(client: Client, scope: anyio.CancelScope) -> None:
    """Give the turns up when one write never ends: a server may shield its write from being cancelled."""
    while True:
        await anyio.sleep(STALL / 4)
        since = client.writing_since
        if since is not None and anyio.current_time() - since >= STALL:
            client.gone = True
            scope.cancel()


def _facts(replies: Sequence[Reply]) -> dict[str, str]:
    """What is known about the reply when the headers leave, as headers."""
    reply = replies[0]
    found: dict[str, str] = {}
    if reply.started:
        found = {"x-onecopy-session": reply.started.session, "x-onecopy-cached": str(reply.started.cached)}
    if reply.finished:
        receipt = reply.finished.receipt
        found |= {
            "x-onecopy-how": receipt.how,
            "x-onecopy-price-bytes": str(receipt.price_bytes),
            "x-onecopy-diverged-at": str(receipt.diverged_at),
            "x-onecopy-bytes-copied": str(receipt.bytes_copied),
            "x-onecopy-bytes-written": str(receipt.bytes_written),
            "x-onecopy-token-sha": reply.finished.token_sha,
        }
    return found


__all__ = ["GRACE", "KEEPALIVE", "STALL", "Client", "Exchange", "Wire"]
