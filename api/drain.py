"""Keeps connections usable after an early answer: an unread body is read and thrown away, or the connection ends."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DRAIN = 64 << 20
"""Bytes of an unread body that are thrown away before the connection is closed instead."""
PATIENCE = 5.0
"""Seconds that may take."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Outermost ASGI layer."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        inbound = Inbound(receive)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not await inbound.drained():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self.app(scope, inbound, answer)


@dataclass(slots=True)
class Inbound:
    """A request's incoming side. whole: its body has been read to the end. gone: the client has left."""

    receive: Receive
    whole: bool = False
    gone: bool = False

    async def __call__(self) -> Message:
        if self.gone:
            return {"type": "http.disconnect"}
        message = await self.receive()
        self.gone = message["type"] == "http.disconnect"
        self.whole = self.whole or not message.get("more_body", False)
        return message

    async def drained(self) -> bool:
        """Read the rest of the body away. False when it is too long or too slow, and the connection must end."""
        left = DRAIN
        with anyio.move_on_after(PATIENCE):
            while not self.whole and left > 0:
                left -= len((await self()).get("body", b""))
        return self.whole
