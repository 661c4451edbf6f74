"""`GET /v1/models` and `/v1/models/{id}`: the one model that is served."""

from __future__ import annotations

from typing import Any

from onecopy.actors.service import ModelCard
from starlette.requests import Request
from starlette.responses import Response

from ..codec import json_response
from ..doors import doors_of
from ..order import check_model


async def index(request: Request) -> Response:
    return json_response({"object": "list", "data": [describe(doors_of(request).service.card)]})


async def show(request: Request) -> Response:
    doors = doors_of(request)
    check_model(doors.service.card, request.path_params["model"], doors.options.aliases)
    return json_response(describe(doors.service.card))


def describe(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "onecopy",
        "max_model_len": card.context,
        "vocab_size": card.vocab_size,
        "exact": card.exactness,
        "features": card.features,
    }
