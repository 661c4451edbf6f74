"""One-shot replies: one answer, one waiter, and no doubt about who got it."""

from __future__ import annotations

import pytest
import trio
from onecopy.runtime.core import Reply
from onecopy.runtime.errors import Conflict
from trio.testing import MockClock, wait_all_tasks_blocked


async def test_an_answer_set_before_or_after_the_wait_is_received() -> None:
    early, late = Reply[int](), Reply[int]()
    assert early.set(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_expect, late, 2)
        await wait_all_tasks_blocked()
        assert late.set(2)
    assert await early.wait() == 1


async def test_only_the_first_settlement_counts() -> None:
    reply = Reply[int]()
    assert reply.set(1)
    assert not reply.set(2)
    assert not reply.fail(Conflict("late"))
    assert await reply.wait() == 1


async def test_a_failure_is_raised_where_the_answer_is_awaited() -> None:
    reply = Reply[int]()
    reply.fail(Conflict("busy"))
    with pytest.raises(Conflict, match="busy"):
        await reply.wait()


async def test_an_error_can_be_an_answer() -> None:
    reply, value = Reply[Exception](), Conflict("as a value")
    reply.set(value)
    assert await reply.wait() is value


async def test_a_cancelled_asker_abandons_and_a_later_answer_is_refused() -> None:
    reply = Reply[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reply.wait)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        assert reply.abandoned
        assert not reply.set(1)


async def test_an_accepted_answer_reaches_an_asker_that_is_cancelled_right_after() -> None:
    reply, got = Reply[int](), list[int]()

    async def asker() -> None:
        got.append(await reply.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(asker)
        await wait_all_tasks_blocked()
        assert reply.set(7)
        nursery.cancel_scope.cancel()
    assert got == [7]
    assert not reply.abandoned


async def test_an_answer_that_is_there_already_is_received_under_cancellation() -> None:
    reply, got = Reply[int](), list[int]()
    reply.set(7)
    with trio.CancelScope() as scope:
        scope.cancel()
        got.append(await reply.wait())
    assert got == [7]


async def test_waiting_under_cancellation_abandons_an_open_reply() -> None:
    reply = Reply[int]()
    with trio.CancelScope() as scope:
        scope.cancel()
        await reply.wait()
    assert scope.cancelled_caught
    assert reply.abandoned


async def test_a_second_waiter_is_refused() -> None:
    reply = Reply[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_expect, reply, 3)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await reply.wait()
        assert not reply.abandoned
        reply.set(3)


async def test_a_ledger_holds_a_reply_exactly_until_it_is_settled(autojump_clock: MockClock) -> None:
    ledger: dict[Reply[int], None] = {}
    replies = [Reply[int]() for _ in range(3)]
    for reply in replies:
        reply.owed(ledger)
    assert list(ledger) == replies
    replies[1].set(1)
    replies[0].fail(Conflict("no"))
    assert list(ledger) == [replies[2]]
    with trio.move_on_after(0):
        await replies[2].wait()
    assert not ledger


def test_a_deadline_expires_at_its_instant() -> None:
    assert not Reply[int](10.0).expired(9.9)
    assert Reply[int](10.0).expired(10.0)
    assert not Reply[int]().expired(1e18)


async def _expect(reply: Reply[int], value: int) -> None:
    assert await reply.wait() == value
