"""Routes about the server itself: health, metrics, tokens as text and back, the dashboard."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec
from onecopy.actors.service import Health
from onecopy.runtime.errors import BadRequest, OnecopyError
from starlette.requests import Request
from starlette.responses import Response

from .codec import decode, json_response
from .doors import Call, doors_of
from .gate import may_see
from .openai.fields import tools_of
from .openai.messages import messages_of
from .openai.types import FunctionTool, Message
from .order import Talk, check_model, encode_text, plain_side, render
from .prometheus import exposition

SERVING = ("ok", "degraded")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text, or messages as a chat would render them."""

    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: list[Message] | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


async def health(request: Request) -> Response:
    """200 while requests are served, 503 otherwise. Details go to callers that could see a session."""
    doors = doors_of(request)
    try:
        found = await doors.service.health()
    except OnecopyError as error:
        found = Health("failed", (error.message,))
    body: dict[str, Any] = {"status": found.status, "reasons": found.reasons}
    if may_see(request, doors.keys):
        card = doors.service.card
        body |= {"model": card.id, "exact": card.exactness, "context": card.context, "details": found.details}
    return json_response(body, status=200 if found.status in SERVING else 503)


async def metrics(request: Request) -> Response:
    doors = doors_of(request)
    text = exposition(doors.meter, await doors.service.metrics(), doors.service.card.id)
    return Response(text, media_type="text/plain; version=0.0.4")


async def tokenize(request: Request) -> Response:
    call = await Call.of(request)
    wanted = decode(call.body, TokenizeRequest)
    card = call.service.card
    check_model(card, wanted.model, call.options.aliases)
    tokens = await _tokens(wanted, call)
    found: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": card.context}
    if wanted.return_token_strs:
        tokenizer = plain_side(card)
        found["token_strs"] = [tokenizer.token_bytes(t).decode("utf-8", "replace") for t in tokens]
    return json_response(found)


async def detokenize(request: Request) -> Response:
    call = await Call.of(request)
    wanted = decode(call.body, DetokenizeRequest)
    card = call.service.card
    check_model(card, wanted.model, call.options.aliases)
    if any(not 0 <= token < card.vocab_size for token in wanted.tokens):
        raise BadRequest(f"Tokens must be ids below {card.vocab_size}.", param="tokens")
    return json_response({"prompt": plain_side(card).decode(wanted.tokens)})


async def dashboard(request: Request) -> Response:
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    headers = {"content-security-policy": policy, "x-frame-options": "DENY"}
    return Response(_page(), media_type="text/html", headers=headers)


async def _tokens(wanted: TokenizeRequest, call: Call) -> tuple[int, ...]:
    if wanted.messages is not None:
        talk = Talk(messages_of(wanted.messages), tools_of(wanted.tools), wanted.chat_template_kwargs or {})
        return (await render(call.service.card, talk, len(call.body))).tokens
    text = wanted.prompt if wanted.prompt is not None else wanted.text
    if text is None:
        raise BadRequest("prompt or messages is needed.", param="prompt")
    return await encode_text(call.service.card, text)


@cache
def _page() -> str:
    return resources.files("onecopy.api").joinpath("dashboard.html").read_text("utf-8")
