"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from onecopy.actors.service import Service
from onecopy.runtime.errors import BadRequest, Unsupported
from starlette.requests import Request
from starlette.responses import Response

from ..codec import decode, shallow
from ..doors import Call
from ..order import Order, Talk, check_model, render, specs
from .fields import choice_of, grammar_of, order, positive, tools_of, top_logprobs
from .messages import messages_of
from .types import ChatRequest
from .wire import ChatWire, Head


async def create(request: Request) -> Response:
    call = await Call.of(request)
    wanted = decode(call.body, ChatRequest)
    card = call.service.card
    check_model(card, wanted.model, call.options.aliases)
    made = order_of(wanted, call)
    prompt = await render(card, talk_of(wanted, made), len(call.body))
    head = Head(
        id=call.service.new_id("chatcmpl-"),
        created=call.now(),
        model=card.id,
        usage=bool(wanted.stream_options and wanted.stream_options.include_usage),
        logprobs=bool(wanted.logprobs),
        token_ids=bool(wanted.return_token_ids),
        prompt=prompt.tokens,
    )
    return call.exchange(specs(call.service, made, prompt), ChatWire(head, made.n), stream=bool(wanted.stream))


class Caller(Protocol):
    """Who asks: a call at the doors, or a conversation of the programmatic API."""

    @property
    def service(self) -> Service: ...
    @property
    def salt(self) -> bytes: ...
    @property
    def hint(self) -> str | None: ...


def order_of(wanted: ChatRequest, call: Caller) -> Order:
    base = order(wanted, call.service.card, logprobs=_logprobs(wanted), salt=call.salt, hint=call.hint)
    tools = tools_of(wanted.tools)
    newer = positive(wanted.max_completion_tokens, "max_completion_tokens")
    return replace(
        base,
        max_new=newer or base.max_new,
        tools=tools,
        tool_choice=choice_of(wanted.tool_choice, tools),
        parallel=wanted.parallel_tool_calls is not False,
        grammar=grammar_of(wanted, wanted.response_format),
    )


def talk_of(wanted: ChatRequest, made: Order) -> Talk:
    """The conversation as the template gets it. A continued message becomes the reply's beginning."""
    if not wanted.messages:
        raise BadRequest("messages must not be empty.", param="messages")
    if wanted.add_generation_prompt is False and not wanted.continue_final_message:
        raise Unsupported("add_generation_prompt false is not offered here.", param="add_generation_prompt")
    messages = messages_of(wanted.messages)
    prefill = None
    if wanted.continue_final_message:
        prefill = _continued(messages)
        messages = messages[:-1]
    return Talk(messages, made.tools, template_kwargs(wanted), prefill)


def template_kwargs(wanted: ChatRequest) -> dict[str, Any]:
    """Arguments for the template: the client's own win over those derived from reasoning_effort and verbosity."""
    kwargs = effort_kwargs(wanted.reasoning_effort)
    if wanted.verbosity is not None:
        kwargs["verbosity"] = wanted.verbosity
    return {**kwargs, **shallow(wanted.chat_template_kwargs or {}, "chat_template_kwargs")}


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """reasoning_effort for the template; "none" also turns thinking off where the template can."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _continued(messages: Sequence[dict[str, Any]]) -> str:
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise BadRequest("continue_final_message needs a last message of the assistant.", param="messages")
    return str(last.get("content") or "")


def _logprobs(wanted: ChatRequest) -> int | None:
    count = top_logprobs(wanted.top_logprobs)
    if not wanted.logprobs:
        if wanted.top_logprobs is not None:
            raise BadRequest("top_logprobs needs logprobs true.", param="top_logprobs")
        return None
    return count
