"""Request bodies of the OpenAI routes. null is absent, unknown fields are ignored, a wrong type names its path.

Fields that are understood but not offered are declared here too, so that they are refused by name instead of ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Priority = int | Literal["normal", "background"]


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    text: str


class InputTextPart(msgspec.Struct, tag="input_text", tag_field="type"):
    text: str


class OutputTextPart(msgspec.Struct, tag="output_text", tag_field="type"):
    text: str


class RefusalPart(msgspec.Struct, tag="refusal", tag_field="type"):
    refusal: str


class ImagePart(msgspec.Struct, tag="image_url", tag_field="type"):
    pass


class InputImagePart(msgspec.Struct, tag="input_image", tag_field="type"):
    pass


class AudioPart(msgspec.Struct, tag="input_audio", tag_field="type"):
    pass


class FilePart(msgspec.Struct, tag="file", tag_field="type"):
    pass


class InputFilePart(msgspec.Struct, tag="input_file", tag_field="type"):
    pass


Part = (
    TextPart
    | InputTextPart
    | OutputTextPart
    | RefusalPart
    | ImagePart
    | InputImagePart
    | AudioPart
    | FilePart
    | InputFilePart
)
Content = str | list[Part] | None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Message(msgspec.Struct):
    role: Role
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: Any = None


class Function(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, tag="function", tag_field="type"):
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedChoice(msgspec.Struct):
    type: str
    function: NamedFunction | None = None
    name: str | None = None


ToolChoice = str | NamedChoice


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    grammar: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct):
    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1)]
Stop = str | list[str] | None


class Shared(msgspec.Struct, kw_only=True):
    """Fields that chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: Stop = None
    include_stop_str_in_output: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    draft: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    skip_special_tokens: bool | None = None


class ChatRequest(Shared, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None


class CompletionRequest(Shared, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
