"""A system over scripted rounds: the real actors on token ids instead of arrays, a round at a time if a test wants it.

The engine reads every row that a strip can see and picks the next token from all of them, so one wrong row changes the
reply; and it refuses a strip whose rows are not what the conversation's own tokens say.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import trio
import trio.testing
from onecopy.actors.messages.bank import BankStatistics
from onecopy.actors.messages.lane import LaneStatistics
from onecopy.actors.service import Options
from onecopy.actors.system import System
from onecopy.runtime.decode import Pick, Prices, Want
from onecopy.runtime.models.loaded import Loaded
from onecopy.runtime.rows.caches import Strip
from onecopy.runtime.rows.ops import Allocate, Drop, RowOp
from onecopy.runtime.seams.clock import VirtualClock
from onecopy.runtime.seams.device import InlineDevice
from onecopy.runtime.seams.rng import SeededRng
from onecopy.runtime.turn import Finished, Piece, ReplyFormat, Sampling, TurnSpec

from tests.sim.disk import SimDisk
from tests.support.books import SMALL, TokenPool
from tests.support.tokens import CHATML, byte_tokenizer

VOCAB = 256
BLOCK_BYTES = 4096
"""Bytes of a block of the scripted model's rows."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What one round picked."""

    picks: tuple[tuple[Pick, ...], ...]
    drafts: tuple[tuple[int, ...], ...] = ()
    compiled: bool = False


def next_token(rows: Sequence[int | None]) -> int:
    """The token that follows these rows: a digest of every one of them."""
    return crc32(repr(list(rows)).encode()) % VOCAB


def expected(prompt: Sequence[int], n: int) -> list[int]:
    """The first `n` tokens of the reply to a prompt."""
    rows = list(prompt)
    for _ in range(n):
        rows.append(next_token(rows))
    return rows[len(prompt) :]


class FailingPool(TokenPool):
    """fail: raised once, instead of making the next buffers. Dropping what was never made is no error."""

    fail: Exception | None = None

    def apply(self, orders: tuple[RowOp, ...]) -> None:
        if self.fail is not None and any(isinstance(op, Allocate) for op in orders):
            error, self.fail = self.fail, None
            raise error
        super().apply(tuple(op for op in orders if not isinstance(op, Drop) or op.segment in self.rows))


class ScriptedRounds:
    """An engine over a `TokenPool`. fail: raised by the next rounds while set. ran: (position, rows) of every strip."""

    def __init__(self) -> None:
        self.layout = SMALL
        self.pool = FailingPool()
        self.exactness: tuple[str, tuple[str, ...]] = ("exact", ())
        self.fixed_rows = 0
        self.eager: str | None = "scripted rounds are no graphs"
        self.fidelity = None
        self.fail: Exception | None = None
        self.ran: list[tuple[int, int]] = []

    def run(self, strips: Sequence[Strip], wants: Sequence[Want]) -> Ran:
        if self.fail is not None:
            raise self.fail
        assert sum(s.wanted for s in strips) == len(wants)
        return Ran(tuple(self._strip(s) for s in strips), compiled=self.fixed_rows > 0 and len(strips) == 1)

    def _strip(self, strip: Strip) -> tuple[Pick, ...]:
        before = self.pool.read(strip.chain)
        assert None not in before
        assert len(before) == strip.position
        leaf, at = strip.chain.leaf, strip.position - self.pool.starts[strip.chain.leaf]
        assert strip.end <= strip.chain.capacity_end
        self.pool.rows[leaf][at : at + len(strip.tokens)] = strip.tokens
        self.ran.append((strip.position, len(strip.tokens)))
        rows = [*before, *strip.tokens]
        return tuple(Pick(next_token(rows[: len(rows) - i])) for i in reversed(range(strip.wanted)))


class StepDevice(InlineDevice):
    """Runs a round only when a test allows it, orders at once. waiting: a round is asked for and not yet allowed."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = 0
        self._open = False
        self._news = trio.Event()
        self.waiting = False

    def allow(self, rounds: int = 1) -> None:
        self._allowed += rounds
        self._news.set()

    def open(self) -> None:
        """From here on rounds run as they come."""
        self._open = True
        self._news.set()

    def close(self) -> None:
        """From here on rounds wait again."""
        self._open = False

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        self.waiting = True
        while not self._allowed and not self._open:
            self._news = trio.Event()
            await self._news.wait()
        self._allowed -= not self._open
        self.waiting = False
        return await super().run(fn, *args)


@dataclass(slots=True)
class Stage:
    """A running system over scripted rounds."""

    system: System
    engine: ScriptedRounds
    device: StepDevice
    clients: trio.Nursery

    def follow(self, *specs: TurnSpec, reads: bool = True) -> list[Heard]:
        """Clients that ask side by side."""
        heard = [Heard(reads=reads) for _ in specs]
        for one, wanted in zip(heard, specs, strict=True):
            self.clients.start_soon(one.follow, self.system, wanted)
        return heard

    async def settle(self) -> None:
        """Returns when everything waits: for a round, a client or a message."""
        await trio.testing.wait_all_tasks_blocked()

    async def rounds(self, n: int) -> None:
        """Runs `n` rounds, one after the other."""
        for _ in range(n):
            await self.settle()
            assert self.device.waiting, "no round is asked for"
            self.device.allow()
        await self.settle()

    async def bank(self) -> dict[str, Any]:
        """The bank's numbers; the lane's have to wait for its round."""
        return dict(await self.system._supervisor.ref("bank").ask(BankStatistics()))

    async def lane(self) -> dict[str, Any]:
        return dict(await self.system._supervisor.ref("lane").ask(LaneStatistics()))

    async def reply(self, spec: TurnSpec) -> Heard:
        heard = Heard()
        await heard.follow(self.system, spec)
        return heard


@dataclass(slots=True)
class Heard:
    """What one client got: its pieces, or the error. A client that `reads` False takes nothing."""

    pieces: list[Piece] = field(default_factory=list)
    error: Exception | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    gate: trio.Event = field(default_factory=trio.Event)
    gone: trio.Event = field(default_factory=trio.Event)
    reads: bool = True

    async def follow(self, system: System, spec: TurnSpec) -> None:
        try:
            with self.scope:
                async with system.turn(spec) as pieces:
                    if not self.reads:
                        await self.gate.wait()
                    async for piece in pieces:
                        self.pieces.append(piece)
        except Exception as error:
            self.error = error
        finally:
            self.gone.set()

    def leave(self) -> None:
        self.scope.cancel()

    @property
    def tokens(self) -> list[int]:
        return [t for piece in self.pieces for t in getattr(piece, "tokens", ())]

    @property
    def end(self) -> Finished:
        if self.error is not None:
            raise self.error
        assert isinstance(self.pieces[-1], Finished)
        return self.pieces[-1]

    def of(self, kind: type) -> list[Any]:
        return [piece for piece in self.pieces if type(piece) is kind]


def spec(prompt: Sequence[int], n: int = 8, *, stop: Sequence[str] = (), **more: Any) -> TurnSpec:
    """A greedy turn of `n` tokens."""
    made = ReplyFormat(stop=tuple(stop))
    return TurnSpec(tuple(prompt), n, Sampling(seed=1, temperature=0), format=made, ignore_eos=True, **more)


@asynccontextmanager
async def staged(
    *,
    blocks: int = 64,
    stepped: bool = False,
    context: int = 1 << 16,
    eos: frozenset[int] = frozenset(),
    fixed_rows: int = 0,
    **options: Any,
) -> AsyncIterator[Stage]:
    """A system over scripted rounds around the block. blocks: the budget. stepped: rounds wait for `Stage.rounds`.

    fixed_rows: turns want their leaves in multiples of these, as for a compiled verify; nobody drafts, at these prices.
    """
    tokenizer = byte_tokenizer()
    loaded = Loaded(
        "tiny", None, {"vocab_size": tokenizer.vocab_size}, tokenizer, CHATML, eos,
        "0", "hf", None, "float32", context, Path("tiny"),
    )  # fmt: skip
    engine, device = ScriptedRounds(), StepDevice()
    engine.fixed_rows = fixed_rows
    if not stepped:
        device.open()
    made = Options(context=context, **options)
    parts: tuple[Any, ...] = (made, loaded, engine, device, VirtualClock(), SeededRng(1))
    system = System(*parts, blocks * BLOCK_BYTES, SimDisk(), Prices((1.0, 99.0) if fixed_rows else ()))
    async with system._supervisor, trio.open_nursery() as clients:
        try:
            yield Stage(system, engine, device, clients)
        finally:
            device.open()
