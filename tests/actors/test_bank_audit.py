"""Audits of the bank's books while nobody uses them: what does not add up is logged once, counted, in `/health`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
from onecopy.actors import auditing
from onecopy.actors import bank as bank_module
from onecopy.runtime.rows.ledger import Ledger
from trio.testing import MockClock

from tests.support.rounds import Stage, spec, staged


def books(stage: Stage) -> Ledger:
    bank: Any = stage.system._supervisor.actor("bank")
    ledger: Ledger = bank._ledger
    return ledger


async def idle(stage: Stage) -> dict[str, Any]:
    """The bank's numbers after it had time to clean up twice."""
    await trio.sleep(3 * bank_module.IDLE_SLACK)
    return await stage.bank()


async def test_right_books_are_audited_once_for_each_change_and_found_right(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged() as stage:
        await stage.reply(spec([1] * 300, 4))
        first = await idle(stage)
        again = await idle(stage)
        assert first["audits"] == again["audits"] > 0
        assert (again["broken_laws"], again["broken"]) == (0, ())
        await stage.reply(spec([2] * 300, 4))
        assert (await idle(stage))["audits"] > again["audits"]
        assert (await stage.system.health()).status == "ok"
    assert not caplog.records


async def test_bytes_that_do_not_add_up_are_logged_once_counted_and_in_health(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged() as stage:
        await stage.reply(spec([1] * 300, 4))
        used = books(stage).used
        books(stage)._books.used += 4096
        numbers = await idle(stage)
        sentence = f"{used + 4096} bytes are accounted for, the segments have {used}"
        assert (numbers["broken_laws"], numbers["broken"]) == (1, (sentence,))
        health = await stage.system.health()
        assert (health.status, health.reasons) == ("degraded", (f"the bank's books are wrong: {sentence}",))
        await stage.reply(spec([1] * 300, 4))
        assert (await idle(stage))["broken_laws"] == 1
        assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == [
            f"the bank's books are wrong: {sentence}"
        ]
        books(stage)._books.used -= 4096
        await stage.reply(spec([1] * 300, 4))
        await idle(stage)
        assert (await stage.system.health()).status == "ok"


@pytest.mark.parametrize("plant", ["locks", "tokens", "fork"])
async def test_other_laws_are_seen_too(autojump_clock: MockClock, plant: str) -> None:
    async with staged() as stage:
        await stage.reply(spec([1] * 300, 4))
        await stage.reply(spec([*[1] * 299, 7, 8], 4))
        first = min(books(stage).segments.values(), key=lambda s: s.id)
        if plant == "locks":
            first.locks += 1
        elif plant == "tokens":
            del first.tokens[10:]
        else:
            first.forks[0] = 5
        assert (await idle(stage))["broken_laws"] >= 1


async def test_an_audit_that_turns_come_into_says_nothing_of_what_it_saw(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "STEP", 1)
    async with staged() as stage:
        for mark in range(8):
            await stage.reply(spec([mark] * 300, 4))
        for _ in range(20):  # a turn every time that an audit is due
            await stage.reply(spec([3] * 310, 2))
            await trio.sleep(bank_module.IDLE_SLACK / 2)
        assert (await stage.bank())["broken_laws"] == 0
        assert (await idle(stage))["audits"] > 0


async def test_audits_wait_for_running_turns(autojump_clock: MockClock) -> None:
    async with staged(stepped=True) as stage:
        before = (await stage.bank())["audits"]
        (heard,) = stage.follow(spec([1] * 300, 4))
        await trio.sleep(5 * bank_module.IDLE_SLACK)
        assert (await stage.bank())["audits"] == before
        stage.device.open()
        await heard.gone.wait()
        assert (await idle(stage))["audits"] == before + 1
