"""Errors on the wire: one tree, two shapes, the same status whether a reply is streamed or not."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Any, Literal

from onecopy.runtime.errors import ContextLengthExceeded, OnecopyError
from starlette.responses import Response
from starlette.types import Scope

from .codec import json_response

Shape = Literal["openai", "anthropic"]
log = logging.getLogger("onecopy.api")

OPENAI_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def own_path(scope: Scope) -> str:
    """The path of a request within this app, wherever another application mounted it."""
    root, path = scope.get("root_path", ""), str(scope["path"])
    return path.removeprefix(root) or "/" if root else path


def shape_of(path: str) -> Shape:
    """The error shape that clients of `path` expect."""
    return "anthropic" if path.startswith("/v1/messages") else "openai"


def known(error: BaseException) -> OnecopyError:
    """`error` as a member of the tree. A bug becomes `internal_error`, logged by its frames and never by its text."""
    if isinstance(error, OnecopyError):
        return error
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return known(error.exceptions[0])
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("unexpected %s\n%s", type(error).__name__, frames)
    return OnecopyError("Something went wrong inside the server; the log says where.")


def body_of(error: OnecopyError, shape: Shape) -> dict[str, Any]:
    """The JSON object for an error, for a response body or an error event."""
    if shape == "anthropic":
        return {"type": "error", "error": {"type": _anthropic_type(error), "message": _anthropic_message(error)}}
    kind = OPENAI_TYPES.get(error.status, "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def headers_of(error: OnecopyError) -> dict[str, str]:
    """Headers that go with an error: Retry-After (whole seconds) where a retry helps."""
    headers: dict[str, str] = {}
    if error.retry:
        headers["retry-after"] = str(max(1, round(error.retry_after or 1.0)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def respond(error: BaseException, shape: Shape) -> Response:
    """The whole response for an error."""
    found = known(error)
    return json_response(body_of(found, shape), status=found.status, headers=headers_of(found))


def _anthropic_type(error: OnecopyError) -> str:
    return ANTHROPIC_TYPES.get(error.status, "api_error")


def _anthropic_message(error: OnecopyError) -> str:
    if isinstance(error, ContextLengthExceeded):
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return f"{error.param}: {error.message}" if error.param else error.message
