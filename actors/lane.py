"""The lane: runs rounds. One loop: receive, plan, run, commit, stream."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from onecopy.runtime.core import Actor, Ref, Reply, handles
from onecopy.runtime.decode import Costs, Limits, Pick, Prices, Round, Want, passed_after, plan
from onecopy.runtime.errors import LaneCrashed, Overloaded
from onecopy.runtime.rows.caches import Strip
from onecopy.runtime.rows.layout import Layout
from onecopy.runtime.seams.clock import Clock
from onecopy.runtime.seams.device import Device

from .messages.bank import Commit, Grow, LaneLost
from .messages.lane import Begin, Cancel, Consumed, LaneStatistics
from .messages.session import Broken, Filled, Produced
from .running import Brought, Running

LOG = logging.getLogger("onecopy.lane")


class Rounds(Protocol):
    """What the lane needs of an engine. Its methods are called on the device thread."""

    @property
    def layout(self) -> Layout: ...

    def run(self, strips: Sequence[Strip], wants: Sequence[Want]) -> Any:
        """Runs one forward; `.picks` holds, for each strip in order, the picks of its wanted rows, `.drafts` what the
        device proposes to follow them, `.compiled` whether a kept graph ran it."""

    def accept(self, kept: Sequence[tuple[Strip, int]]) -> None:
        """Of these strips of the last round only so many tokens stay: puts recurrent states right."""


class Lane(Actor):
    """Runs all running turns, a round at a time. Sessions hear of their own turn, the bank of all rows written."""

    def __init__(
        self,
        engine: Rounds,
        device: Device,
        bank: Ref,
        clock: Clock,
        eos: frozenset[int],
        limits: Limits,
        prices: Prices | None = None,
    ) -> None:
        super().__init__("lane", work_size=4096)
        self._engine = engine
        self._device = device
        self._bank = bank
        self._clock = clock
        self._eos = eos
        self._limits = limits
        self._prices = prices or Prices()
        self._turns: dict[int, Running] = {}
        self._order = 0
        self._owed = 0.0
        self._news: list[tuple[Running, Any]] = []
        self._written: tuple[tuple[int, tuple[int, ...]], ...] = ()
        self._costs = Costs(decode_ms=50.0, chunk_ms=500.0)
        self._rounds = self._compiled = self._tokens = self._prefilled = self._drafted = self._accepted = 0

    async def start(self) -> None:
        self._bank.tell(LaneLost())

    async def run(self) -> None:
        try:
            while True:
                await self.work(await self._receive())
                await self._grow_stuck()
                self._propose()
                now = plan([t.view() for t in self._ready()], self._costs, self._limits, self._owed)
                if now.idle:
                    self._announce()
                else:
                    await self._round(now)
        except Exception as error:
            self._lose_all(error)
            raise

    async def _receive(self) -> Any:
        """Waits only when there is nothing to run."""
        if self._ready():
            return self.mailbox.receive_nowait()
        self._announce()
        return await self.mailbox.receive()

    def _ready(self) -> list[Running]:
        return [t for t in self._turns.values() if not t.paused]

    # --- messages

    @handles(Begin)
    def begin(self, message: Begin) -> None:
        self._order += 1
        self._turns[message.turn] = Running.of(message, self._order, self._eos, self._prices)

    @handles(Cancel)
    def cancel(self, ask: Cancel, reply: Reply[int]) -> None:
        self._announce()
        gone = self._turns.pop(ask.turn, None)
        reply.set(-1 if gone is None else gone.position)

    @handles(Consumed)
    def consumed(self, message: Consumed) -> None:
        if message.turn in self._turns:
            self._turns[message.turn].unread -= message.tokens

    @handles(LaneStatistics)
    def lane_statistics(self, _: LaneStatistics, reply: Reply[dict[str, Any]]) -> None:
        reply.set(self.statistics())

    # --- rounds

    async def _grow_stuck(self) -> None:
        """Between rounds: leaves for turns that have run out of rows; an answer nobody has memory for ends here."""
        for turn in [t for t in self._turns.values() if t.stuck]:
            self._announce()
            lease = await self._bank.ask(Grow(turn.id, max(1, turn.left)))
            if lease is not None:
                turn.lease = lease
            elif self._turns.pop(turn.id, None) is not None:
                self._tell(turn, Produced((), "length", "no memory for more rows"))

    def _propose(self) -> None:
        for turn in self._ready():
            turn.propose()

    async def _round(self, now: Round) -> None:
        """One forward. What it brought is told while the device already runs the next one."""
        decoding = [(self._turns[d.id], self._turns[d.id].decode(d.width)) for d in now.decode]
        filling = self._turns[now.chunk.id] if now.chunk else None
        chunk = filling.chunk(now.chunk.end) if filling and now.chunk else None
        work = [w for _, w in decoding] + ([chunk] if chunk else [])
        begun = self._clock.now()
        running = self._device.begin(self._engine.run, [s for s, _ in work], [w for _, ws in work for w in ws])
        self._announce()
        result = await running
        brought = [t.decoded(picks, result.compiled) for (t, _), picks in zip(decoding, result.picks, strict=False)]
        await self._keep([(strip, len(b.rows)) for (_, (strip, _)), b in zip(decoding, brought, strict=True)])
        self._measure(now, self._clock.now() - begun, result.compiled)
        self._pass_over(now)
        for (turn, _), tokens in zip(decoding, result.drafts, strict=False):
            turn.offer(tokens)
        written = [self._decoded(t, b) for (t, _), b in zip(decoding, brought, strict=True)]
        if filling and chunk:
            written.append(self._filled(filling, chunk[0], result.picks[-1]))
            filling.offer(result.drafts[-1] if result.drafts else ())
        self._written = (*self._written, *written)

    def _announce(self) -> None:
        """Tells what the last round brought, before anything waits: a session must not give its lease back before the
        bank knows of its rows."""
        news, written = self._news, self._written
        self._news, self._written = [], ()
        for turn, message in news:
            self._tell(turn, message)
        if written:
            self._bank.tell(Commit(written))

    async def _keep(self, kept: list[tuple[Strip, int]]) -> None:
        """Rejected rows are overwritten later; a recurrent state that has seen them is computed again."""
        short = [(strip, n) for strip, n in kept if n < len(strip.tokens)]
        if short and self._engine.layout.recurrent:
            await self._device.run(self._engine.accept, short)

    def _decoded(self, turn: Running, brought: Brought) -> tuple[int, tuple[int, ...]]:
        self._drafted += brought.drafted
        self._accepted += brought.accepted
        self._deliver(turn, brought)
        return turn.id, brought.rows

    def _filled(self, turn: Running, strip: Strip, picks: tuple[Pick, ...]) -> tuple[int, tuple[int, ...]]:
        brought = turn.filled(strip, picks)
        self._prefilled += len(brought.rows)
        if brought.picks:
            self._deliver(turn, brought)
        else:
            self._news.append((turn, Filled(turn.position - turn.first, turn.prompt - turn.first)))
        return turn.id, brought.rows

    def _deliver(self, turn: Running, brought: Brought) -> None:
        self._tokens += len(brought.picks)
        if brought.end is not None:
            self._turns.pop(turn.id, None)
        told = Produced(brought.picks, brought.end, None, turn.rounds, turn.drafted, turn.accepted, turn.compiled)
        self._news.append((turn, told))

    def _tell(self, turn: Running, message: Any) -> None:
        """A session that is gone loses its turn, never a round. A full mailbox refuses news of progress only."""
        with contextlib.suppress(Overloaded):
            if not turn.to.tell(message):
                self._turns.pop(turn.id, None)

    # --- numbers

    def _measure(self, now: Round, seconds: float, compiled: bool) -> None:
        """Costs move slowly, so that one slow round does not change who is served next."""
        self._rounds += 1
        self._compiled += compiled
        if now.decode and not now.chunk:
            ms = self._costs.decode_ms + (seconds * 1e3 - self._costs.decode_ms) / 8
            self._costs = Costs(ms, self._costs.chunk_ms)
        elif now.chunk and not now.decode:
            whole = seconds * 1e3 * self._limits.chunk / max(1, now.chunk.end - now.chunk.start)
            self._costs = Costs(self._costs.decode_ms, self._costs.chunk_ms + (whole - self._costs.chunk_ms) / 8)

    def _pass_over(self, now: Round) -> None:
        self._owed = now.owed
        for turn in self._turns.values():
            turn.passed = passed_after(turn, now)

    def _lose_all(self, error: Exception) -> None:
        LOG.exception("a round failed; %d running turns are lost", len(self._turns))
        self._announce()
        for turn in list(self._turns.values()):
            self._tell(turn, Broken(LaneCrashed("The round failed; the conversation is intact.", retry_after=1.0)))
        self._turns.clear()

    def statistics(self) -> dict[str, Any]:
        """running turns, rounds, those that a kept graph ran, tokens delivered, rows prefilled, drafts, and the costs
        that the planner uses (ms)."""
        return {
            **super().statistics(),
            "running": len(self._turns),
            "paused": sum(t.paused for t in self._turns.values()),
            "rounds": self._rounds,
            "compiled": self._compiled,
            "tokens": self._tokens,
            "prefilled": self._prefilled,
            "drafted": self._drafted,
            "accepted": self._accepted,
            "decode_ms": self._costs.decode_ms,
            "chunk_ms": self._costs.chunk_ms,
        }
