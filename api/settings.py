"""Settings of a turn as keyword arguments: the fields of a chat completion, checked by the same code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from onecopy.actors.service import Service
from onecopy.runtime.errors import BadRequest
from onecopy.runtime.text.formats import described
from onecopy.runtime.turn import Tool

from .codec import convert
from .openai.chat import order_of, talk_of
from .openai.messages import messages_of
from .openai.types import ChatRequest
from .order import Order, Talk

Message = Mapping[str, Any]
Prompt = str | Message | Sequence[Message]
"""What is said: a text is a user's message; else one message or several in OpenAI's shape."""
Tools = Sequence[Tool | Mapping[str, Any]]


class Settings(TypedDict, total=False):
    """All optional; names, ranges and defaults are those of `POST /v1/chat/completions`.

    temperature 1.0, top_p 1.0, top_k 0, min_p 0.0 and the penalties shape sampling; seed makes it repeatable.
    logit_bias: token id as text to bias. logprobs with top_logprobs (0 to 20) asks for log probabilities.
    max_tokens: of the answer, up to the context. stop: texts that end it. tool_choice: "auto", "none", "required" or a
    named function. response_format, structured_outputs, guided_choice, guided_regex, guided_json: one constraint.
    priority "background" yields to others. draft false never drafts. cache_salt: rows are shared under it only.
    chat_template_kwargs: for the model's template. continue_final_message: go on with the last message.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    logprobs: bool
    top_logprobs: int
    seed: int
    max_tokens: int
    stop: str | list[str]
    include_stop_str_in_output: bool
    ignore_eos: bool
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    response_format: dict[str, Any]
    structured_outputs: dict[str, Any]
    guided_choice: list[str]
    guided_regex: str
    guided_json: dict[str, Any]
    guided_grammar: str
    reasoning_effort: str
    chat_template_kwargs: dict[str, Any]
    continue_final_message: bool
    priority: int | Literal["normal", "background"]
    draft: bool
    cache_salt: str
    prompt_cache_key: str


@dataclass(frozen=True, slots=True)
class Asker:
    """Stands where a call at the doors would: the process itself, whose rows carry no key's salt."""

    service: Service
    hint: str | None = None
    salt: bytes = b""


def messages_in(prompt: Prompt) -> list[dict[str, Any]]:
    """`prompt` as messages. The input is not changed and not kept."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(prompt)] if isinstance(prompt, Mapping) else [dict(message) for message in prompt]


def tools_in(tools: Tools) -> list[dict[str, Any]]:
    return [described(tool) | _strict(tool) if isinstance(tool, Tool) else dict(tool) for tool in tools]


def checked(
    service: Service, messages: Sequence[Message], tools: Tools, settings: Mapping[str, Any]
) -> tuple[Order, Talk]:
    """A turn's order and conversation. Raises BadRequest or Unsupported that names the field."""
    refuse_unknown(settings, Settings)
    body = {"messages": list(messages), "tools": tools_in(tools), **settings}
    wanted = convert(body, ChatRequest, "")
    order = order_of(wanted, Asker(service))
    return order, talk_of(wanted, order)


def refuse_unknown(settings: Mapping[str, Any], known: type) -> None:
    for name in settings:
        if name not in known.__annotations__:
            raise BadRequest(f"There is no setting {name!r}.", param=name)


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with known keys only, as a conversation keeps them."""
    return messages_of(convert({"messages": list(messages)}, ChatRequest, "").messages)


def _strict(tool: Tool) -> dict[str, Any]:
    return {} if not tool.strict else {"function": {**described(tool)["function"], "strict": True}}


__all__ = ["Message", "Prompt", "Settings", "Tools", "checked", "messages_in", "plain", "refuse_unknown", "tools_in"]
