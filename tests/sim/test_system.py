"""The whole system under seeds: the same seed is the same run, and no run breaks a promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim import found
from tests.sim.run import run_scenario, run_seed
from tests.sim.scenario import scenario, small, stored
from tests.sim.shrink import shrink

SEEDS, STORED, BATCH = 1500, 500, 100


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_no_seed_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + BATCH):
        report = run_seed(seed)
        assert not report.broken, f"seed {seed}, trace {report.trace}: {report.broken}"


@pytest.mark.parametrize("first", range(0, STORED, BATCH))
def test_no_seed_with_a_disk_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + BATCH):
        report = run_scenario(stored(seed))
        assert not report.broken, f"seed {seed} with a disk, trace {report.trace}: {report.broken}"


@pytest.mark.parametrize("first", [150, 450])
def test_no_seed_of_a_recurrent_model_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + BATCH // 2):
        for drawn in (scenario(seed), stored(seed)):
            report = run_scenario(replace(drawn, layout="recurrent"))
            assert not report.broken, f"recurrent seed {seed}, trace {report.trace}: {report.broken}"


@pytest.mark.parametrize("name", ["OVER_THE_EDGE", "NARROW", "CRASH_WHILE_RESTORING", "NO_BUFFER", "STATES_LEFT"])
def test_a_scenario_that_was_found_stays_right(name: str) -> None:
    assert run_scenario(getattr(found, name)).broken == []


def test_a_client_may_leave_at_any_moment_while_others_go_on() -> None:
    for tick in range(80):
        assert run_scenario(found.leaves_at(tick)).broken == []


def test_a_client_may_leave_at_any_moment_of_a_restore() -> None:
    for step in range(20):
        assert run_scenario(found.leaves_while_restoring(0.02 * step)).broken == []


def test_the_bank_may_crash_after_any_message_of_a_recurrent_conversation() -> None:
    for message in range(1, 40):
        assert run_scenario(found.bank_crashes_at(message)).broken == []


def test_a_hold_and_a_resize_in_one_batch_of_messages_are_both_right_in_either_order() -> None:
    said = set()
    for seed in range(30):
        report = run_scenario(found.held_meanwhile(seed))
        assert report.broken == []
        said |= {word for event in report.events for word in _words(event)}
    assert {"resized", "executed eager", "eager"} <= said


def test_one_seed_is_one_trace() -> None:
    for chosen in (scenario(1), scenario(3), stored(2), stored(5)):
        first, again = run_scenario(chosen), run_scenario(chosen)
        assert first.events
        assert first.trace == again.trace


def test_another_schedule_is_another_trace() -> None:
    assert len({run_seed(seed).trace for seed in range(20)}) == 20


def test_scenarios_reach_what_the_grammar_offers() -> None:
    """A grammar that never draws a fork proves nothing about forks."""
    drawn = [scenario(seed) for seed in range(SEEDS)]
    for kind in ("Say", "Branch", "Rest", "Care"):
        assert sum(any(type(s).__name__ == kind for c in d.clients for s in c.program) for d in drawn) > SEEDS / 20
    for fault in ("fail_run", "fail_after", "crashes", "jumps"):
        assert sum(bool(getattr(d, fault)) for d in drawn) > SEEDS / 50
    assert sum(d.term is not None for d in drawn) > SEEDS / 50
    assert sum(d.mailbox < 64 for d in drawn) > SEEDS / 50


def test_runs_reach_every_way_of_admission_and_every_end() -> None:
    said = {word for seed in range(300) for event in run_seed(seed).events for word in _words(event)}
    ways = {"fresh", "adopted", "extended", "forked", "resized", "copied", "eager", "short"}
    assert ways <= said
    assert {"Finished", "LaneCrashed", "ActorStopped"} <= said


def _words(event: tuple[object, ...]) -> list[object]:
    return [w for part in event for w in (part if isinstance(part, tuple) else (part,)) if isinstance(w, str)]


def test_a_small_scenario_is_a_part_of_its_seed() -> None:
    assert len(small(5).clients) <= 2
    assert run_scenario(small(5)).broken == []


def test_a_failure_shrinks_to_fewer_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    from onecopy.runtime.rows.segments import Lease

    right = Lease.chain
    monkeypatch.setattr(Lease, "chain", lambda self, position: right(self, max(0, position - 1)))
    chosen = next(s for s in map(scenario, range(50)) if len(s.clients) > 1 and run_scenario(s).broken)
    least, report = shrink(chosen, tries=40)
    assert report.broken
    assert len(least.clients) < len(chosen.clients)
