"""Makes a failing scenario smaller: fewer clients, steps and faults, as long as it still breaks the same promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.run import Report, run_scenario
from tests.sim.scenario import Branch, Client, Scenario, Step

TRIES = 300
PLAIN = {"term": None, "drafts": 0, "mailbox": 4096, "slow": 0.0, "fixed": 0, "blocks": 1000}
"""What a scenario has without its faults and narrownesses."""


def shrink(chosen: Scenario, tries: int = TRIES) -> tuple[Scenario, Report]:
    """The smallest scenario found in `tries` runs, and its report."""
    best, report = chosen, run_scenario(chosen)
    kind = _kind(report)
    progress = True
    while progress and tries > 0:
        progress = False
        for smaller in _smaller(best):
            tries -= 1
            found = run_scenario(smaller)
            if found.broken and _kind(found) == kind:
                best, report, progress = smaller, found, True
                break
            if tries <= 0:
                break
    return best, report


def _kind(report: Report) -> str:
    """The first broken promise, without its numbers and names."""
    return "".join(c for c in report.broken[0] if not c.isdigit()).split(":")[-1] if report.broken else ""


def _smaller(s: Scenario) -> Iterator[Scenario]:
    for i in range(len(s.clients)):
        if len(s.clients) > 1:
            yield replace(s, clients=s.clients[:i] + s.clients[i + 1 :])
    for name in ("fail_run", "fail_after", "fail_orders", "crashes", "jumps"):
        if getattr(s, name):
            yield replace(s, **{name: ()})
    for name, plain in PLAIN.items():
        if getattr(s, name) != plain:
            yield replace(s, **{name: plain})
    if s.store is not None:
        lives = s.store.lives
        for n in range(1, len(lives)):
            yield replace(s, store=replace(s.store, lives=lives[:n]))
        calm = tuple(replace(life, eio=0.0, enospc=0.0, short=0.0, rate=None, term=None) for life in lives)
        if calm != lives:
            yield replace(s, store=replace(s.store, lives=calm))
    for i, client in enumerate(s.clients):
        for program in _shorter(client.program):
            yield replace(s, clients=(*s.clients[:i], replace(client, program=program), *s.clients[i + 1 :]))
        yield from (replace(s, clients=(*s.clients[:i], c, *s.clients[i + 1 :])) for c in _plainer(client))


def _shorter(program: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    for i, step in enumerate(program):
        yield program[:i] + program[i + 1 :]
        if isinstance(step, Branch):
            for j in range(len(step.programs)):
                yield (*program[:i], Branch(step.programs[:j] + step.programs[j + 1 :]), *program[i + 1 :])
            for j, inner in enumerate(step.programs):
                for less in _shorter(inner):
                    programs = (*step.programs[:j], less, *step.programs[j + 1 :])
                    yield (*program[:i], Branch(programs), *program[i + 1 :])


def _plainer(client: Client) -> Iterator[Client]:
    if client.begins:
        yield replace(client, begins=0.0)
    if client.salt:
        yield replace(client, salt=b"")
    if client.base[1]:
        yield replace(client, base=(client.base[0], 0))
