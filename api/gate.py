"""Who may come in: Host and Origin of a server on this machine, preflight, API keys. Runs before any route.

A page from anywhere can make a browser send requests to a server on the same machine, and a name that resolves to
127.0.0.1 makes such a page same-origin; so a loopback server checks the Host it is called by, and where no key
guards a server, the Origin of pages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import anyio
from onecopy.runtime.errors import Forbidden
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .doors import Options
from .errors import own_path, respond, shape_of
from .safety import ANYONE, Keys, Principal, presented

OPEN = frozenset({"/", "/health", "/openapi.json", "/favicon.ico"})
"""Paths that need no key: they tell nothing about anyone's conversations."""
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
METHODS = "GET, POST, DELETE, OPTIONS, HEAD"
HEADERS = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta, x-session-id"
log = logging.getLogger("onecopy.access")


@dataclass(frozen=True, slots=True)
class Gate:
    """ASGI layer in front of the routes. Sets `onecopy.principal` in the scope of a request it lets in."""

    app: ASGIApp
    options: Options
    keys: Keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        logged = Logged(scope, _with_cors(send, self.cors(headers)))
        try:
            if answer := self.admit(scope, headers):
                await answer(scope, receive, logged.send)
            else:
                await self.app(scope, receive, logged.send)
        except Exception as error:
            if logged.status:
                raise
            await respond(error, shape_of(own_path(scope)))(scope, receive, logged.send)
        finally:
            logged.close()

    def admit(self, scope: Scope, headers: Headers) -> Response | None:
        """Let a request in, or answer it here. Raises `Forbidden` or `Unauthorized`."""
        self._check_host(headers)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return Response(status_code=204)
        self._check_origin(headers)
        scope["onecopy.principal"] = self._principal(own_path(scope), headers)
        return None

    def cors(self, headers: Headers) -> dict[str, str]:
        """Response headers for the browser; none for an origin that may not read."""
        origin = headers.get("origin")
        if not origin or not self.allows(origin):
            return {"vary": "Origin"} if origin else {}
        return {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": headers.get("access-control-request-headers", HEADERS),
            "access-control-expose-headers": "x-onecopy-session, x-onecopy-cached, x-onecopy-how, retry-after",
            "access-control-max-age": "600",
            "vary": "Origin",
        }

    def allows(self, origin: str) -> bool:
        """Configured origins, and on a loopback server pages served from this machine."""
        if "*" in self.options.origins or origin in self.options.origins:
            return True
        return self.options.loopback and origin.startswith(("http://", "https://")) and _name(origin) in LOCAL

    def _principal(self, path: str, headers: Headers) -> Principal:
        if path in OPEN and not presented(headers):
            return ANYONE
        return self.keys.principal(presented(headers))

    def _check_host(self, headers: Headers) -> None:
        if not self.options.loopback:
            return
        name = _name("//" + headers.get("host", ""))
        if name not in LOCAL and name not in self.options.hosts and "*" not in self.options.hosts:
            raise Forbidden("This server answers to its own names only; add others with --allow-host.", param="Host")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        guarded = self.keys.wanted and not self.options.loopback
        if origin is None or guarded or self.allows(origin) or _same(origin, headers.get("host", "")):
            return
        raise Forbidden("This web origin may not call; add it with --cors-origin.", param="Origin")


@dataclass(slots=True)
class Logged:
    """One access line per request: method, path, status, seconds, key label. Never a query, a header or a body."""

    scope: Scope
    sender: Send
    status: int = 0
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = anyio.current_time()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.sender(message)

    def close(self) -> None:
        who = self.scope.get("onecopy.principal", ANYONE).label or "-"
        seconds = anyio.current_time() - self.began
        path = self.scope["path"].encode("unicode_escape").decode()[:200]
        log.info("%s %s %d %.3fs %s", self.scope["method"], path, self.status, seconds, who)


def _with_cors(send: Send, cors: dict[str, str]) -> Send:
    if not cors:
        return send

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = list(message.get("headers", ()))
            MutableHeaders(scope=message).update(cors)
        await send(message)

    return sender


def _name(url: str) -> str:
    """The host name in a URL, without port and brackets; "" when there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _same(origin: str, host: str) -> bool:
    """Whether a page comes from the very host it calls."""
    return urlsplit(origin).netloc.lower() == host.lower() if _name(origin) else False


def may_see(request: Request, keys: Keys) -> bool:
    """Whether the caller of an open path has shown a key, where keys are wanted."""
    return not keys.wanted or request.scope["onecopy.principal"] is not ANYONE


def loopback(hosts: Sequence[str]) -> bool:
    """Whether every address a server binds is this machine's own."""
    return all(host in LOCAL or host.startswith("127.") for host in hosts)
