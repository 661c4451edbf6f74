"""`/v1/responses`: create, retrieve, list input items, delete."""

from __future__ import annotations

from typing import Any

from onecopy.runtime.errors import BadRequest, Unsupported
from onecopy.runtime.turn import Grammar, Sampling
from starlette.requests import Request
from starlette.responses import Response

from ..codec import decode, json_response, shallow
from ..doors import Call, doors_of, principal_of
from ..order import Order, Talk, check_model, render, specs
from ..reply import Reply
from .chat import effort_kwargs
from .fields import choice_of, priority, schema_grammar, seed_of, top_logprobs
from .kept import Stored
from .response_items import Plain, messages_of, tools_of
from .response_types import ResponsesRequest, TextFormat
from .response_wire import ResponsesWire
from .wire import message_body

LOGPROBS = "message.output_text.logprobs"
UNOFFERED = ("background", "conversation", "prompt")


async def create(request: Request) -> Response:
    call = await Call.of(request)
    wanted = decode(call.body, ResponsesRequest)
    card = call.service.card
    check_model(card, wanted.model, call.options.aliases)
    refuse_unoffered(wanted)
    made = order_of(wanted, call)
    history = history_of(wanted, call)
    instructions = [{"role": "system", "content": wanted.instructions}] if wanted.instructions else []
    talk = Talk([*instructions, *history], made.tools, template_kwargs(wanted))
    prompt = await render(card, talk, len(call.body))
    id = call.service.new_id("resp_")

    def keep(body: bytes, reply: Reply) -> None:
        if wanted.store is not False:
            call.doors.kept.put(id, Stored(call.salt, body, items_of(wanted), (*history, turn_of(reply))))

    wire = ResponsesWire(
        head_of(id, wanted, call),
        logprobs=made.sampling.logprobs is not None,
        new_id=call.service.new_id,
        done=keep,
    )
    return call.exchange(specs(call.service, made, prompt, param="input"), wire, stream=bool(wanted.stream))


async def retrieve(request: Request) -> Response:
    return json_response(_stored(request).body)


async def input_items(request: Request) -> Response:
    items = _stored(request).items
    return json_response({"object": "list", "data": items, "has_more": False})


async def delete(request: Request) -> Response:
    id = request.path_params["id"]
    doors_of(request).kept.drop(id, principal_of(request).salt)
    return json_response({"id": id, "object": "response", "deleted": True})


def refuse_unoffered(wanted: ResponsesRequest) -> None:
    for name in UNOFFERED:
        if getattr(wanted, name):
            raise Unsupported(f"{name} is not offered here.", param=name)
    if wanted.truncation not in (None, "disabled"):
        raise Unsupported("Only truncation disabled is offered: nothing is dropped in silence.", param="truncation")


def order_of(wanted: ResponsesRequest, call: Call) -> Order:
    tools = tools_of(wanted.tools)
    return Order(
        sampling=sampling(wanted),
        seed=seed_of(wanted.seed),
        max_new=wanted.max_output_tokens,
        tools=tools,
        tool_choice=choice_of(wanted.tool_choice, tools),
        parallel=wanted.parallel_tool_calls is not False,
        grammar=grammar_of(wanted.text.format if wanted.text else None),
        priority=priority(wanted.priority),
        draft=wanted.draft is not False,
        salt=call.salt,
        hint=call.hint or wanted.prompt_cache_key or wanted.user,
    )


def sampling(wanted: ResponsesRequest) -> Sampling:
    asked = LOGPROBS in (wanted.include or ()) or wanted.top_logprobs
    return Sampling(
        seed=0,
        temperature=1.0 if wanted.temperature is None else wanted.temperature,
        top_p=max(1.0 if wanted.top_p is None else wanted.top_p, 1e-6),
        logprobs=top_logprobs(wanted.top_logprobs) if asked else None,
    )


def history_of(wanted: ResponsesRequest, call: Call) -> list[Plain]:
    """All messages but the instructions: those of the earlier response, then the new input."""
    before: list[Plain] = []
    if wanted.previous_response_id is not None:
        stored = call.doors.kept.get(wanted.previous_response_id, call.salt, "previous_response_id")
        before = list(stored.history)
    if wanted.input is None and not before:
        raise BadRequest("input is missing.", param="input")
    history = before + messages_of(wanted.input or [])
    return history or [{"role": "user", "content": ""}]


def template_kwargs(wanted: ResponsesRequest) -> Plain:
    kwargs = effort_kwargs(wanted.reasoning.effort if wanted.reasoning else None)
    if wanted.text and wanted.text.verbosity is not None:
        kwargs["verbosity"] = wanted.text.verbosity
    return {**kwargs, **shallow(wanted.chat_template_kwargs or {}, "chat_template_kwargs")}


def grammar_of(format: TextFormat | None) -> Grammar | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar("json_object", "{}")
    return schema_grammar(format.schema, "text.format.schema")


def items_of(wanted: ResponsesRequest) -> tuple[Any, ...]:
    if isinstance(wanted.input, str):
        text = {"type": "input_text", "text": wanted.input}
        return ({"type": "message", "role": "user", "content": [text]},)
    return tuple(wanted.input or ())


def turn_of(reply: Reply) -> Plain:
    """The reply as a message of the next prompt, equal to what its items become when a client sends them back."""
    message = message_body(reply)
    found = {"role": "assistant", "content": message["content"] or ""}
    return found | {key: message[key] for key in ("reasoning_content", "tool_calls") if key in message}


def head_of(id: str, wanted: ResponsesRequest, call: Call) -> dict[str, Any]:
    """The fields of a response object that are known before its reply."""
    return {
        "id": id,
        "object": "response",
        "created_at": call.now(),
        "model": call.service.card.id,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": wanted.instructions,
        "max_output_tokens": wanted.max_output_tokens,
        "metadata": wanted.metadata or {},
        "parallel_tool_calls": wanted.parallel_tool_calls is not False,
        "previous_response_id": wanted.previous_response_id,
        "prompt_cache_key": wanted.prompt_cache_key,
        "reasoning": wanted.reasoning or {"effort": None, "summary": None},
        "service_tier": "default",
        "store": wanted.store is not False,
        "temperature": 1.0 if wanted.temperature is None else wanted.temperature,
        "text": wanted.text or {"format": {"type": "text"}},
        "tool_choice": wanted.tool_choice or "auto",
        "tools": wanted.tools or [],
        "top_logprobs": wanted.top_logprobs or 0,
        "top_p": 1.0 if wanted.top_p is None else wanted.top_p,
        "truncation": "disabled",
        "user": wanted.user,
    }


def _stored(request: Request) -> Stored:
    return doors_of(request).kept.get(request.path_params["id"], principal_of(request).salt)
