"""`/openapi.json`, made from the very types that read the requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from . import admin, sessions
from .anthropic.types import CountRequest, MessagesRequest
from .openai.response_types import ResponsesRequest
from .openai.types import ChatRequest, CompletionRequest

BODIES: Mapping[tuple[str, str], Any] = {
    ("POST", "/v1/chat/completions"): ChatRequest,
    ("POST", "/v1/completions"): CompletionRequest,
    ("POST", "/v1/responses"): ResponsesRequest,
    ("POST", "/v1/messages"): MessagesRequest,
    ("POST", "/v1/messages/count_tokens"): CountRequest,
    ("POST", "/tokenize"): admin.TokenizeRequest,
    ("POST", "/detokenize"): admin.DetokenizeRequest,
    ("POST", "/v1/sessions/{id}/pin"): sessions.PinRequest,
    ("POST", "/v1/sessions/{id}/fork"): sessions.ForkRequest,
}
OPTIONAL = frozenset({"/v1/sessions/{id}/pin", "/v1/sessions/{id}/fork"})
ERROR = {
    "description": "An error",
    "content": {"application/json": {"schema": {"type": "object"}}},
}


@cache
def document(routes: tuple[tuple[str, str, str], ...], version: str) -> dict[str, Any]:
    """The document for `routes`: method, path, summary."""
    schemas, components = msgspec.json.schema_components(
        list(BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    bodies = dict(zip(BODIES, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary in routes:
        paths.setdefault(plain(path), {})[method.lower()] = operation(path, summary, bodies.get((method, path)))
    return {
        "openapi": "3.1.0",
        "info": {"title": "onecopy", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": SCHEMES},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def operation(path: str, summary: str, body: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {"2XX": {"description": "Done"}, "4XX": ERROR, "5XX": ERROR},
    }
    if names := names_in(path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body is not None:
        found["requestBody"] = {
            "required": path not in OPTIONAL,
            "content": {"application/json": {"schema": body}},
        }
    return found


def plain(path: str) -> str:
    """A route's path without Starlette's converters."""
    return path.replace(":path}", "}")


def names_in(path: str) -> list[str]:
    return [part.split("}")[0] for part in plain(path).split("{")[1:]]
