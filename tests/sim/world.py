"""One simulated run: the real system on a simulated engine, device and clock, its clients, and what they saw."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import trio
from onecopy.actors import running
from onecopy.actors.bank import Bank
from onecopy.actors.lane import Lane
from onecopy.actors.service import Options
from onecopy.actors.system import System
from onecopy.runtime.core import Actor, Child
from onecopy.runtime.decode import Limits, Prices
from onecopy.runtime.errors import ActorStopped, StoreUnusable
from onecopy.runtime.seams.clock import VirtualClock
from onecopy.runtime.seams.disk import Disk
from onecopy.runtime.seams.rng import SeededRng
from onecopy.runtime.store import Record, fingerprint
from onecopy.runtime.turn import TurnSpec

from tests.sim import watch
from tests.sim.device import DeviceFault, DeviceFaults, SimDevice
from tests.sim.disk import PowerCut, SimDisk
from tests.sim.engine import SimEngine
from tests.sim.model import CONTEXT, EOS, STARTS, VOCAB, alone
from tests.sim.scenario import Life, Scenario

DAY = 1_700_000_000.0
STORE = "/store"


class SimCrash(Exception):
    """The bug that a scenario plants in an actor."""


@dataclass(slots=True)
class Kept:
    """What outlives a process. acked: records said to be durable, by key. histories: conversations with salts.

    weights: of the models that wrote here, by fingerprint.
    """

    disk: SimDisk
    weights: dict[bytes, int] = field(default_factory=dict)
    acked: dict[bytes, Record] = field(default_factory=dict)
    histories: list[tuple[bytes, tuple[int, ...]]] = field(default_factory=list)
    past: float = 0.0


class World:
    """What a run consists of. events: what happened, in order. broken: promises that were not kept, as sentences.

    life: the process this is, with the disk it finds. off: it is dead, and what its remains do counts no more.
    """

    def __init__(self, scenario: Scenario, life: Life | None = None, kept: Kept | None = None) -> None:
        self.scenario = scenario
        self.life = life or Life(scenario.clients)
        self.kept = kept or Kept(SimDisk())
        self.disk = self.kept.disk
        self.off = False
        self.lasted = 0.0
        self.past = tuple(self.kept.histories)
        self.end_now = trio.Event()
        self.events: list[tuple[Any, ...]] = []
        self.broken: list[str] = []
        self.crashed = 0
        rng = random.Random(scenario.seed ^ 0xD157)
        self.device = SimDevice(
            DeviceFaults(rng, scenario.slow, frozenset(scenario.fail_run), frozenset(scenario.fail_after))
        )
        # A block of one layer beside the budget is what a resize needs; the bank has to live with the budget alone.
        self.engine = SimEngine(scenario.layout, 0, self.violate, self.life.weights)
        self.engine.fixed_rows = scenario.fixed
        self.engine.pool.budget = self.budget = scenario.blocks * self.engine.layout.block_bytes
        self.engine.pool.fail_orders = frozenset(scenario.fail_orders)
        self.engine.pool.strict = scenario.store is None
        self.clock = VirtualClock(DAY + self.kept.past)
        options = Options(context=CONTEXT, parallel=scenario.parallel)
        if scenario.store is not None:
            options = replace(options, store=STORE, store_quota=scenario.store.quota)
        self.system = SimSystem(options, self)
        self.kept.weights[fingerprint(self.system._facts())] = self.life.weights

    def log(self, *what: Any) -> None:
        self.events.append((round(trio.current_time(), 6), *what))

    def violate(self, sentence: str) -> None:
        if self.off:
            return
        self.broken.append(sentence)
        self.events.append(("VIOLATION", sentence))


LOADED = SimpleNamespace(
    id="sim",
    eos=frozenset({EOS}),
    context=CONTEXT,
    tokenizer=None,
    template=None,
    config={"vocab_size": VOCAB},
    digest="0",
    dtype="hash",
    vocab_size=VOCAB,
    text=None,
)


def loaded(weights: int) -> Any:
    """The model with these weights."""
    return SimpleNamespace(**{**vars(LOADED), "digest": str(weights)})


class SimSystem(System):
    """The real system; its bank and lane are watched, and fail when the scenario says so."""

    def __init__(self, options: Options, world: World) -> None:
        self._world = world
        rng, drafting = SeededRng(world.scenario.seed), Prices((1.0,) * (world.scenario.drafts + 1))
        model = loaded(world.life.weights)
        args: Any = (model, world.engine, world.device, world.clock, rng, world.budget, world.disk, drafting)
        super().__init__(options, *args)
        self._supervisor._on_event = self._event
        for cell in self._supervisor._cells.values():
            cell._on_event = self._event

    def _starts(self, spec: TurnSpec) -> tuple[int, ...]:
        """Messages start at one token, as they do in chat templates."""
        return tuple(i for i, t in enumerate(spec.tokens) if i and t == STARTS) if self._engine.layout.recurrent else ()

    def _disk_children(self, options: Options, budget: int, disk: Disk) -> list[Child]:
        children = super()._disk_children(options, budget, disk)
        return [replace(child, factory=partial(self._watched, child.factory)) for child in children]

    def _watched(self, make: Callable[[], Actor]) -> Actor:
        actor = make()
        watch.watch_disk(self._world, actor)
        self._prepare(actor)
        return actor

    def _event(self, kind: str, name: str, detail: object) -> None:
        if kind == "crashed" and isinstance(leaf(detail), PowerCut):
            self._world.off = True
            self._world.end_now.set()
        elif kind == "crashed":
            self._world.log("crashed", name, repr(detail))
            if not expected(self._world, detail):
                where = traceback.extract_tb(leaf(detail).__traceback__)[-1]
                self._world.violate(
                    f"{name} crashed: {leaf(detail)!r} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
                )

    def _bank(self, budget: int) -> Bank:
        bank = super()._bank(budget)
        watch.watch_bank(self._world, bank)
        self._prepare(bank)
        return bank

    def _lane(self, limits: Limits) -> Lane:
        scenario = self._world.scenario
        limits = Limits(decode_share=limits.decode_share, batch=limits.batch, chunk=scenario.chunk)
        lane = super()._lane(limits)
        watch.watch_lane(self._world, lane)
        self._prepare(lane)
        return lane

    def _prepare(self, actor: Actor) -> None:
        self._world.log("up", actor.name)
        if self._world.scenario.mailbox < 64 and actor.name in ("bank", "lane"):
            actor.mailbox._sizes = {False: self._world.scenario.mailbox, True: self._world.scenario.mailbox}
        crashes = [c for c in self._world.scenario.crashes if c.actor == actor.name]
        if crashes:
            sabotage(self._world, actor, {c.at: c.after for c in crashes})


def leaf(error: Any) -> BaseException:
    """The first single error in a group."""
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def expected(world: World, error: Any) -> bool:
    """Whether the scenario has planted this crash, or what follows from one."""
    if isinstance(leaf(error), StoreUnusable) and world.scenario.store is not None:
        return bool(world.life.eio or world.life.enospc or world.scenario.store.capacity)
    if world.engine.pool.failed and isinstance(leaf(error), KeyError):
        return True  # a round over buffers that could not be made
    return isinstance(leaf(error), SimCrash | DeviceFault) or (
        isinstance(leaf(error), ActorStopped) and not world.scenario.calm
    )


def sabotage(world: World, actor: Actor, at: dict[int, bool]) -> None:
    """Makes `actor` crash at its messages with these numbers, before (False) or after (True) they are handled."""
    dispatch: Callable[[Any], Any] = actor.dispatch
    seen = 0

    async def crashing(envelope: Any) -> None:
        nonlocal seen
        seen += 1
        if at.get(seen) is False:
            world.crashed += 1
            raise SimCrash(f"{actor.name} before its message {seen}")
        await dispatch(envelope)
        if at.get(seen) is True:
            world.crashed += 1
            raise SimCrash(f"{actor.name} after its message {seen}")

    actor.dispatch = crashing  # type: ignore[method-assign]


class SimDrafter:
    """Knows how a greedy reply goes on, but makes a mistake now and then, and stops knowing at a wrong token."""

    def __init__(self, kind: str, width: int, weights: int, tokens: list[int]) -> None:
        self._kind, self._width, self._weights, self._tokens = kind, width, weights, list(tokens)
        self.stats = None

    def propose(self, limit: int) -> tuple[int, ...]:
        from onecopy.runtime.turn import Sampling

        n = min(limit, self._width)
        good = alone(self._kind, tuple(self._tokens), n, Sampling(0, 0.0), True, self._weights).tokens
        at = sum(self._tokens[-4:]) % (n + 3)
        return tuple((t + 1) % VOCAB if i == at else t for i, t in enumerate(good))

    def ahead(self, limit: int) -> int:
        return 0

    def offer(self, tokens: Any) -> None:
        raise AssertionError("nothing was asked of the device")

    def accept(self, tokens: Any) -> None:
        self._tokens += tokens

    def rewind(self, length: int) -> None:
        del self._tokens[length:]


def install_drafter(world: World) -> None:
    """Has every turn that may draft use the simulation's drafter, until the next call."""
    kind, drafts, weights = world.scenario.layout, world.scenario.drafts, world.life.weights
    running.drafter_for = lambda tokens, _: SimDrafter(kind, drafts, weights, list(tokens))
