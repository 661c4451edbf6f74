"""Runs one seed: a schedule drawn by the seed, virtual time, and a hash of all that happened."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.testing
from onecopy.runtime.errors import RestartIntensityExceeded
from trio._core import _run

from tests.sim import checks
from tests.sim.clients import run_client
from tests.sim.scenario import Scenario, scenario
from tests.sim.world import World, install_drafter

PATIENCE = 100_000.0
"""Virtual seconds after which a run that has not ended never will."""
REST = 4.0
"""Virtual seconds after the last client in which the bank cleans up."""


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


def run_scenario(
    chosen: Scenario, around: Callable[[World], AbstractContextManager[Any]] = lambda _: nullcontext()
) -> Report:
    """Runs a scenario on a schedule drawn by its seed."""
    logging.disable(logging.CRITICAL)
    install_drafter(chosen)
    world = World(chosen)
    previous = _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(chosen.seed)
    try:
        with around(world):
            trio.run(_live, world, clock=trio.testing.MockClock(autojump_threshold=0))
    except Exception as error:
        world.violate(f"the run ends in {error!r}")
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = previous  # type: ignore[misc]
        logging.disable(logging.NOTSET)
    return Report(chosen.seed, world.broken, world.events, world.engine.rows)


async def _live(world: World) -> None:
    try:
        with trio.fail_after(PATIENCE):
            await _system(world)
    except trio.TooSlowError:
        world.violate("somebody waits for ever")


async def _system(world: World) -> None:
    supervisor = world.system._supervisor
    try:
        async with supervisor:
            await _clients(world)
            if world.scenario.term is None:
                await trio.sleep(REST)
                checks.check_rest(world)
    except RestartIntensityExceeded:
        world.log("gave up")
        if world.crashed + len(world.scenario.fail_run) + len(world.scenario.fail_after) < 2:
            world.violate("the system gave up without two crashes")
    checks.check_mailboxes(world, supervisor.statistics(), ended=True)


async def _clients(world: World) -> None:
    async with trio.open_nursery() as nursery:
        for number, client in enumerate(world.scenario.clients):
            nursery.start_soon(run_client, world, number, client)
        for seconds in world.scenario.jumps:
            world.clock.jump(seconds)
        if world.scenario.term is not None:
            nursery.start_soon(_term, world.scenario.term, nursery.cancel_scope)


async def _term(ticks: int, scope: trio.CancelScope) -> None:
    for _ in range(ticks):
        await trio.lowlevel.checkpoint()
        if ticks % 7 == 0:
            await trio.sleep(0.001)
    scope.cancel()
