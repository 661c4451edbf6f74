"""The body of `POST /v1/responses`. Items and tools are open unions: each is read by its own `type`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .types import Content, Priority, Share, StreamOptions, ToolChoice


class MessageItem(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = None


class CallItem(msgspec.Struct):
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None


class OutputItem(msgspec.Struct):
    call_id: str
    output: Content = None


class ReasoningPart(msgspec.Struct):
    text: str = ""


class ReasoningItem(msgspec.Struct):
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None


class FunctionTool(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[Any] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None
    draft: bool | None = None
    priority: Priority | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
