"""Two bounded queues: control first, full refuses at once, closing fails what is owed."""

from __future__ import annotations

import pytest
import trio
from onecopy.runtime.core import Envelope, Mailbox, Message, Reply
from onecopy.runtime.errors import ActorStopped, Overloaded
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.actors import Echo, Note, Urgent


def put(mailbox: Mailbox, *messages: Message) -> None:
    for message in messages:
        mailbox.put(Envelope(message))


def ask(mailbox: Mailbox) -> Reply[str]:
    reply = Reply[str]()
    mailbox.put(Envelope(Echo("?"), reply))
    return reply


def texts(batch: list[Envelope]) -> list[str]:
    return [envelope.message.text for envelope in batch]  # type: ignore[attr-defined]


async def test_a_batch_has_everything_queued_in_order_with_control_first() -> None:
    mailbox = Mailbox("m")
    put(mailbox, Note("1"), Urgent("a"), Note("2"), Urgent("b"))
    assert texts(await mailbox.receive()) == ["a", "b", "1", "2"]
    assert mailbox.depth == 0


async def test_a_limit_leaves_the_rest_queued() -> None:
    mailbox = Mailbox("m")
    put(mailbox, Note("1"), Note("2"), Urgent("a"))
    assert texts(await mailbox.receive(2)) == ["a", "1"]
    assert texts(mailbox.receive_nowait(5)) == ["2"]
    assert mailbox.receive_nowait() == []


async def test_receive_waits_for_the_first_message() -> None:
    mailbox, got = Mailbox("m"), list[str]()

    async def receiver() -> None:
        got.extend(texts(await mailbox.receive()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receiver)
        await wait_all_tasks_blocked()
        put(mailbox, Note("1"), Note("2"))
    assert got == ["1", "2"]


def test_a_full_mailbox_refuses_at_once_and_says_so() -> None:
    mailbox = Mailbox("bank", work_size=2)
    put(mailbox, Note("1"), Note("2"))
    with pytest.raises(Overloaded, match="bank") as caught:
        put(mailbox, Note("3"))
    assert caught.value.retry_after
    assert mailbox.statistics()["refused"] == 1
    assert mailbox.depth == 2


def test_a_full_work_queue_takes_control_and_the_other_way_round() -> None:
    mailbox = Mailbox("m", work_size=1, control_size=1)
    put(mailbox, Note("1"), Urgent("a"))
    for message in (Note("2"), Urgent("b")):
        with pytest.raises(Overloaded):
            put(mailbox, message)
    assert texts(mailbox.receive_nowait()) == ["a", "1"]


async def test_a_receive_that_is_cancelled_loses_nothing(autojump_clock: MockClock) -> None:
    mailbox = Mailbox("m")
    with trio.move_on_after(1):
        await mailbox.receive()
    put(mailbox, Note("1"))
    with trio.CancelScope() as scope:
        scope.cancel()
        await mailbox.receive()
    assert scope.cancelled_caught
    assert texts(await mailbox.receive()) == ["1"]


async def test_a_message_put_in_the_same_instant_as_a_cancellation_stays() -> None:
    mailbox = Mailbox("m")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.receive)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        put(mailbox, Note("1"))
    assert texts(mailbox.receive_nowait()) == ["1"]


async def test_two_receivers_are_a_mistake() -> None:
    mailbox = Mailbox("m")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.receive)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await mailbox.receive()
        put(mailbox, Note("1"))


async def test_receiving_is_always_a_checkpoint() -> None:
    mailbox = Mailbox("m")
    put(mailbox, Note("1"))
    with trio.testing.assert_checkpoints():
        await mailbox.receive()


def test_closing_fails_what_is_queued_what_was_taken_and_nothing_settled() -> None:
    mailbox = Mailbox("m")
    taken, settled = ask(mailbox), ask(mailbox)
    mailbox.receive_nowait()
    queued = ask(mailbox)
    settled.set("done")
    mailbox.close(lambda: ActorStopped("gone"))
    assert [reply.done for reply in (taken, settled, queued)] == [True, True, True]
    assert not settled.abandoned
    assert mailbox.statistics()["owed"] == 0


async def test_each_failed_ask_gets_an_error_of_its_own() -> None:
    mailbox = Mailbox("m")
    replies = [ask(mailbox), ask(mailbox)]
    mailbox.close(lambda: ActorStopped("gone"))
    errors = []
    for reply in replies:
        with pytest.raises(ActorStopped) as caught:
            await reply.wait()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_what_is_queued_at_the_close_is_counted_dead_except_asks_nobody_waits_for() -> None:
    mailbox = Mailbox("m")
    put(mailbox, Note("1"), Urgent("a"))
    ask(mailbox)
    ask(mailbox).set("answered early")
    mailbox.close(lambda: ActorStopped("gone"))
    assert mailbox.dead == {"stopped": 3}
    assert mailbox.depth == 0


def test_a_closed_mailbox_takes_nothing() -> None:
    mailbox = Mailbox("m")
    mailbox.close(lambda: ActorStopped("gone"))
    with pytest.raises(ActorStopped):
        put(mailbox, Note("1"))


async def test_a_stop_takes_nothing_more_and_ends_the_receiver_where_it_next_receives() -> None:
    mailbox = Mailbox("m")
    put(mailbox, Note("1"))
    with trio.CancelScope() as scope:
        mailbox.stop(scope.cancel)
        assert not scope.cancel_called
        with pytest.raises(ActorStopped):
            put(mailbox, Note("2"))
        assert mailbox.receive_nowait() == []
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert mailbox.depth == 1


def test_statistics_count_depths_and_flow() -> None:
    mailbox = Mailbox("m")
    put(mailbox, Note("1"), Note("2"), Urgent("a"))
    ask(mailbox)
    mailbox.receive_nowait(2)
    assert mailbox.statistics() == {"control": 0, "work": 2, "owed": 1, "accepted": 4, "refused": 0}


class Returned(Note):
    due = True


def test_a_full_mailbox_takes_what_is_due() -> None:
    mailbox = Mailbox("clerk", work_size=1)
    mailbox.put(Envelope(Note("work")))
    with pytest.raises(Overloaded):
        mailbox.put(Envelope(Note("more work")))
    mailbox.put(Envelope(Returned("what was lent")))
    assert mailbox.depth == 2
