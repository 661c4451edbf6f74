"""The ASGI application: routes, the layers before them, and a lifespan that opens the system when it was not given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
from onecopy.actors.service import Service
from onecopy.runtime.errors import BadRequest, MethodNotAllowed, NotFound, OnecopyError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from .anthropic import messages
from .doors import Doors, Options
from .drain import Drain
from .errors import respond, shape_of
from .gate import Gate
from .meter import Meter
from .openai import chat, models
from .openai.kept import Kept
from .safety import Keys

Handler = Callable[[Request], Awaitable[Response]]
Factory = Callable[[], AbstractAsyncContextManager[Service]]
Table = tuple[tuple[str, str, Handler], ...]

ROUTES: Table = (
    ("POST", "/v1/chat/completions", chat.create),
    ("POST", "/v1/messages", messages.create),
    ("POST", "/v1/messages/count_tokens", messages.count),
    ("GET", "/v1/models", models.index),
    ("GET", "/v1/models/{model:path}", models.show),
)


def create_app(service: Service | Factory, options: Options | None = None) -> Starlette:
    """The doors of `service`, or of what a factory opens for the life of the app."""
    options = options or Options()
    app = Starlette(
        routes=[Route(path, guarded(handler), methods=[method]) for method, path, handler in ROUTES],
        middleware=[
            Middleware(Drain),
            Middleware(Gate, options=options, keys=Keys.open(options.keys, options.key_file)),
        ],
        exception_handlers={HTTPException: _routing_error},
        lifespan=None if _given(service) else _opening(service, options),  # type: ignore[arg-type]
    )
    app.router.redirect_slashes = False
    if _given(service):
        app.state.doors = _doors(service, options)  # type: ignore[arg-type]
    return app


def guarded(handler: Handler) -> Handler:
    """A handler whose every error is an answer in the shape of its API."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            return respond(error, shape_of(request.url.path))

    return run


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method), as members of the tree."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    found: OnecopyError
    if error.status_code == 404:
        found = NotFound(f"There is no route {path}.")
    elif error.status_code == 405:
        found = MethodNotAllowed(f"{request.method} is not a method of {path}.")
    else:
        found = BadRequest(str(error.detail))
    response = respond(found, shape_of(path))
    response.headers.update(error.headers or {})
    return response


def _given(service: Service | Factory) -> bool:
    return hasattr(service, "card")


def _doors(service: Service, options: Options) -> Doors:
    return Doors(service, options, Meter(anyio.current_time), Kept(options.kept_responses))


def _opening(factory: Factory, options: Options) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with factory() as service:
            app.state.doors = _doors(service, options)
            yield

    return lifespan
