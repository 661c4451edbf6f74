"""A service whose replies are written by the test: scripted tokens through the real reader, prefixes by token identity.

It keeps what it saw as plain token tuples, so `cached` is what a perfect bank would report.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import anyio
from onecopy.actors.service import Health, ModelCard, SessionInfo
from onecopy.runtime.errors import Conflict, NotFound, OnecopyError
from onecopy.runtime.seams.clock import VirtualClock
from onecopy.runtime.text.chat import ChatFormat
from onecopy.runtime.text.reader import Reader
from onecopy.runtime.text.tokenizer import Tokenizer
from onecopy.runtime.turn import (
    Finished,
    FinishReason,
    Piece,
    Prefilling,
    Queued,
    Receipt,
    Started,
    TokenLogprob,
    TurnSpec,
    Usage,
)

from tests.support.tokens import CHATML, byte_tokenizer

END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Say:
    """One scripted reply. text: str is tokenised, bytes become one token per byte, ints are tokens.

    ends: the end token follows; otherwise the text repeats for ever. refuse: raised before anything. fails_after:
    raise `error` after so many tokens. queued, prefill: pieces before the first token. before, between: awaited
    before the first and before every token.
    """

    text: str | bytes | Sequence[int] = "Hello."
    ends: bool = True
    refuse: OnecopyError | None = None
    fails_after: int | None = None
    error: Exception = field(default_factory=lambda: RuntimeError("a bug"))
    queued: int = 0
    prefill: Sequence[int] = ()
    before: Callable[[], Any] | None = None
    between: Callable[[], Any] | None = None


Script = Callable[[TurnSpec], Say]


class ScriptedService:
    """`Service` over a script. Public lists tell what happened: specs, active (turns now running), cancelled."""

    def __init__(
        self,
        script: Script | Say | str = "Hello.",
        *,
        tokenizer: Tokenizer | None = None,
        template: str = CHATML,
        context: int = 4096,
        id: str = "acme/tiny-chat",
    ) -> None:
        self.script = script if callable(script) else (lambda spec, s=script: s if isinstance(s, Say) else Say(s))
        self.tokenizer = tokenizer or byte_tokenizer(template)
        self.chat = ChatFormat(self.tokenizer, template, wall=lambda: 0.0)
        self.clock = VirtualClock()
        self.card = ModelCard(
            id=id,
            created=1_700_000_000,
            context=context,
            vocab_size=self.tokenizer.vocab_size,
            eos_ids=tuple(sorted(self.tokenizer.eos_ids)),
            tokenizer=self.tokenizer,
            chat=self.chat,
            exactness="exact",
        )
        self.specs: list[TurnSpec] = []
        self.seen: list[tuple[bytes, tuple[int, ...]]] = []
        self.active = 0
        self.peak = 0
        self.cancelled = 0
        self.status = Health("ok")
        self.known: dict[str, SessionInfo] = {}
        self._ids = count(1)
        self._seeds = count(1000)

    @asynccontextmanager
    async def turn(self, spec: TurnSpec) -> AsyncIterator[AsyncIterator[Piece]]:
        self.specs.append(spec)
        say = self.script(spec)
        if say.refuse:
            raise say.refuse
        self.active += 1
        self.peak = max(self.peak, self.active)
        pieces = self._pieces(spec, say)
        finished = False
        try:
            yield pieces
            finished = True
        finally:
            await pieces.aclose()
            self.active -= 1
            self.cancelled += not finished

    async def _pieces(self, spec: TurnSpec, say: Say) -> AsyncIterator[Piece]:
        session = self._session(spec)
        if say.queued:
            yield Queued(say.queued, 1.5)
        cached = self._cached(spec)
        yield Started(session, len(spec.tokens), cached, spec.sampling.seed)
        for done in say.prefill:
            yield Prefilling(done, len(spec.tokens))
        await _maybe(say.before)
        reader = Reader(
            self.tokenizer,
            spec.format,
            tags=self.chat.tags,
            tools=self.chat.tool_format,
            new_id=lambda: self.new_id("call_"),
        )
        delivered: list[int] = []
        reason: FinishReason = "length"
        for token in self._tokens(say):
            if len(delivered) == say.fails_after:
                raise say.error
            await _maybe(say.between)
            ends = token in self.card.eos_ids and not spec.ignore_eos
            delivered.append(token)
            for piece in reader.feed(token, self._logprob(spec, token)):
                yield piece
            if ends or reader.stopped or len(delivered) == spec.max_new:
                reason = "stop" if ends or reader.stopped else "length"
                break
            await anyio.lowlevel.checkpoint()
        for piece in reader.finish(cut=reason == "length"):
            yield piece
        if len(delivered) == say.fails_after:
            raise say.error
        self.seen.append((spec.salt, (*spec.tokens, *delivered)))
        yield self._finished(spec, reader, reason, delivered, cached)

    def _finished(
        self, spec: TurnSpec, reader: Reader, reason: FinishReason, delivered: list[int], cached: int
    ) -> Finished:
        receipt = Receipt(
            "adopted" if cached else "fresh",
            rows_adopted=cached,
            rows_prefilled=len(spec.tokens) - cached,
            diverged_at=cached,
            rounds=len(delivered),
            exact="exact",
        )
        return Finished(
            reader.finish_reason(reason),
            Usage(len(spec.tokens), len(delivered), cached),
            receipt,
            hashlib.sha256(repr(delivered).encode()).hexdigest()[:16],
            spec.sampling.seed,
            stop=reader.stop,
        )

    def _tokens(self, say: Say) -> Iterable[int]:
        text = say.text
        ids = self.tokenizer.encode(text) if isinstance(text, str) else list(text)
        if isinstance(text, bytes):
            ids = [self.byte(b) for b in text]
        if not say.ends:
            while True:
                yield from ids
        yield from ids
        yield self.tokenizer.encode(END)[0]

    def byte(self, value: int) -> int:
        """The token that stands for one byte."""
        return next(i for i in range(self.tokenizer.vocab_size) if self.tokenizer.token_bytes(i) == bytes([value]))

    def _logprob(self, spec: TurnSpec, token: int) -> TokenLogprob | None:
        if spec.sampling.logprobs is None:
            return None
        top = tuple((i, -1.0 - i, self.tokenizer.token_bytes(i)) for i in range(spec.sampling.logprobs))
        return TokenLogprob(token, -0.5, self.tokenizer.token_bytes(token), top)

    def _cached(self, spec: TurnSpec) -> int:
        shared = [_common(tokens, spec.tokens) for salt, tokens in self.seen if salt == spec.salt]
        return min(max(shared, default=0), len(spec.tokens) - 1)

    def _session(self, spec: TurnSpec) -> str:
        id = self.new_id("s_")
        self.known[id] = SessionInfo(id, "idle", len(spec.tokens), 64, self.clock.wall(), salt=spec.salt)
        return id

    async def sessions(self) -> list[SessionInfo]:
        return list(self.known.values())

    async def session(self, id: str) -> SessionInfo:
        if id not in self.known:
            raise NotFound(f"There is no session {id!r}.")
        return self.known[id]

    async def pin(self, id: str, on: bool = True) -> SessionInfo:
        self.known[id] = replace(await self.session(id), pinned=on)
        return self.known[id]

    async def park(self, id: str) -> SessionInfo:
        if (await self.session(id)).state == "running":
            raise Conflict("The session is running.")
        self.known[id] = replace(self.known[id], state="parked")
        return self.known[id]

    async def fork(self, id: str, at: int | None = None) -> SessionInfo:
        parent = await self.session(id)
        child = replace(parent, id=self.new_id("s_"), parent=id, tokens=parent.tokens if at is None else at)
        self.known[child.id] = child
        return child

    async def export(self, id: str) -> bytes:
        return (await self.session(id)).id.encode()

    async def import_(self, data: bytes, salt: bytes = b"") -> SessionInfo:
        made = SessionInfo(self.new_id("s_"), "parked", len(data), 0, 0.0, salt=salt)
        self.known[made.id] = made
        return made

    async def drop(self, id: str) -> None:
        del self.known[(await self.session(id)).id]

    async def cancel(self, id: str) -> bool:
        return (await self.session(id)).state == "running"

    async def health(self) -> Health:
        return self.status

    async def metrics(self) -> dict[str, Any]:
        return {"bank": {"rows_held": 12, "evictions_total": 3, "owner": "bank"}, "lane": {"rounds_total": 7}}

    def seed64(self) -> int:
        return next(self._seeds) << 11

    def new_id(self, prefix: str) -> str:
        return f"{prefix}{next(self._ids):08x}"


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


async def _maybe(hook: Callable[[], Any] | None) -> None:
    if hook is not None:
        await hook()
