"""Request bodies of the Anthropic routes. null is absent, unknown fields are ignored, a wrong type names its path."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    thinking: str
    signature: str | None = None


class RedactedBlock(msgspec.Struct, tag="redacted_thinking", tag_field="type"):
    data: str | None = None


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any] | None = None


class ImageBlock(msgspec.Struct, tag="image", tag_field="type"):
    pass


class DocumentBlock(msgspec.Struct, tag="document", tag_field="type"):
    source: Any = None
    title: str | None = None
    context: str | None = None


class SearchResultBlock(msgspec.Struct, tag="search_result", tag_field="type"):
    pass


class ReferenceBlock(msgspec.Struct, tag="tool_reference", tag_field="type"):
    tool_name: str | None = None


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ReferenceBlock


class ToolResultBlock(msgspec.Struct, tag="tool_result", tag_field="type"):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)
Content = str | list[Block] | None


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: Content = None


class Tool(msgspec.Struct):
    """A function tool, or (with a `type` other than "custom") one that only Anthropic's own servers run."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(msgspec.Struct):
    user_id: str | None = None


Share = Annotated[float, Meta(ge=0, le=1)]


class Prompted(msgspec.Struct, kw_only=True):
    """Fields that decide the prompt."""

    messages: list[Message]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class CountRequest(Prompted, kw_only=True):
    """`POST /v1/messages/count_tokens`."""


class MessagesRequest(Prompted, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    metadata: Metadata | None = None
    seed: int | None = None
    draft: bool | None = None
    priority: int | Literal["normal", "background"] | None = None
