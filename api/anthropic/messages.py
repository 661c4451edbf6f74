"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from onecopy.runtime.errors import Unsupported
from onecopy.runtime.turn import Grammar, Sampling
from starlette.requests import Request
from starlette.responses import Response

from ..codec import decode, json_response
from ..doors import Call
from ..openai.fields import priority, schema_grammar, seed_of, stops
from ..order import Order, Prompt, Talk, check_model, render, specs
from .convert import choice_of, conversation, template_kwargs, tools_of
from .types import CountRequest, MessagesRequest, Prompted
from .wire import MessagesWire


async def create(request: Request) -> Response:
    call = await Call.of(request)
    wanted = decode(call.body, MessagesRequest)
    check_model(call.service.card, wanted.model, call.options.aliases)
    made = order_of(wanted, call)
    prompt = await prompt_of(wanted, call)
    wire = MessagesWire(call.service.new_id("msg_"), call.service.card.id)
    return call.exchange(specs(call.service, made, prompt), wire, stream=bool(wanted.stream))


async def count(request: Request) -> Response:
    """The prompt's length, by the very rendering a message would get. Takes no lane and leaves nothing behind."""
    call = await Call.of(request)
    wanted = decode(call.body, CountRequest)
    check_model(call.service.card, wanted.model, call.options.aliases)
    prompt = await prompt_of(wanted, call)
    return json_response({"input_tokens": len(prompt.tokens)})


async def prompt_of(wanted: Prompted, call: Call) -> Prompt:
    for name in ("mcp_servers", "container"):
        if getattr(wanted, name):
            raise Unsupported(f"{name} is not offered here.", param=name)
    messages, prefill = conversation(wanted)
    talk = Talk(messages, tools_of(wanted.tools), template_kwargs(wanted), prefill)
    return await render(call.service.card, talk, len(call.body))


def order_of(wanted: MessagesRequest, call: Call) -> Order:
    tools = tools_of(wanted.tools)
    choice = wanted.tool_choice
    return Order(
        sampling=sampling(wanted),
        seed=seed_of(wanted.seed),
        max_new=wanted.max_tokens,
        stop=stops(wanted.stop_sequences, "stop_sequences"),
        tools=tools,
        tool_choice=choice_of(choice, tools),
        parallel=not (choice and choice.disable_parallel_tool_use),
        grammar=grammar_of(wanted),
        priority=priority(wanted.priority),
        draft=wanted.draft is not False,
        salt=call.salt,
        hint=call.hint or (wanted.metadata.user_id if wanted.metadata else None),
    )


def sampling(wanted: MessagesRequest) -> Sampling:
    return Sampling(
        seed=0,
        temperature=1.0 if wanted.temperature is None else wanted.temperature,
        top_p=max(1.0 if wanted.top_p is None else wanted.top_p, 1e-6),
        top_k=wanted.top_k or 0,
    )


def grammar_of(wanted: Prompted) -> Grammar | None:
    format = wanted.output_format or (wanted.output_config.format if wanted.output_config else None)
    return schema_grammar(format.schema, "output_format.schema") if format else None
