"""The system: opens the device, the model and the actors in order, and is the `Service` that the doors use."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import trio
from onecopy.runtime import blas
from onecopy.runtime.core import Ask, Child, Supervisor
from onecopy.runtime.costs import prices
from onecopy.runtime.decode import Limits, Prices
from onecopy.runtime.device import DeviceThread
from onecopy.runtime.drafting import drafter_for
from onecopy.runtime.engine import Engine
from onecopy.runtime.errors import BadRequest, ContextLengthExceeded, StartupError, Unsupported
from onecopy.runtime.models import Loaded, load
from onecopy.runtime.rows.layout import BLOCK, LayerLayout
from onecopy.runtime.rows.ledger import Ledger
from onecopy.runtime.seams.clock import Clock, RealClock
from onecopy.runtime.seams.disk import Disk
from onecopy.runtime.seams.machine import Machine, RealMachine
from onecopy.runtime.seams.real_disk import RealDisk
from onecopy.runtime.seams.rng import RealRng, Rng, SeededRng
from onecopy.runtime.store import DEFAULT_QUOTA, RowsOnDisk, fingerprint, permit
from onecopy.runtime.text import ChatFormat
from onecopy.runtime.text.forced import forced_calls
from onecopy.runtime.text.grammar import Grammars, Matcher
from onecopy.runtime.text.reader import Reader
from onecopy.runtime.turn import Grammar, Piece, TurnSpec

from .attempts import Attempts
from .bank import Bank
from .disk_side import DiskSide, NoDisk
from .lane import Lane
from .messages.bank import BankStatistics
from .messages.lane import LaneStatistics
from .messages.stager import StagerStatistics
from .messages.store import StoreStatistics
from .outbox import Outbox
from .rows_door import RowsDoor
from .rows_store import rows_store_factory
from .service import Health, ModelCard, Options, SessionInfo
from .session import Session, Work
from .sessions import Sessions
from .stager import Stager

LOG = logging.getLogger("onecopy.system")

MEMORY_SHARE = 0.6
"""Share of the machine's memory used when no `--memory` is given: the rest is for the system and the user's tools."""

WORKSPACE = 256 << 20
"""Bytes kept free beside weights and rows for what a round computes: scores, activations and logits of a chunk."""

LEAST_ROWS = 64 << 20
"""Bytes of rows below which serving makes no sense: a start with less is refused with the numbers."""


class System:
    """A running system. Made by `System.open`; every method is called from the trio thread that opened it."""

    def __init__(
        self,
        options: Options,
        loaded: Loaded,
        engine: Engine,
        device: DeviceThread,
        clock: Clock,
        rng: Rng,
        budget: int,
        disk: Disk,
        drafting: Prices,
    ) -> None:
        self._loaded = loaded
        self._engine = engine
        self._device = device
        self._clock = clock
        self._rng = rng
        self._numbers = count(1)
        self._grammars: Grammars | None = None
        self._live: set[Session] = set()
        self._ledger: Ledger | None = None
        self._context = options.context or loaded.context
        self._drafting = drafting
        width = max(1, drafting.limit + 1)
        limits = Limits(decode_share=options.decode_share, batch=max(1, options.parallel), width=width)
        children = [
            Child("bank", lambda: self._bank(budget), stop_timeout=options.drain + 1.0),
            Child("lane", lambda: self._lane(limits), max_restarts=1),
        ]
        self._keeps = bool(options.store)
        if self._keeps:
            children = [*self._disk_children(options, budget, disk), *children]
        self._disk = disk
        self._drain = options.drain
        self._supervisor = Supervisor(children, on_event=_log_event)
        store, stager = map(self._supervisor.ref, ("rows store", "stager")) if self._keeps else (None, None)
        self._sessions = Sessions(self._supervisor.ref("bank"), store, stager, clock, self.new_id)
        self.card = self._make_card(options)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        options: Options,
        *,
        clock: Clock | None = None,
        rng: Rng | None = None,
        machine: Machine | None = None,
        disk: Disk | None = None,
    ) -> AsyncIterator[System]:
        """Loads the model and runs the actors around the block.

        StartupError when the model cannot be loaded or leaves no memory for rows. Leaving the block stops in reverse
        order and waits for running rounds.
        """
        clock = clock or RealClock()
        rng = rng or (RealRng() if options.seed is None else SeededRng(options.seed))
        machine = machine or RealMachine()
        with DeviceThread() as device:
            loaded, engine = await device.run(_load, options, clock)
            budget = rows_budget(options, machine)
            drafting = await device.run(prices, engine, clock.now) if options.draft else Prices()
            system = cls(options, loaded, engine, device, clock, rng, budget, disk or RealDisk(), drafting)
            async with system._supervisor:
                yield system

    def _disk_children(self, options: Options, budget: int, disk: Disk) -> list[Child]:
        """The rows store and the stager, started before the bank and stopped after it."""
        path = options.store or ""
        mark = fingerprint(self._facts())
        quota = options.store_quota or DEFAULT_QUOTA

        def opened() -> RowsOnDisk:
            return RowsOnDisk.open(
                disk, path, fingerprint=mark, wall=self._clock.wall, model=self._loaded.id, quota=quota
            )

        size = permit(self._context, self._engine.layout, budget)
        return [
            Child("rows store", rows_store_factory(opened, disk, self._clock), stop_timeout=options.drain),
            Child(
                "stager",
                lambda: Stager(self._supervisor.ref("rows store"), self._engine.layout, size, self._clock),
                stop_timeout=options.drain,
            ),
        ]

    def _facts(self) -> dict[str, object]:
        """All that decides a row's bits. Rows of another model, cache type or arithmetic never match."""
        layout = self._engine.layout
        beside = self._drafting.mark
        return ({"drafter": beside} if beside else {}) | {
            "weights": self._loaded.digest,
            "dtype": self._loaded.dtype,
            "layout": [_layer_facts(layer) for layer in layout.layers],
            "numerics": self._engine.numerics_mode,
        }

    def _bank(self, budget: int) -> Bank:
        self._forget_rows()
        bucket = self._engine.fixed_rows or BLOCK
        self._ledger = ledger = Ledger(
            self._engine.layout, budget, bucket=bucket, before_drop=lambda c: side.before_drop(c)
        )
        side = self._disk_side(ledger)
        return Bank(ledger, self._device, self._engine.pool.apply, self._clock, side)

    def _disk_side(self, ledger: Ledger) -> NoDisk:
        if not self._keeps:
            return NoDisk()
        door = RowsDoor(ledger, self._engine.pool, self._device, self._disk)
        store, stager = self._supervisor.ref("rows store"), self._supervisor.ref("stager")
        return DiskSide(ledger, door, store, stager, self._clock, self._drain)

    def _forget_rows(self) -> None:
        """A bank that crashed leaves buffers that no books name any more, and saves that must not read on."""
        if self._ledger is not None:
            self._device.post(self._engine.pool.apply, self._ledger.abandon())

    def _lane(self, limits: Limits) -> Lane:
        bank = self._supervisor.ref("bank")
        return Lane(self._engine, self._device, bank, self._clock, self._loaded.eos, limits, self._drafting)

    def _make_card(self, options: Options) -> ModelCard:
        tokenizer = self._loaded.tokenizer
        chat = None
        if tokenizer is not None and self._loaded.template is not None:
            chat = ChatFormat(tokenizer, self._loaded.template, wall=self._clock.wall)
        exactness, reasons = self._engine.exactness
        return ModelCard(
            id=options.name or self._loaded.id,
            created=int(self._clock.wall()),
            context=self._context,
            vocab_size=self._loaded.vocab_size,
            eos_ids=tuple(sorted(self._loaded.eos)),
            tokenizer=tokenizer,
            chat=chat,
            exactness=exactness,
            features={
                "digest": self._loaded.digest,
                "dtype": self._loaded.dtype,
                "row_bytes": self._engine.layout.row_bytes,
                **self._rounding(),
                "exactness_reasons": list(reasons),
                "text": self._loaded.text,
                "drafters": list(self._drafting.drafters),
                "compiled_rounds": self._engine.eager or True,
                "round_costs": [round(cost, 2) for cost in self._drafting.widths],
            },
        )

    def _rounding(self) -> dict[str, object]:
        """What quantized rows do to the output; nothing where rows are as the model computes them."""
        found = self._engine.fidelity
        return {} if found is None else {"quantized_rows": found.figures}

    @property
    def clock(self) -> Clock:
        return self._clock

    def seed64(self) -> int:
        return self._rng.seed64()

    def new_id(self, prefix: str) -> str:
        return prefix + self._rng.token(12)

    # --- turns

    @asynccontextmanager
    async def turn(self, spec: TurnSpec) -> AsyncIterator[AsyncIterator[Piece]]:
        """Runs one turn in a session of its own. Leaving the block cancels it within one round."""
        self._check(spec)
        self._sessions.met(spec.salt)
        attempts = Attempts(lambda outbox: self._spawn(spec, outbox), self._stop)
        await attempts.begin()
        pieces = attempts.pieces()
        try:
            yield pieces
        finally:
            with trio.CancelScope(shield=True):
                await attempts.end()
                await pieces.aclose()

    async def _spawn(self, spec: TurnSpec, outbox: Outbox) -> Session:
        number = next(self._numbers)
        reader, matcher = self._reader(spec), self._matcher(spec)
        fixed = self._drafting.limit > 0 and self._engine.fixed_rows > 0
        exact, starts = self.card.exactness, self._starts(spec)
        work = Work(number, self.new_id("s_"), spec, reader, matcher, self._spell, exact, fixed, starts)
        bank, lane = self._supervisor.ref("bank"), self._supervisor.ref("lane")
        session = Session(work, bank, lane, self._clock, outbox)
        await self._supervisor.spawn(Child(session.name, lambda: session, restart="temporary"))
        self._live.add(session)
        return session

    async def _stop(self, session: Session) -> None:
        self._live.discard(session)
        session.kill()
        await self._supervisor.stop(session.name)

    def _check(self, spec: TurnSpec) -> None:
        if not spec.tokens:
            raise BadRequest("The prompt is empty.", param="messages")
        if len(spec.tokens) >= self._context:
            raise ContextLengthExceeded(len(spec.tokens), self._context)
        if spec.max_new < 1 or len(spec.tokens) + spec.max_new > self._context:
            raise BadRequest(
                f"max_tokens must lie between 1 and {self._context - len(spec.tokens)}.", param="max_tokens"
            )
        bad = next((t for t in spec.tokens if not 0 <= t < self.card.vocab_size), None)
        if bad is not None:
            raise BadRequest(f"Token id {bad} is not in the vocabulary of {self.card.vocab_size}.", param="prompt")

    def _starts(self, spec: TurnSpec) -> tuple[int, ...]:
        """Where a recurrent model's states are worth keeping; other models go back to any token."""
        chat = self.card.chat if self._engine.layout.recurrent else None
        return chat.starts(spec.tokens) if chat is not None else ()

    def _reader(self, spec: TurnSpec) -> Reader | None:
        if self.card.tokenizer is None:
            return None
        chat = self.card.chat
        return Reader(
            self.card.tokenizer,
            spec.format,
            tags=chat.tags if chat else None,
            tools=chat.tool_format if chat and spec.format.tools else None,
            new_id=lambda: self.new_id("call_"),
        )

    def _matcher(self, spec: TurnSpec) -> Matcher | None:
        grammar = spec.grammar or self._forced(spec)
        if grammar is None:
            return None
        if self.card.tokenizer is None:
            raise Unsupported("This model has no tokenizer, so replies cannot be constrained.", param="response_format")
        if self._grammars is None:
            self._grammars = Grammars(self.card.tokenizer, self.card.vocab_size)
        tags = self.card.chat.tags if self.card.chat and spec.format.opened else None
        return self._grammars.matcher(grammar, tags)

    def _forced(self, spec: TurnSpec) -> Grammar | None:
        """The grammar of a reply that must call a tool, when the request demands one."""
        choice = spec.format.tool_choice
        if choice in ("auto", "none") or self.card.chat is None or self.card.tokenizer is None:
            return None
        name, parallel = self.card.chat.tool_format_name, spec.format.parallel
        return forced_calls(name, spec.format.tools, choice, parallel=parallel, tokenizer=self.card.tokenizer)

    def _spell(self, token: int) -> bytes:
        return self.card.tokenizer.token_bytes(token) if self.card.tokenizer is not None else b""

    # --- sessions

    async def sessions(self) -> Sequence[SessionInfo]:
        return await self._sessions.all()

    async def session(self, id: str) -> SessionInfo:
        return await self._sessions.one(id)

    async def pin(self, id: str, on: bool = True) -> SessionInfo:
        return await self._sessions.pin(id, on)

    async def park(self, id: str) -> SessionInfo:
        return await self._sessions.park(id)

    async def fork(self, id: str, at: int | None = None) -> SessionInfo:
        return await self._sessions.fork(id, at)

    async def export(self, id: str) -> bytes:
        return await self._sessions.export(id)

    async def import_(self, data: bytes, salt: bytes = b"") -> SessionInfo:
        return await self._sessions.import_(data, salt)

    async def drop(self, id: str) -> None:
        await self._sessions.drop(id)

    async def cancel(self, id: str) -> bool:
        running = [s for s in self._live if s.conversation == id]
        for session in running:
            session.kill()
        return bool(running)

    # --- numbers

    async def health(self) -> Health:
        down = [name for name in self._actors() if not self._supervisor.ref(name).alive]
        reasons = [f"{name} is down" for name in down]
        told = {"exactness": self.card.exactness, "reasons": self.card.features["exactness_reasons"]}
        details = told | self._rounding()
        if not down:
            broken = (await self._supervisor.ref("bank").ask(BankStatistics()))["broken"]
            reasons += [f"the bank's books are wrong: {sentence}" for sentence in broken]
        if self._keeps and not down:
            why_not = await self._why_not_persisting()
            details["persisting"] = why_not is None
            if why_not is not None:
                reasons.append(f"rows are not kept on disk: {why_not}")
        return Health("degraded" if reasons else "ok", tuple(reasons), details)

    async def _why_not_persisting(self) -> str | None:
        """None while everything that should be on disk is there or on its way."""
        for name, ask in (("rows store", StoreStatistics()), ("stager", StagerStatistics())):
            state = await self._supervisor.ref(name).ask(ask)
            if not state["persisting"]:
                return str(state["why_not"])
        return None

    async def metrics(self) -> Mapping[str, Any]:
        asks = {name: ask() for name, ask in _STATISTICS.items() if name in self._actors()}
        numbers = {name: await self._supervisor.ref(name).ask(ask) for name, ask in asks.items()}
        return {**numbers, "device": self._device.statistics()}

    def _actors(self) -> tuple[str, ...]:
        return ("rows store", "stager", "bank", "lane") if self._keeps else ("bank", "lane")


_STATISTICS: dict[str, Callable[[], Ask[dict[str, Any]]]] = {
    "rows store": StoreStatistics,
    "stager": StagerStatistics,
    "bank": BankStatistics,
    "lane": LaneStatistics,
}


def _load(options: Options, clock: Clock) -> tuple[Loaded, Engine]:
    """On the device thread: fast BLAS first, then the weights, then the self-check of this machine's arithmetic."""
    blas.install()
    loaded = load(options.model, dtype=options.dtype)
    if loaded.tokenizer is None:
        LOG.warning("%s has no tokenizer files: it takes and gives token ids, on /v1/completions", loaded.id)
    context = options.context or loaded.context
    if not 0 < context <= loaded.context:
        raise StartupError(f"--context {context} is not within the model's context of {loaded.context} tokens.")
    if options.drafter is not None and not options.draft:
        raise StartupError("--drafter names who drafts and --no-draft says that nobody does; give one of them.")
    drafter = drafter_for(loaded, options.drafter, context) if options.draft else None
    engine = Engine.open(
        loaded,
        context=context,
        stopwatch=clock.now,
        fast=options.fast,
        drafter=drafter,
        kv_bits=options.kv_bits,
    )
    LOG.info("%s is %s", loaded.id, engine.verdict)
    if engine.fidelity is not None:
        LOG.info("%s keeps quantized rows: %s", loaded.id, engine.fidelity)
    LOG.info("rounds are %s", "compiled" if engine.eager is None else f"not compiled: {engine.eager}")
    return loaded, engine


def _layer_facts(layer: LayerLayout) -> list[object]:
    pooled = [layer.ratio, *(t.row_bytes for t in layer.pooled)] if layer.pooled else []
    quantized = [f"{layer.bits} bits"] if layer.bits is not None else []
    return [layer.kind, layer.row_bytes, layer.anchor_bytes, layer.window, *pooled, *quantized]


def rows_budget(options: Options, machine: Machine) -> int:
    """Bytes for rows: the memory this process may use, less what it uses with the weights loaded and a workspace.

    StartupError with the numbers when that leaves too little.
    """
    memory = options.memory or int(machine.total() * MEMORY_SHARE)
    taken = machine.footprint() + WORKSPACE
    if memory - taken < LEAST_ROWS:
        raise StartupError(
            f"{memory} bytes of memory leave no room for conversations: the loaded model and its workspace take "
            f"{taken}. Give at least --memory {taken + LEAST_ROWS}."
        )
    return memory - taken


def _log_event(kind: str, name: str, detail: object) -> None:
    level = logging.ERROR if kind in ("crashed", "escalated") else logging.DEBUG
    LOG.log(level, "%s %s %s", name, kind, detail if detail is not None else "")
