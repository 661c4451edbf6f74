"""What a request asks for, in words no API owns, and its way to turn specs: render, tokenise, clamp, draw seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from onecopy.actors.service import ModelCard, Service
from onecopy.runtime.errors import BadRequest, ContextLengthExceeded, ModelNotFound, Unsupported
from onecopy.runtime.turn import Grammar, Priority, ReplyFormat, Sampling, Tool, TurnSpec

if TYPE_CHECKING:
    from onecopy.runtime.text.chat import ChatFormat
    from onecopy.runtime.text.tokenizer import Tokenizer

SEEDS = 1 << 64
INLINE = 1 << 15
"""Characters of text that are rendered and tokenised in place; more goes to a worker thread."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request. sampling: everything but the seed; seed None draws one. max_new None: up to the context.

    size: characters the client sent, for choosing where to render.
    """

    sampling: Sampling
    seed: int | None = None
    n: int = 1
    max_new: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel: bool = True
    grammar: Grammar | None = None
    priority: Priority = "normal"
    draft: bool = True
    ignore_eos: bool = False
    salt: bytes = b""
    hint: str | None = None
    size: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as ids. reasoning: the reply's thinking is split off; opened: the prompt already opened it."""

    tokens: tuple[int, ...]
    reasoning: bool = False
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation to render. prefill: text the reply must continue. kwargs: for the template."""

    messages: Messages
    tools: tuple[Tool, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefill: str | None = None


def check_model(card: ModelCard, name: str | None, aliases: Sequence[str] = ()) -> None:
    """Accept the served id, its last path component, any letter case, and the configured aliases ("*" is all)."""
    if name is None or "*" in aliases:
        return
    served = {card.id.lower(), card.id.rsplit("/", 1)[-1].lower(), *(alias.lower() for alias in aliases)}
    if name.lower() not in served:
        raise ModelNotFound(f"The model {name!r} does not exist here; this server serves {card.id!r}.", param="model")


async def render(card: ModelCard, talk: Talk, size: int) -> Prompt:
    """The conversation as ids, through the model's own chat template."""
    chat, tokenizer = text_side(card)
    if size <= INLINE:
        return _render(chat, tokenizer, talk)
    return await anyio.to_thread.run_sync(_render, chat, tokenizer, talk)


async def encode_text(card: ModelCard, text: str) -> tuple[int, ...]:
    """Plain text as ids, with the tokens the model's tokenizer puts around a text."""
    tokenizer = plain_side(card)
    if len(text) <= INLINE:
        return tuple(tokenizer.encode(text, bos=True))
    return tuple(await anyio.to_thread.run_sync(partial(tokenizer.encode, text, bos=True)))


def specs(service: Service, order: Order, prompt: Prompt, *, param: str = "messages") -> list[TurnSpec]:
    """One spec per choice. Choice i is seeded with seed + i, so that choices differ and the request repeats."""
    room = room_for(service.card, prompt.tokens, param)
    seed = drawn(service) if order.seed is None else order.seed
    first = TurnSpec(
        tokens=prompt.tokens,
        max_new=min(order.max_new or room, room),
        sampling=replace(order.sampling, seed=seed),
        format=ReplyFormat(
            stop=order.stop,
            reasoning=prompt.reasoning,
            opened=prompt.opened,
            tools=order.tools,
            tool_choice=order.tool_choice,
            parallel=order.parallel,
            include_stop=order.include_stop,
        ),
        grammar=order.grammar,
        priority=order.priority,
        draft=order.draft,
        ignore_eos=order.ignore_eos,
        salt=order.salt,
        hint=order.hint,
    )
    seeds = [(seed + i) % SEEDS for i in range(order.n)]
    return [replace(first, sampling=replace(first.sampling, seed=s)) for s in seeds]


def drawn(service: Service) -> int:
    """A seed for a request without one: 53 bits, so that every JSON reader can keep it and send it back."""
    return service.seed64() >> 11


def room_for(card: ModelCard, tokens: Sequence[int], param: str) -> int:
    """Tokens that fit behind the prompt. Refuses an empty prompt, one that leaves no room, and foreign ids."""
    if not tokens:
        raise BadRequest("The prompt has no tokens.", param=param)
    if len(tokens) >= card.context:
        raise ContextLengthExceeded(len(tokens), card.context, param=param)
    if min(tokens) < 0 or max(tokens) >= card.vocab_size:
        raise BadRequest(f"The prompt has ids outside the vocabulary of {card.vocab_size}.", param=param)
    return card.context - len(tokens)


def text_side(card: ModelCard) -> tuple[ChatFormat, Tokenizer]:
    tokenizer = plain_side(card)
    if card.chat is None:
        raise Unsupported(f"The model {card.id!r} has no chat template; use /v1/completions.")
    return card.chat, tokenizer


def plain_side(card: ModelCard) -> Tokenizer:
    if card.tokenizer is None:
        raise Unsupported(f"The model {card.id!r} has no tokenizer; send token ids to /v1/completions.")
    return card.tokenizer


def _render(chat: ChatFormat, tokenizer: Tokenizer, talk: Talk) -> Prompt:
    kwargs = talk.kwargs if talk.prefill is None else {"enable_thinking": False, **talk.kwargs}
    text = chat.render(talk.messages, talk.tools, kwargs=kwargs)
    opened = chat.opened_by(text)
    tokens = tokenizer.encode(text + (talk.prefill or ""))
    return Prompt(tuple(tokens), reasoning=chat.thinks, opened=opened)
