"""JSON in and out: bounded decoding into msgspec types with a path for each fault, and encoded responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from onecopy.runtime.errors import BadRequest
from starlette.responses import Response

T = TypeVar("T")

DEPTH = 64
"""How deep a free-form JSON value (a schema, tool arguments, template arguments) may nest."""

encode = msgspec.json.Encoder().encode
_PATH = re.compile(r" - at `([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response that carries `body` as JSON; bytes are taken as already encoded."""
    content = body if isinstance(body, bytes) else encode(body)
    return Response(content, status, dict(headers or {}), media_type="application/json")


def decode(data: bytes, kind: type[T]) -> T:
    """`data` as a `kind`. Raises `BadRequest` whose `param` is the path of the first fault."""
    try:
        found: T = _decoder(kind).decode(data)  # type: ignore[arg-type]
        return found
    except msgspec.ValidationError as error:
        raise fault(error) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise BadRequest("The body nests too deeply.") from None


def convert(value: Any, kind: type[T], param: str) -> T:
    """A decoded value as a `kind`, for fields whose type is found by looking at another."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise fault(error, param) from None


def shallow(value: Any, param: str) -> Any:
    """`value` itself, when it nests at most `DEPTH` deep."""
    layer, depth = [value], 0
    while layer := [x for x in layer if isinstance(x, (dict, list))]:
        depth += 1
        if depth > DEPTH:
            raise BadRequest(f"{param} nests more than {DEPTH} deep.", param=param)
        layer = [x for y in layer for x in (y.values() if isinstance(y, dict) else y)]
    return value


def fault(error: msgspec.ValidationError, under: str = "") -> BadRequest:
    """A validation error as `BadRequest`: the path becomes `param`, without the leading `$`."""
    text = str(error)
    found = _PATH.search(text)
    path = found[1].removeprefix("$").removeprefix(".") if found else ""
    if missing := _MISSING.search(text):
        path = f"{path}.{missing[1]}" if path else missing[1]
    if under:
        path = f"{under}.{path}" if path and not path.startswith("[") else under + path
    return BadRequest(f"{_PATH.sub('', text)}{f' at {path}' if path else ''}.", param=path or None)


@cache
def _decoder(kind: Any) -> Any:
    return msgspec.json.Decoder(kind)
