"""The ASGI application: routes, the layers before them, and a lifespan that opens the system when it was not given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import metadata

import anyio
from onecopy.actors.service import Service
from onecopy.runtime.errors import BadRequest, MethodNotAllowed, NotFound, OnecopyError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from . import admin, sessions
from .anthropic import messages
from .codec import json_response
from .doors import Doors, Options
from .drain import Drain
from .errors import own_path, respond, shape_of
from .gate import Gate
from .meter import Meter
from .openai import chat, completions, models, responses
from .openai.kept import Kept
from .openapi import document
from .safety import Keys

Handler = Callable[[Request], Awaitable[Response]]
Factory = Callable[[], AbstractAsyncContextManager[Service]]
Table = tuple[tuple[str, str, Handler, str], ...]

ROUTES: Table = (
    ("POST", "/v1/chat/completions", chat.create, "Continue a chat"),
    ("POST", "/v1/completions", completions.create, "Continue a text"),
    ("POST", "/v1/responses", responses.create, "Create a response"),
    ("GET", "/v1/responses/{id}", responses.retrieve, "Retrieve a response"),
    ("GET", "/v1/responses/{id}/input_items", responses.input_items, "List a response's input"),
    ("DELETE", "/v1/responses/{id}", responses.delete, "Delete a response"),
    ("POST", "/v1/messages", messages.create, "Create a message"),
    ("POST", "/v1/messages/count_tokens", messages.count, "Count a message's input tokens"),
    ("GET", "/v1/models", models.index, "List models"),
    ("GET", "/v1/models/{model:path}", models.show, "Describe a model"),
    ("POST", "/tokenize", admin.tokenize, "Text to tokens"),
    ("POST", "/detokenize", admin.detokenize, "Tokens to text"),
    ("GET", "/v1/sessions", sessions.index, "List conversations"),
    ("POST", "/v1/sessions/import", sessions.import_, "Import a conversation"),
    ("GET", "/v1/sessions/{id}", sessions.show, "Describe a conversation"),
    ("DELETE", "/v1/sessions/{id}", sessions.drop, "Drop a conversation"),
    ("POST", "/v1/sessions/{id}/pin", sessions.pin, "Keep a conversation in memory"),
    ("POST", "/v1/sessions/{id}/park", sessions.park, "Move a conversation to disk"),
    ("POST", "/v1/sessions/{id}/fork", sessions.fork, "Fork a conversation"),
    ("POST", "/v1/sessions/{id}/cancel", sessions.cancel, "Cancel a conversation's running turn"),
    ("GET", "/v1/sessions/{id}/export", sessions.export, "Export a conversation"),
    ("GET", "/health", admin.health, "Whether requests are served, and why not"),
    ("GET", "/metrics", admin.metrics, "Metrics as Prometheus text"),
    ("GET", "/", admin.dashboard, "Dashboard"),
)


def create_app(service: Service | Factory, options: Options | None = None) -> Starlette:
    """The doors of `service`, or of what a factory opens for the life of the app."""
    options = options or Options()
    keys = Keys.open(options.keys, options.key_file)
    table: Table = (*ROUTES, ("GET", "/openapi.json", openapi, "This document"))
    app = Starlette(
        routes=by_path(table),
        middleware=[Middleware(Drain), Middleware(Gate, options=options, keys=keys)],
        exception_handlers={HTTPException: _routing_error},
        lifespan=None if _given(service) else _opening(service, options, keys),  # type: ignore[arg-type]
    )
    app.router.redirect_slashes = False
    if _given(service):
        app.state.doors = _doors(service, options, keys)  # type: ignore[arg-type]
    return app


def by_path(table: Table) -> list[Route]:
    """One route per path, so that a wrong method is told all the right ones."""
    paths: dict[str, dict[str, Handler]] = {}
    for method, path, handler, _ in table:
        paths.setdefault(path, {})[method] = guarded(handler)
    return [Route(path, by_method(handlers), methods=list(handlers)) for path, handlers in paths.items()]


def by_method(handlers: Mapping[str, Handler]) -> Handler:
    async def run(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return run


async def openapi(request: Request) -> Response:
    routes = tuple((method, path, summary) for method, path, _, summary in ROUTES)
    return json_response(document(routes, metadata.version("onecopy")))


def guarded(handler: Handler) -> Handler:
    """A handler whose every error is an answer in the shape of its API."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            return respond(error, shape_of(own_path(request.scope)))

    return run


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method), as members of the tree."""
    assert isinstance(error, HTTPException)
    path = own_path(request.scope)
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


def _doors(service: Service, options: Options, keys: Keys) -> Doors:
    return Doors(service, options, keys, Meter(anyio.current_time), Kept(options.kept_responses))


def _opening(
    factory: Factory, options: Options, keys: Keys
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with factory() as service:
            app.state.doors = _doors(service, options, keys)
            yield

    return lifespan
