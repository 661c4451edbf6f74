"""The runtime for programs under trio: conversations, forks, children and steps over one running system."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, TypeVar, Unpack, overload

import trio
from onecopy.actors.service import Health, ModelCard, Options, Service, SessionInfo
from onecopy.runtime.errors import StartupError
from onecopy.runtime.turn import Piece, TurnSpec

from .answer import Answer
from .bare import bare
from .conversation import Conversation, opened
from .feed import Feed
from .prompts import RememberingTokenizer
from .reply import Reply
from .sent import turn
from .settings import Message, Prompt, Settings, Tools
from .spawn import Child, OnError, Run, Spawn
from .step import Step, StepSettings, step_spec

P = TypeVar("P")
R = TypeVar("R")


class OpenOptions(TypedDict, total=False):
    """How a system is opened; `onecopy.actors.service.Options` says what each means. Sizes in bytes."""

    name: str | None
    memory: int | None
    context: int | None
    parallel: int
    dtype: str | None
    kv_bits: int | None
    fast: bool
    store: str | None
    store_quota: int | None
    decode_share: float
    draft: bool
    drafter: str | None
    drain: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class Status:
    """The runtime at one moment. metrics: numbers, nested by owner."""

    model: str
    context: int
    exactness: str
    health: Health
    sessions: tuple[SessionInfo, ...]
    metrics: Mapping[str, Any]


class Runtime:
    """A running system in this process. Made by `open` or `over`; every method is called on that trio loop.

    Closing it ends all turns and children first: whoever still reads one gets ActorStopped.
    """

    def __init__(self, service: Service, nursery: trio.Nursery) -> None:
        self._service = service
        self._nursery = nursery
        self._card = _remembering(service.card)

    @classmethod
    @asynccontextmanager
    async def open(cls, model: str = "smollm2", **options: Unpack[OpenOptions]) -> AsyncIterator[Runtime]:
        """Loads a model (a bundled name, a directory or a GGUF file) and runs it around the block.

        StartupError when an option is unknown, the model cannot be loaded or leaves no memory for conversations.
        """
        wanted = options_of(model, options)
        from onecopy.actors.system import System

        async with bare(System.open(wanted)) as system, cls.over(system) as runtime:
            yield runtime

    @classmethod
    @asynccontextmanager
    async def over(cls, service: Service) -> AsyncIterator[Runtime]:
        """A runtime over a service that somebody else opened and closes."""
        async with bare(trio.open_nursery()) as nursery:
            try:
                yield cls(service, nursery)
            finally:
                nursery.cancel_scope.cancel()

    @property
    def service(self) -> Service:
        """What the doors run on: `create_app(runtime.service)` serves the same conversations over HTTP."""
        return self._service

    @property
    def card(self) -> ModelCard:
        """The served model; its tokenizer remembers prompts."""
        return self._card

    def conversation(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Message] = (),
        tools: Tools = (),
        **defaults: Unpack[Settings],
    ) -> Conversation:
        """A new conversation. Nothing is computed until something is sent.

        system: the system message. messages: what was said before. tools: offered in every turn. defaults: settings of
        every turn that does not say otherwise. BadRequest or Unsupported for a wrong one.
        """
        return opened(self, system, messages, tools, defaults)

    @overload
    def spawn(
        self,
        parent: Conversation,
        prompts: Sequence[Prompt],
        *,
        limit: int | None = None,
        on_error: OnError = "raise",
        run: None = None,
        **settings: Unpack[Settings],
    ) -> Spawn[Prompt, Answer]: ...

    @overload
    def spawn(
        self,
        parent: Conversation,
        prompts: Sequence[P],
        *,
        limit: int | None = None,
        on_error: OnError = "raise",
        run: Run[P, R],
    ) -> Spawn[P, R]: ...

    def spawn(
        self,
        parent: Conversation,
        prompts: Sequence[Any],
        *,
        limit: int | None = None,
        on_error: OnError = "raise",
        run: Run[Any, Any] | None = None,
        **settings: Unpack[Settings],
    ) -> Spawn[Any, Any]:
        """A child of `parent` for each prompt, all forked from it as it is when the first is started.

        limit: children at work at one time; all by default. run: what a child does with its prompt, an async function
        of (conversation, prompt), by default one turn with `settings`; what it returns is the child's result.
        """
        return self.children(parent, prompts, limit, on_error, run, settings)

    def children(
        self,
        parent: Conversation,
        prompts: Sequence[Any],
        limit: int | None,
        on_error: OnError,
        run: Run[Any, Any] | None,
        settings: Settings,
    ) -> Spawn[Any, Any]:
        """`spawn` for adapters: the same without the overloads."""

        async def one_turn(child: Conversation, prompt: Prompt) -> Answer:
            return await child.send(prompt, **settings)

        return Spawn(self._start, parent, prompts, run or one_turn, limit=limit, on_error=on_error)

    async def step(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        logprobs: int | None = None,
        choices: Sequence[str] | None = None,
        timeout: float | None = None,
        **settings: Unpack[StepSettings],
    ) -> Step:
        """The next tokens after a text or token ids; no template, no tools.

        max_tokens: 1 by default. logprobs: 0 to 20 alternatives with each token. choices: the answer is exactly one of
        these texts. Rows are kept by their tokens, so a step that continues an earlier one computes only what is new.
        """
        spec = await step_spec(
            self._service,
            prompt,
            max_tokens=max_tokens,
            logprobs=logprobs,
            choices=choices,
            settings=settings,
        )
        reply = Reply()
        feed = self.start(spec, timeout=timeout)
        try:
            while batch := await feed.next():
                for piece in batch:
                    reply.add(piece)
        finally:
            await feed.close()
        return Step.of(spec.tokens, reply)

    async def status(self) -> Status:
        """The model, health, all conversations that have rows, and the numbers of `/metrics`."""
        card = self._card
        sessions = tuple(await self._service.sessions())
        health, metrics = await self._service.health(), await self._service.metrics()
        return Status(card.id, card.context, card.exactness, health, sessions, metrics)

    def start(self, spec: TurnSpec, *, timeout: float | None = None) -> Feed[Piece]:
        """One turn in this runtime's nursery, read through the feed. For adapters; conversations call it for you."""
        return Feed(self._nursery, turn(self._service, spec), timeout=timeout)

    def _start(self, work: Any) -> Feed[Any]:
        return Feed(self._nursery, work)


def options_of(model: str, options: Mapping[str, Any]) -> Options:
    """Options of a system from keyword arguments."""
    known = {field.name for field in fields(Options)} - {"model"}
    unknown = set(options) - known
    if unknown:
        raise StartupError(f"There is no option {min(unknown)!r}; there are {', '.join(sorted(known))}.")
    return Options(model=model, **options)


def _remembering(card: ModelCard) -> ModelCard:
    if card.tokenizer is None or isinstance(card.tokenizer, RememberingTokenizer):
        return card
    return replace(card, tokenizer=RememberingTokenizer(card.tokenizer))


__all__ = ["Child", "OpenOptions", "Runtime", "Status", "options_of"]
