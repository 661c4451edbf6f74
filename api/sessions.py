"""Routes about conversations: list, inspect, pin, park, fork, export, import, drop, cancel. A key sees its own only."""

from __future__ import annotations

from typing import Any

import msgspec
from onecopy.actors.service import SessionInfo
from onecopy.runtime.errors import BadRequest, NotFound
from starlette.requests import Request
from starlette.responses import Response

from .codec import decode, json_response
from .doors import Call, doors_of, principal_of, read_body

IMAGE = "application/vnd.safetensors"
IMAGE_LIMIT = 8 << 30


class PinRequest(msgspec.Struct):
    """`POST /v1/sessions/{id}/pin`."""

    pinned: bool = True


class ForkRequest(msgspec.Struct):
    """`POST /v1/sessions/{id}/fork`: `at` rows of the parent are shared, all by default."""

    at: int | None = None


async def index(request: Request) -> Response:
    salt = principal_of(request).salt
    found = [describe(s) for s in await doors_of(request).service.sessions() if s.salt == salt]
    return json_response({"object": "list", "data": found})


async def show(request: Request) -> Response:
    return json_response(describe(await own(request)))


async def pin(request: Request) -> Response:
    wanted = await _body(request, PinRequest)
    info = await own(request)
    return json_response(describe(await doors_of(request).service.pin(info.id, wanted.pinned)))


async def park(request: Request) -> Response:
    info = await own(request)
    return json_response(describe(await doors_of(request).service.park(info.id)))


async def fork(request: Request) -> Response:
    wanted = await _body(request, ForkRequest)
    info = await own(request)
    if wanted.at is not None and not 0 <= wanted.at <= info.tokens:
        raise BadRequest(f"at must be from 0 to {info.tokens}.", param="at")
    return json_response(describe(await doors_of(request).service.fork(info.id, wanted.at)), status=201)


async def cancel(request: Request) -> Response:
    info = await own(request)
    return json_response({"id": info.id, "cancelled": await doors_of(request).service.cancel(info.id)})


async def drop(request: Request) -> Response:
    info = await own(request)
    await doors_of(request).service.drop(info.id)
    return json_response({"id": info.id, "object": "session", "deleted": True})


async def export(request: Request) -> Response:
    info = await own(request)
    data = await doors_of(request).service.export(info.id)
    headers = {"content-disposition": f'attachment; filename="{info.id}.safetensors"'}
    return Response(data, media_type=IMAGE, headers=headers)


async def import_(request: Request) -> Response:
    data = await read_body(request, IMAGE_LIMIT)
    if not data:
        raise BadRequest("The body must be an exported session.")
    info = await doors_of(request).service.import_(data, principal_of(request).salt)
    return json_response(describe(info), status=201)


async def own(request: Request) -> SessionInfo:
    """The session in the path, if it belongs to the caller. Another key's session is as absent as none."""
    id = request.path_params["id"]
    info = await doors_of(request).service.session(id)
    if info.salt != principal_of(request).salt:
        raise NotFound(f"There is no session {id!r}.", param="id")
    return info


def describe(info: SessionInfo) -> dict[str, Any]:
    """A session as clients see it: everything but the salt."""
    found: dict[str, Any] = msgspec.to_builtins(info)
    del found["salt"]
    return {"object": "session", **found}


async def _body(request: Request, kind: Any) -> Any:
    """A small JSON body; none at all is all defaults."""
    call = await Call.of(request)
    return decode(call.body, kind) if call.body else kind()
