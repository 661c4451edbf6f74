"""Actors: handlers, answers, skipped work, crashes, teardown."""

from __future__ import annotations

import pytest
import trio
from onecopy.runtime.core import Reply, handles
from onecopy.runtime.errors import ActorStopped, Conflict, DeadlineExceeded, OnecopyError, Overloaded
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.actors import (
    Clerk,
    Crash,
    CrashTold,
    Echo,
    Later,
    Never,
    Note,
    Refuse,
    Slow,
    Unknown,
    Urgent,
    begin,
    collect,
    living,
    outcome,
)


async def test_tells_and_asks_reach_sync_and_async_handlers_in_order(autojump_clock: MockClock) -> None:
    async with living(Clerk()) as clerk:
        clerk.ref.tell(Note("1"))
        assert await clerk.ref.ask(Slow("2", 1)) == "2"
        assert await clerk.ref.ask(Echo("3")) == "3"
    assert clerk.log == ["clerk starts", "1", "2", "3", "clerk stops"]


async def test_control_overtakes_work_that_is_queued_and_work_that_is_in_hand(autojump_clock: MockClock) -> None:
    async with living(Clerk()) as clerk, trio.open_nursery() as nursery:
        await begin(nursery, *(clerk.ref.ask(Slow(text, 1)) for text in ("1", "2", "3")))
        await trio.sleep(1.5)
        clerk.ref.tell(Urgent("now"))
    assert clerk.log[1:-1] == ["1", "2", "now", "3"]


async def test_a_reply_put_aside_is_answered_after_its_batch(autojump_clock: MockClock) -> None:
    async with living(Clerk()) as clerk:
        got = list[object]()
        async with trio.open_nursery() as nursery:
            await begin(nursery, clerk.ref.ask(Slow("busy", 1)))
            for _ in range(3):
                nursery.start_soon(collect, got, clerk.ref.ask(Later()))
    assert got == [3, 3, 3]


async def test_a_validation_error_is_an_answer_and_the_actor_lives_on() -> None:
    async with living(Clerk()) as clerk:
        with pytest.raises(Conflict, match="not now"):
            await clerk.ref.ask(Refuse())
        assert await clerk.ref.ask(Echo("still here")) == "still here"
        assert clerk.statistics()["failed"] == 1


async def test_a_bug_fails_its_ask_and_all_others_and_crashes_the_actor(autojump_clock: MockClock) -> None:
    clerk, got = Clerk(), list[object]()
    async with living(clerk), trio.open_nursery() as nursery:
        asks = clerk.ref.ask(Slow("busy", 1)), clerk.ref.ask(Never()), clerk.ref.ask(Crash()), clerk.ref.ask(Echo("e"))
        await begin(nursery, *asks, into=got)
    assert [type(error) for error in got[1:]] == [ActorStopped] * 3
    assert all("crashed" in str(error) for error in got[1:])
    assert not clerk.ref.alive


@pytest.mark.parametrize("message", [CrashTold(), CrashTold(conflict=True)])
async def test_an_error_while_handling_a_tell_crashes_whatever_it_is(message: CrashTold) -> None:
    async with living(Clerk()) as clerk:
        clerk.ref.tell(message)
        clerk.ref.tell(Note("behind it"))
        await wait_all_tasks_blocked()
        assert not clerk.ref.alive
    assert clerk.ref.dead == {"crashed": 2}
    assert "clerk stops" not in clerk.log


async def test_live_raises_what_crashed_it() -> None:
    clerk = Clerk()
    clerk.ref.tell(CrashTold())
    with pytest.raises(ZeroDivisionError):
        await clerk.live()


async def test_an_orderly_stop_finishes_the_batch_in_hand_and_fails_what_is_queued(autojump_clock: MockClock) -> None:
    got = list[object]()
    async with living(Clerk()) as clerk, trio.open_nursery() as nursery:
        await begin(nursery, *(clerk.ref.ask(Slow(text, 1)) for text in ("0", "1", "2")), into=got)
        await trio.sleep(1.5)
        nursery.start_soon(collect, got, clerk.ref.ask(Echo("queued")))
        clerk.ref.tell(Note("queued too"))
        await wait_all_tasks_blocked()
        clerk.stop()
    assert got[:3] == ["0", "1", "2"]
    assert isinstance(got[3], ActorStopped)
    assert clerk.log[-1] == "clerk stops"
    assert clerk.ref.dead == {"stopped": 2}


async def test_a_kill_interrupts_the_message_in_hand_and_fails_it(autojump_clock: MockClock) -> None:
    got = list[object]()
    async with living(Clerk()) as clerk, trio.open_nursery() as nursery:
        nursery.start_soon(collect, got, clerk.ref.ask(Slow("never", 1e9)))
        await trio.sleep(1)
        clerk.kill()
    assert isinstance(got[0], ActorStopped)
    assert clerk.log == ["clerk starts", "clerk stops"]


async def test_stopping_may_settle_what_is_owed() -> None:
    class Polite(Clerk):
        async def stopping(self) -> None:
            for reply in self.kept:
                reply.set(0)

    got = list[object]()
    async with living(Polite()) as clerk, trio.open_nursery() as nursery:
        nursery.start_soon(collect, got, clerk.ref.ask(Never()))
        await wait_all_tasks_blocked()
        clerk.stop()
    assert got == [0]


async def test_cancelling_an_actor_from_outside_leaves_no_asker_waiting(autojump_clock: MockClock) -> None:
    clerk, got = Clerk(), list[object]()
    async with trio.open_nursery() as askers, trio.open_nursery() as nursery:
        nursery.start_soon(clerk.live)
        asks = clerk.ref.ask(Never()), clerk.ref.ask(Slow("in hand", 1e9)), clerk.ref.ask(Echo("queued"))
        await begin(askers, *asks, into=got)
        nursery.cancel_scope.cancel()
    assert [type(error) for error in got] == [ActorStopped] * 3


async def test_an_ask_past_its_deadline_is_refused_without_a_message(autojump_clock: MockClock) -> None:
    async with living(Clerk()) as clerk:
        with pytest.raises(DeadlineExceeded):
            await clerk.ref.ask(Echo("late"), deadline=trio.current_time())
        assert clerk.statistics()["accepted"] == 0


async def test_an_ask_raises_at_its_deadline(autojump_clock: MockClock) -> None:
    async with living(Clerk()) as clerk:
        start = trio.current_time()
        with pytest.raises(DeadlineExceeded, match="Never"):
            await clerk.ref.ask(Never(), deadline=start + 3)
        assert trio.current_time() - start == 3


async def test_an_answer_before_the_deadline_is_the_answer(autojump_clock: MockClock) -> None:
    async with living(Clerk()) as clerk:
        assert await clerk.ref.ask(Slow("ok", 2), deadline=trio.current_time() + 3) == "ok"


async def test_work_whose_asker_left_is_skipped(autojump_clock: MockClock) -> None:
    async with living(Clerk()) as clerk, trio.open_nursery() as nursery:
        nursery.start_soon(clerk.ref.ask, Slow("busy", 5))
        await wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await clerk.ref.ask(Echo("left"))
        with pytest.raises(DeadlineExceeded):
            await clerk.ref.ask(Echo("expired"), deadline=trio.current_time() + 1)
        await clerk.ref.ask(Echo("last"))
        assert clerk.statistics()["skipped"] == 2
    assert clerk.log[1:-1] == ["busy", "last"]


async def test_work_reached_exactly_at_its_deadline_is_skipped(autojump_clock: MockClock) -> None:
    got = list[object]()
    async with living(Clerk()) as clerk, trio.open_nursery() as nursery:
        nursery.start_soon(clerk.ref.ask, Slow("busy", 5))
        await wait_all_tasks_blocked()
        nursery.start_soon(collect, got, clerk.ref.ask(Echo("late"), trio.current_time() + 5))
    assert isinstance(got[0], DeadlineExceeded)
    assert "late" not in clerk.log


async def test_a_message_nobody_handles_is_a_dead_letter_and_an_ask_learns_it() -> None:
    async with living(Clerk()) as clerk:
        with pytest.raises(OnecopyError, match="no handler for Unknown"):
            await clerk.ref.ask(Unknown())
        assert clerk.ref.dead == {"unhandled": 1}
        assert await clerk.ref.ask(Echo("alive")) == "alive"


async def test_a_full_actor_refuses_tells_and_asks_at_once() -> None:
    clerk = Clerk(work_size=1)
    clerk.ref.tell(Note("1"))
    with pytest.raises(Overloaded):
        clerk.ref.tell(Note("2"))
    with pytest.raises(Overloaded):
        await clerk.ref.ask(Echo("3"))


async def test_telling_a_stopped_actor_is_a_dead_letter_and_asking_it_an_error() -> None:
    async with living(Clerk()) as clerk:
        pass
    assert clerk.ref.tell(Note("late")) is False
    with pytest.raises(ActorStopped):
        await clerk.ref.ask(Echo("late"))
    assert clerk.ref.dead == {"down": 1}


async def test_a_subclass_inherits_handlers_and_may_replace_one() -> None:
    class Loud(Clerk):
        def echo(self, message: Echo, reply: Reply[str]) -> None:
            reply.set(message.text.upper())

        @handles(Unknown)
        def known(self, message: Unknown, reply: Reply[int]) -> None:
            reply.set(42)

    async with living(Loud()) as loud:
        assert await loud.ref.ask(Echo("hi")) == "HI"
        assert await loud.ref.ask(Unknown()) == 42
        assert await loud.ref.ask(Later()) == 1
    async with living(Clerk()) as clerk:
        assert isinstance(await outcome(clerk.ref.ask(Unknown())), OnecopyError)


class Looper(Clerk):
    """An actor with a loop and a nursery of its own, as the lane has."""

    turns = 0

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            while True:
                for envelope in self.mailbox.receive_nowait():
                    await self.dispatch(envelope)
                await trio.sleep(1)
                self.turns += 1


async def test_an_actor_may_have_its_own_loop_and_is_stopped_like_any_other(autojump_clock: MockClock) -> None:
    async with living(Looper()) as looper:
        assert await looper.ref.ask(Echo("hi")) == "hi"
        await trio.sleep(3)
        looper.stop()
        left = await outcome(looper.ref.ask(Echo("late")))
    assert isinstance(left, ActorStopped)
    assert looper.turns >= 3
    assert looper.log == ["clerk starts", "hi", "clerk stops"]


async def test_statistics_tell_what_happened_to_every_message() -> None:
    async with living(Clerk()) as clerk:
        clerk.ref.tell(Note("1"))
        await clerk.ref.ask(Echo("2"))
        await outcome(clerk.ref.ask(Refuse()))
        await outcome(clerk.ref.ask(Unknown()))
        found = clerk.statistics()
    assert (found["handled"], found["failed"], found["skipped"], found["dead"]) == (3, 1, 0, 1)
    assert found["accepted"] == 4
