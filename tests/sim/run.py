"""Runs one seed: a schedule drawn by the seed, virtual time, and a hash of all that happened."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import trio
import trio.testing
from onecopy.runtime.errors import RestartIntensityExceeded, StoreUnusable
from onecopy.runtime.store.rows_on_disk import LOCK
from trio._core import _run

from tests.sim import checks
from tests.sim.clients import run_client
from tests.sim.disk import Faults, SimDisk
from tests.sim.scenario import Scenario, scenario
from tests.sim.world import STORE, Kept, World, install_drafter

PATIENCE = 20_000.0
"""Virtual seconds after which a run that has not ended never will."""
LIMIT = PATIENCE + 1000
"""When even the end of a run that was given up does not end."""
REST, RESTS = 4.0, 40
"""Virtual seconds after the last client in which the bank cleans up, and how often it may take as long again."""


@dataclass(slots=True)
class Report:
    """What came of a seed. trace: hash of the events; the same seed has the same trace, always."""

    seed: int
    broken: list[str] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    rows: int = 0

    @property
    def trace(self) -> str:
        return hashlib.blake2b(repr(self.events).encode(), digest_size=8).hexdigest()


def run_seed(seed: int, change: Callable[[Scenario], Scenario] = lambda s: s) -> Report:
    """Runs the scenario of a seed, changed by `change`."""
    return run_scenario(change(scenario(seed)))


def run_scenario(chosen: Scenario) -> Report:
    """Runs a scenario, life after life, on a schedule drawn by its seed."""
    logging.disable(logging.CRITICAL)
    previous = _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(chosen.seed)
    report = Report(chosen.seed)
    try:
        for world in _worlds(chosen):
            _run_world(world)
            report.broken += world.broken
            report.events += world.events
            report.rows += world.engine.rows
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = previous  # type: ignore[misc]
        logging.disable(logging.NOTSET)
    return report


def _worlds(chosen: Scenario) -> Iterator[World]:
    """The lives of a scenario; between two of them the machine is what the earlier one's end left."""
    if chosen.store is None:
        yield World(chosen)
        return
    rng = random.Random(chosen.seed ^ 0xD15C)
    kept = Kept(SimDisk(Faults(rng), capacity=chosen.store.capacity or 1 << 40))
    for number, life in enumerate(chosen.store.lives):
        world = World(chosen, life if number else replace(life, clients=chosen.clients), kept)
        _arm(world)
        yield world
        _end(world, rng)


def _arm(world: World) -> None:
    life, disk = world.life, world.disk
    disk.clock = world.clock.wall
    disk.rate = life.rate
    disk.faults.eio, disk.faults.enospc, disk.faults.short = life.eio, life.enospc, life.short
    if life.end != "stop":
        disk.faults.cut_after = disk.medium.calls + life.at
    if life.rival:
        rival = disk.beside(99)
        rival.mkdir(STORE)
        rival.lock(f"{STORE}/{LOCK}")


def _end(world: World, rng: random.Random) -> None:
    """The process is gone; after a cut the power comes back."""
    disk = world.disk
    disk.faults.cut_after = None
    if world.life.end == "cut" and world.off:
        disk.cut(rng)
    disk.medium.off = False
    disk.medium.locks.clear()
    disk.restart()
    world.kept.past += world.lasted


class Stuck(Exception):
    """Every task waits, and nothing will wake one."""


def _clock() -> trio.testing.MockClock:
    """Virtual time that jumps when every task waits, and ends a run that would wait for ever, however shielded."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    jump = clock._autojump

    def jump_or_end() -> None:
        if trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf or clock.current_time() > LIMIT:
            raise Stuck
        jump()

    clock._autojump = jump_or_end  # type: ignore[method-assign]
    return clock


def _run_world(world: World) -> None:
    install_drafter(world)
    try:
        trio.run(_live, world, clock=_clock())
    except trio.TrioInternalError as error:
        if not isinstance(error.__cause__, Stuck):
            raise
        world.violate("somebody waits for ever")
    except Exception as error:
        world.violate(f"the run ends in {error!r}")


async def _live(world: World) -> None:
    """Until everything is done, or the process dies."""
    try:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_die, world, nursery.cancel_scope)
                await _system(world)
                nursery.cancel_scope.cancel()
    except trio.TooSlowError:
        world.violate("somebody waits for ever")
    finally:
        world.lasted = trio.current_time()


async def _die(world: World, scope: trio.CancelScope) -> None:
    await world.end_now.wait()
    scope.cancel()


async def _system(world: World) -> None:
    async with trio.open_nursery() as outside:
        await _supervised(world, outside)


async def _supervised(world: World, outside: trio.Nursery) -> None:
    """The system's life. outside: where clients are that are still there when it ends."""
    supervisor = world.system._supervisor
    try:
        async with supervisor:
            checks.check_disk(world)
            if world.life.term is not None:
                outside.start_soon(_clients, world)
                await _ticks(world.life.term)
            else:
                await _clients(world)
                await _rested(world)
    except StoreUnusable as error:
        world.log("cannot start", error.message)
        if not (world.life.eio or world.life.enospc or world.scenario.store.capacity):
            world.violate(f"the system does not start: {error.message}")
        return
    except RestartIntensityExceeded:
        world.log("gave up")
        if (
            world.crashed
            + len(world.scenario.fail_run)
            + len(world.scenario.fail_after)
            + 2 * len(world.scenario.fail_orders)
            < 2
        ):
            world.violate("the system gave up without two crashes")
    checks.check_mailboxes(world, supervisor.statistics(), ended=True)


async def _rested(world: World) -> None:
    """What comes once all clients are done: rest and its checks, or the end at once."""
    if world.life.end != "stop":
        await trio.sleep(world.life.lingers)
        _go_off(world)
    elif world.scenario.term is None:
        await _rest(world)
        checks.check_rest(world)


def _go_off(world: World) -> None:
    """No orderly end: what is in memory now is all there was."""
    world.off = world.disk.medium.off = True


async def _rest(world: World) -> None:
    """Until the bank has cleaned up and no save is under way: a disk that fails is tried again for half a minute."""
    for _ in range(RESTS):
        await trio.sleep(REST)
        bank: Any = world.system._supervisor.actor("bank")
        if bank is None or not any(s.holds for s in bank._ledger.segments.values()):
            return


async def _clients(world: World) -> None:
    async with trio.open_nursery() as nursery:
        for number, client in enumerate(world.life.clients):
            nursery.start_soon(run_client, world, number, client)
        for seconds in world.scenario.jumps:
            world.clock.jump(seconds)
        if world.scenario.term is not None:
            nursery.start_soon(_term, world.scenario.term, nursery.cancel_scope)


async def _term(ticks: int, scope: trio.CancelScope) -> None:
    await _ticks(ticks)
    scope.cancel()


async def _ticks(n: int) -> None:
    for _ in range(n):
        await trio.lowlevel.checkpoint()
        if n % 7 == 0:
            await trio.sleep(0.001)
