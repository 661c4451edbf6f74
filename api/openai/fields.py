"""Fields that OpenAI routes share, read into an `Order`: ranges checked, aliases joined, the unoffered refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onecopy.actors.service import ModelCard
from onecopy.runtime.errors import BadRequest, Unsupported
from onecopy.runtime.turn import Grammar, Priority, Sampling, Tool

from ..codec import encode, shallow
from ..order import SEEDS, Order
from .types import FunctionTool, JsonSchema, NamedChoice, ResponseFormat, Shared, StructuredOutputs, ToolChoice

CHOICES = 64
TOP_LOGPROBS = 20
TOOLS = 1024

REFUSED: dict[str, Callable[[Any], bool]] = {
    "min_tokens": bool,
    "stop_token_ids": bool,
    "bad_words": bool,
    "allowed_token_ids": bool,
    "prompt_logprobs": lambda value: value is not None,
    "use_beam_search": bool,
    "audio": bool,
    "functions": bool,
    "function_call": lambda value: value not in (None, "auto", "none"),
    "web_search_options": lambda value: value is not None,
    "suffix": bool,
    "modalities": lambda value: bool(value) and value != ["text"],
    "best_of": lambda value: value not in (None, 1),
    "skip_special_tokens": lambda value: value is False,
}
"""Fields that are understood but not offered, and the values of each that would change the answer."""


def refuse_unoffered(request: object) -> None:
    for name, matters in REFUSED.items():
        if matters(getattr(request, name, None)):
            raise Unsupported(f"{name} is not offered here.", param=name)


def order(request: Shared, card: ModelCard, *, logprobs: int | None, salt: bytes, hint: str | None) -> Order:
    """The shared fields as an order; the caller adds tools and grammar."""
    refuse_unoffered(request)
    return Order(
        sampling=sampling(request, card, logprobs),
        seed=seed_of(request.seed),
        n=choices(request.n),
        max_new=positive(request.max_tokens, "max_tokens"),
        stop=stops(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        priority=priority(request.priority),
        draft=request.draft is not False,
        ignore_eos=bool(request.ignore_eos),
        salt=salt + (request.cache_salt or "").encode(),
        hint=hint or request.prompt_cache_key or request.user,
    )


def sampling(request: Shared, card: ModelCard, logprobs: int | None) -> Sampling:
    return Sampling(
        seed=0,
        temperature=_or(request.temperature, 1.0),
        top_p=max(_or(request.top_p, 1.0), 1e-6),
        top_k=max(request.top_k or 0, 0),
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=bias(request.logit_bias, card),
        logprobs=logprobs,
    )


def bias(raw: dict[str, float] | None, card: ModelCard) -> tuple[tuple[int, float], ...]:
    """logit_bias with its keys read as token ids of the vocabulary."""
    found = []
    for key, value in (raw or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= card.vocab_size:
            raise BadRequest(f"{key!r} is not a token id below {card.vocab_size}.", param="logit_bias")
        found.append((int(key), value))
    return tuple(found)


def seed_of(raw: int | None) -> int | None:
    """-1 and null draw a seed; any other must fit 64 unsigned bits."""
    if raw is None or raw == -1:
        return None
    if not 0 <= raw < SEEDS:
        raise BadRequest("seed must be from 0 to 2^64 - 1, or -1 for a random one.", param="seed")
    return raw


def choices(raw: int | None) -> int:
    if raw is None:
        return 1
    if not 1 <= raw <= CHOICES:
        raise BadRequest(f"n must be from 1 to {CHOICES}.", param="n")
    return raw


def positive(raw: int | None, name: str) -> int | None:
    if raw is not None and raw < 1:
        raise BadRequest(f"{name} must be at least 1.", param=name)
    return raw


def stops(raw: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Stop strings; empty ones are dropped, for they would end every reply before it began."""
    found = tuple(s for s in ([raw] if isinstance(raw, str) else raw or []) if s)
    if len(found) > 64 or sum(map(len, found)) > 16_384:
        raise BadRequest("At most 64 stop strings and 16384 characters of them.", param=name)
    return found


def priority(raw: int | str | None) -> Priority:
    """Words as they are; a number above 0 is background (lower numbers go first)."""
    return "background" if raw == "background" or (isinstance(raw, int) and raw > 0) else "normal"


def top_logprobs(count: int | None, name: str = "top_logprobs") -> int:
    if count is not None and not 0 <= count <= TOP_LOGPROBS:
        raise BadRequest(f"{name} must be from 0 to {TOP_LOGPROBS}.", param=name)
    return count or 0


def tools_of(raw: Sequence[FunctionTool] | None) -> tuple[Tool, ...]:
    if len(raw or ()) > TOOLS:
        raise BadRequest(f"At most {TOOLS} tools.", param="tools")
    return unique_tools([_tool(tool, i) for i, tool in enumerate(raw or ())])


def unique_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise BadRequest(f"The tool {name!r} is declared twice.", param=f"tools[{i}]")
    return tuple(tools)


def choice_of(raw: ToolChoice | None, tools: Sequence[Tool]) -> str:
    """tool_choice as `ReplyFormat` has it: auto, none, required, or a declared tool's name."""
    if isinstance(raw, NamedChoice):
        return named_tool(_name_in(raw), tools)
    if raw in (None, "auto", "none"):
        return raw or "auto"
    if raw != "required":
        raise BadRequest("tool_choice must be none, auto, required or a named function.", param="tool_choice")
    if not tools:
        raise BadRequest("tool_choice is required, but the request has no tools.", param="tool_choice")
    return "required"


def named_tool(name: str, tools: Sequence[Tool]) -> str:
    if name not in {tool.name for tool in tools}:
        raise BadRequest(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice")
    return name


def grammar_of(request: Shared, format: ResponseFormat | None) -> Grammar | None:
    """The one constraint of a request, wherever the client wrote it. Two at once are refused."""
    found = [*_formats(format), *_guided(request), *_structured(request.structured_outputs)]
    if len(found) > 1:
        raise BadRequest("A reply can follow one constraint, not several.", param=found[1][0])
    return found[0][1] if found else None


def schema_grammar(schema: Any, param: str) -> Grammar:
    """A JSON schema, as an object or as text."""
    if isinstance(schema, str):
        return Grammar("json_schema", schema)
    if not isinstance(schema, (dict, bool)):
        raise BadRequest(f"{param} must be a JSON schema.", param=param)
    return Grammar("json_schema", encode(shallow(schema, param)).decode())


def _formats(format: ResponseFormat | None) -> list[tuple[str, Grammar]]:
    match format:
        case ResponseFormat(type="json_object"):
            return [("response_format", Grammar("json_object", "{}"))]
        case ResponseFormat(type="json_schema"):
            schema = (format.json_schema or JsonSchema()).schema
            return [("response_format", schema_grammar(schema, "response_format.json_schema.schema"))]
        case ResponseFormat(type="grammar"):
            return [("response_format", Grammar("lark", format.grammar or ""))]
    return []


def _guided(request: Shared) -> list[tuple[str, Grammar]]:
    raw = StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    return [(f"guided_{name.rpartition('.')[2]}", grammar) for name, grammar in _structured(raw)]


def _structured(raw: StructuredOutputs | None) -> list[tuple[str, Grammar]]:
    found: list[tuple[str, Grammar]] = []
    if raw is None:
        return found
    if raw.json is not None:
        found.append(("structured_outputs.json", schema_grammar(raw.json, "guided_json")))
    if raw.regex is not None:
        found.append(("structured_outputs.regex", Grammar("regex", raw.regex)))
    if raw.choice is not None:
        found.append(("structured_outputs.choice", _choice_grammar(raw.choice)))
    if raw.grammar is not None:
        found.append(("structured_outputs.grammar", Grammar("lark", raw.grammar)))
    if raw.json_object:
        found.append(("structured_outputs.json_object", Grammar("json_object", "{}")))
    return found


def _choice_grammar(options: list[str]) -> Grammar:
    if not options or not all(options):
        raise BadRequest("A choice needs options, none of them empty.", param="guided_choice")
    return Grammar("choice", encode(options).decode())


def _tool(raw: FunctionTool, index: int) -> Tool:
    made = raw.function
    parameters = shallow(made.parameters or {}, f"tools[{index}].function.parameters")
    return Tool(made.name, made.description or "", parameters, bool(made.strict))


def _name_in(raw: NamedChoice) -> str:
    name = raw.function.name if raw.function else raw.name
    if raw.type != "function" or name is None:
        raise Unsupported(f"tool_choice of type {raw.type!r} is not offered here.", param="tool_choice")
    return name


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
