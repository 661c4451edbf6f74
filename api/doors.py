"""What handlers share: the running doors of one app, and one call at them with its body, its key and its clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from onecopy.actors.service import Service
from onecopy.runtime.errors import BadRequest, DeadlineExceeded, TooLarge
from onecopy.runtime.turn import TurnSpec
from starlette.requests import Request
from starlette.responses import Response

from .exchange import KEEPALIVE, Exchange, Wire
from .meter import Meter
from .turns import Turns

if TYPE_CHECKING:
    from .openai.kept import Kept
    from .safety import Keys, Principal

BODY_PATIENCE = 30.0
"""Seconds a client may take between two parts of a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the doors behave. Sizes in bytes, times in seconds.

    aliases: more names the model answers to ("*" is any). keys: API keys, "label:key" or "key". key_file: more of
    them, read again when it changes. hosts: Host names accepted by a loopback server beside its own. origins: web
    origins that may call ("*" is any). loopback: the server listens on this machine only.
    """

    aliases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    key_file: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    loopback: bool = True
    body_limit: int = 32 << 20
    keepalive: float = KEEPALIVE
    kept_responses: int = 256


@dataclass(slots=True)
class Doors:
    """One app's state: the service behind it and what the doors themselves count and keep."""

    service: Service
    options: Options
    keys: Keys
    meter: Meter
    kept: Kept


@dataclass(frozen=True, slots=True)
class Call:
    """One request with its body read."""

    request: Request
    doors: Doors
    body: bytes

    @classmethod
    async def of(cls, request: Request) -> Call:
        doors = doors_of(request)
        require_json(request)
        return cls(request, doors, await read_body(request, doors.options.body_limit))

    @property
    def service(self) -> Service:
        return self.doors.service

    @property
    def options(self) -> Options:
        return self.doors.options

    @property
    def salt(self) -> bytes:
        return principal_of(self.request).salt

    @property
    def hint(self) -> str | None:
        return self.request.headers.get("x-session-id")

    def now(self) -> int:
        """Unix seconds."""
        return int(self.service.clock.wall())

    def exchange(self, specs: Sequence[TurnSpec], wire: Wire, *, stream: bool) -> Response:
        turns = Turns(self.service, specs, self.doors.meter)
        return Exchange(turns, wire, stream, self.options.keepalive)  # type: ignore[return-value]


def doors_of(request: Request) -> Doors:
    found: Doors = request.app.state.doors
    return found


def principal_of(request: Request) -> Principal:
    found: Principal = request.scope["onecopy.principal"]
    return found


def require_json(request: Request) -> None:
    """A body that says it is something else is refused. No Content-Type is taken as JSON."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise BadRequest("The Content-Type must be application/json.", param="Content-Type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadRequest("The body must not be compressed.", param="Content-Encoding")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most `limit` bytes."""
    size = request.headers.get("content-length", "0")
    if size.isdigit() and int(size[:19]) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    held = 0
    try:
        with anyio.fail_after(BODY_PATIENCE) as scope:
            async with aclosing(request.stream()) as stream:
                async for part in stream:
                    scope.deadline = anyio.current_time() + BODY_PATIENCE
                    held += len(part)
                    if held > limit:
                        raise too_large(limit)
                    parts.append(part)
    except TimeoutError:
        raise DeadlineExceeded("The body did not arrive in time.") from None
    return b"".join(parts)


def too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than the limit of {limit} bytes.")


__all__ = [
    "Call",
    "Doors",
    "Options",
    "doors_of",
    "principal_of",
    "read_body",
    "require_json",
]
