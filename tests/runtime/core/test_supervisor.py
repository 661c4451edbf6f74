"""Supervision: order, restarts, intensity, escalation, dynamic children, honest numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from onecopy.runtime.core import Actor, Child, Restart, Supervisor
from onecopy.runtime.errors import ActorStopped, DeadlineExceeded, RestartIntensityExceeded, StartupError, Unavailable
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.actors import Clerk, Crash, CrashTold, Echo, Never, Note, Slow, begin, outcome


def child(name: str, log: list[str], restart: Restart = "permanent", **options: float) -> Child:
    return Child(name, lambda: Clerk(name, log), restart, **options)  # type: ignore[arg-type]


def three(log: list[str]) -> list[Child]:
    return [child(name, log) for name in ("store", "bank", "lane")]


async def crash(supervisor: Supervisor, name: str) -> None:
    await outcome(supervisor.ref(name).ask(Crash()))
    await wait_all_tasks_blocked()


async def test_children_start_in_order_and_stop_in_reverse() -> None:
    log = list[str]()
    async with Supervisor(three(log)):
        log.append("body")
    assert log == ["store starts", "bank starts", "lane starts", "body", "lane stops", "bank stops", "store stops"]


async def test_refs_are_known_before_anything_runs_and_asks_fail_until_it_does() -> None:
    supervisor = Supervisor(three([]))
    ref = supervisor.ref("bank")
    assert isinstance(await outcome(ref.ask(Echo("early"))), ActorStopped)
    async with supervisor:
        assert await ref.ask(Echo("hi")) == "hi"
    assert isinstance(await outcome(ref.ask(Echo("late"))), ActorStopped)


async def test_a_child_may_ask_those_started_before_it_in_its_start_and_in_its_stop() -> None:
    supervisor: Supervisor

    class Customer(Clerk):
        async def start(self) -> None:
            self.log.append(await supervisor.ref("store").ask(Echo("hello")))

        async def stopping(self) -> None:
            self.log.append(await supervisor.ref("store").ask(Echo("goodbye")))

    log = list[str]()
    supervisor = Supervisor([child("store", []), Child("customer", lambda: Customer("customer", log))])
    async with supervisor:
        pass
    assert log == ["hello", "goodbye"]


async def test_a_crash_restarts_the_child_and_those_after_it_as_new_objects() -> None:
    log = list[str]()
    async with Supervisor(three(log)) as supervisor:
        before = [supervisor.actor(name) for name in ("store", "bank", "lane")]
        log.clear()
        await crash(supervisor, "bank")
        after = [supervisor.actor(name) for name in ("store", "bank", "lane")]
        assert log == ["lane stops", "bank starts", "lane starts"]
        assert [a is b for a, b in zip(before, after, strict=True)] == [True, False, False]


async def test_a_ref_survives_a_restart_and_asks_in_between_fail() -> None:
    async with Supervisor(three([])) as supervisor, trio.open_nursery() as nursery:
        ref, got = supervisor.ref("lane"), list[object]()
        await begin(nursery, ref.ask(Never()), into=got)
        await crash(supervisor, "bank")
        assert isinstance(got[0], ActorStopped)
        assert await ref.ask(Echo("hi")) == "hi"
        actor = supervisor.actor("lane")
        assert actor is not None
        assert actor.ref is ref


async def test_asks_between_a_crash_and_the_new_object_fail_at_once(autojump_clock: MockClock) -> None:
    class Slowly(Clerk):
        async def stopping(self) -> None:
            await trio.sleep(2)

    async with Supervisor([child("bank", []), Child("lane", Slowly)]) as supervisor:
        await crash(supervisor, "bank")
        start = trio.current_time()
        for name in ("bank", "lane"):
            assert isinstance(await outcome(supervisor.ref(name).ask(Echo("?"))), ActorStopped)
        assert supervisor.ref("bank").tell(Note("?")) is False
        assert trio.current_time() == start
        await trio.sleep(3)
        assert await supervisor.ref("bank").ask(Echo("back")) == "back"


async def test_asks_while_the_new_object_starts_wait_for_it(autojump_clock: MockClock) -> None:
    class Heavy(Clerk):
        async def start(self) -> None:
            await trio.sleep(10)

    async with Supervisor([Child("heavy", Heavy)]) as supervisor:
        await crash(supervisor, "heavy")
        assert await supervisor.ref("heavy").ask(Echo("a")) == "a"
        with pytest.raises(DeadlineExceeded):
            await crash(supervisor, "heavy")
            await supervisor.ref("heavy").ask(Echo("b"), deadline=trio.current_time() + 5)


@pytest.mark.parametrize(("restart", "lives"), [("permanent", 2), ("transient", 2), ("temporary", None)])
async def test_after_a_crash_all_but_temporary_children_come_back(restart: Restart, lives: int | None) -> None:
    async with Supervisor([child("a", [], restart)]) as supervisor:
        await crash(supervisor, "a")
        children = supervisor.statistics()["children"]
        assert (children["a"]["lives"] if children else None) == lives


@pytest.mark.parametrize(("restart", "there"), [("permanent", True), ("transient", False), ("temporary", False)])
async def test_after_a_normal_end_only_permanent_children_come_back(restart: Restart, there: bool) -> None:
    async with Supervisor([child("a", [], restart)]) as supervisor:
        actor = supervisor.actor("a")
        assert actor is not None
        actor.stop()
        await wait_all_tasks_blocked()
        assert supervisor.statistics()["children"].keys() == ({"a"} if there else set())


async def test_a_temporary_childs_crash_leaves_the_others_alone() -> None:
    log = list[str]()
    async with Supervisor([child("a", log, "temporary"), child("b", log)]) as supervisor:
        ref = supervisor.ref("a")
        log.clear()
        await crash(supervisor, "a")
        assert log == []
        assert isinstance(await outcome(ref.ask(Echo("gone"))), ActorStopped)
        assert supervisor.statistics()["departed"]["crashes"] == 1


async def test_too_many_restarts_stop_everything_and_escalate_with_the_cause() -> None:
    log, events = list[str](), list[str]()
    with pytest.raises(RestartIntensityExceeded, match="bank") as caught:
        async with Supervisor(three(log), max_restarts=2, on_event=lambda kind, *_: events.append(kind)) as supervisor:
            for _ in range(3):
                await crash(supervisor, "bank")
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert log[-2:] == ["lane stops", "store stops"]
    assert events.count("crashed") == 3
    assert events.count("escalated") == 1


async def test_restarts_outside_the_window_are_forgiven(autojump_clock: MockClock) -> None:
    async with Supervisor(three([]), max_restarts=1, window=60) as supervisor:
        for _ in range(5):
            await crash(supervisor, "lane")
            await trio.sleep(61)
        assert supervisor.statistics()["children"]["lane"]["crashes"] == 5


async def test_a_child_may_have_a_tighter_bound_of_its_own() -> None:
    children = [child("store", []), child("lane", [], max_restarts=1)]
    with pytest.raises(RestartIntensityExceeded, match="lane"):
        async with Supervisor(children, max_restarts=10) as supervisor:
            for _ in range(4):
                await crash(supervisor, "store")
            await crash(supervisor, "lane")
            assert await supervisor.ref("lane").ask(Echo("once more")) == "once more"
            await crash(supervisor, "lane")
            await trio.sleep_forever()


class Fails(Clerk):
    async def start(self) -> None:
        raise StartupError("no model here")


async def test_a_failed_first_start_stops_the_others_and_raises_its_own_error() -> None:
    log = list[str]()
    with pytest.raises(StartupError, match="no model here"):
        async with Supervisor([child("store", log), Child("bank", Fails), child("lane", log)]):
            log.append("body")
    assert log == ["store starts", "store stops"]


async def test_a_start_that_keeps_failing_after_a_crash_escalates() -> None:
    made = list[Actor]()

    def factory() -> Actor:
        made.append(Fails() if made else Clerk())
        return made[-1]

    with pytest.raises(RestartIntensityExceeded) as caught:
        async with Supervisor([Child("a", factory)], max_restarts=3) as supervisor:
            await crash(supervisor, "a")
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, StartupError)
    assert len(made) == 4


async def test_an_error_of_the_body_is_raised_as_it_is_after_an_orderly_stop() -> None:
    log = list[str]()
    with pytest.raises(KeyError, match="mine"):
        async with Supervisor(three(log)):
            raise KeyError("mine")
    assert log[-1] == "store stops"


async def test_cancelling_the_body_still_stops_children_in_order(autojump_clock: MockClock) -> None:
    log = list[str]()
    with trio.move_on_after(5) as scope:
        async with Supervisor(three(log)) as supervisor:
            await supervisor.ref("bank").ask(Never())
    assert scope.cancelled_caught
    assert log[-3:] == ["lane stops", "bank stops", "store stops"]


async def test_a_start_can_be_cancelled(autojump_clock: MockClock) -> None:
    class Endless(Clerk):
        async def start(self) -> None:
            await trio.sleep_forever()

    log = list[str]()
    with trio.move_on_after(5) as scope:
        async with Supervisor([child("store", log), Child("endless", Endless)]):
            log.append("body")
    assert scope.cancelled_caught
    assert log == ["store starts", "store stops"]


class Gated(Clerk):
    """Starts when its gate opens, and not before."""

    def __init__(self, gate: trio.Event) -> None:
        super().__init__("gated")
        self.gate = gate

    async def start(self) -> None:
        await self.gate.wait()


async def test_a_starter_that_is_cancelled_as_the_start_ends_takes_the_child_along() -> None:
    gate = trio.Event()
    async with Supervisor([child("store", [])]) as supervisor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.spawn, Child("gated", lambda: Gated(gate)))
            await wait_all_tasks_blocked()
            gate.set()
            nursery.cancel_scope.cancel()
        assert list(supervisor.statistics()["children"]) == ["store"]
        assert await supervisor.ref("store").ask(Echo("fine")) == "fine"


async def test_leaving_while_a_child_cannot_start_again_does_not_wait_for_it() -> None:
    gate, shut = trio.Event(), trio.Event()
    gate.set()
    gates = iter([gate, shut])
    async with Supervisor([Child("gated", lambda: Gated(next(gates)))]) as supervisor:
        await crash(supervisor, "gated")
        assert supervisor.statistics()["children"]["gated"]["lives"] == 1


async def test_leaving_in_the_middle_of_a_restart_stops_everything(autojump_clock: MockClock) -> None:
    class Slowly(Clerk):
        async def stopping(self) -> None:
            await trio.sleep(2)

    for at in (0, 1, 2, 3):
        log = list[str]()
        async with Supervisor([child("store", log), child("bank", log), Child("lane", lambda: Slowly("lane"))]) as sup:
            await crash(sup, "bank")
            await trio.sleep(at)
        assert log[-1] == "store stops"
        # The life that crashed says no goodbye, nor does one whose start was still under way.
        assert log.count("bank starts") - log.count("bank stops") in (1, 2)


async def test_a_child_that_does_not_stop_in_time_is_cancelled_and_still_says_goodbye(
    autojump_clock: MockClock,
) -> None:
    log, events, got = list[str](), list[tuple[str, object]](), list[object]()
    async with trio.open_nursery() as askers:
        children = [child("store", log), child("bank", log, stop_timeout=2.0)]
        async with Supervisor(children, on_event=lambda kind, _, detail: events.append((kind, detail))) as supervisor:
            await begin(askers, supervisor.ref("bank").ask(Slow("endless", 1e6)), into=got)
            start = trio.current_time()
    assert trio.current_time() - start == pytest.approx(2)
    assert log[-2:] == ["bank stops", "store stops"]
    assert ("overdue", "stop") in events
    assert isinstance(got[0], ActorStopped)


async def test_a_goodbye_that_never_ends_is_cancelled_too(autojump_clock: MockClock) -> None:
    class Clingy(Clerk):
        async def stopping(self) -> None:
            await trio.sleep_forever()

    start = trio.current_time()
    async with Supervisor([Child("clingy", Clingy, stop_timeout=2.0)]):
        pass
    assert trio.current_time() - start == pytest.approx(4)


async def test_children_can_be_spawned_and_stopped_while_running() -> None:
    log = list[str]()
    async with Supervisor(three(log)) as supervisor:
        ref = await supervisor.spawn(child("session-1", log, "temporary"))
        assert await ref.ask(Echo("hi")) == "hi"
        await supervisor.stop("session-1")
        await supervisor.stop("session-1")
        assert not ref.alive
        assert "session-1" not in supervisor.statistics()["children"]
        await supervisor.spawn(child("session-1", log, "temporary"))
    assert log[-4:] == ["session-1 stops", "lane stops", "bank stops", "store stops"]


async def test_a_session_that_stops_itself_is_forgotten() -> None:
    class OneShot(Clerk):
        async def run(self) -> None:
            await self.work(await self.mailbox.receive())

    async with Supervisor() as supervisor:
        ref = await supervisor.spawn(Child("s", OneShot, "temporary"))
        assert await ref.ask(Echo("only one")) == "only one"
        await wait_all_tasks_blocked()
        assert supervisor.statistics()["children"] == {}
        assert supervisor.statistics()["departed"]["crashes"] == 0


async def test_spawned_temporary_children_end_with_a_crash_of_what_they_stand_on() -> None:
    log = list[str]()
    async with Supervisor(three(log)) as supervisor:
        await supervisor.spawn(child("session", log, "temporary"))
        log.clear()
        await crash(supervisor, "bank")
        assert log == ["session stops", "lane stops", "bank starts", "lane starts"]
        assert "session" not in supervisor.statistics()["children"]


async def test_a_spawn_that_fails_to_start_raises_and_leaves_no_trace() -> None:
    async with Supervisor() as supervisor:
        with pytest.raises(StartupError):
            await supervisor.spawn(Child("a", Fails, "temporary"))
        assert supervisor.statistics()["children"] == {}
        await supervisor.spawn(child("a", [], "temporary"))


async def test_two_children_of_one_name_are_a_mistake() -> None:
    async with Supervisor([child("a", [])]) as supervisor:
        with pytest.raises(ValueError, match="named a"):
            await supervisor.spawn(child("a", []))
        assert supervisor.ref("a").alive


async def test_nothing_is_spawned_once_the_supervisor_stops() -> None:
    supervisor = Supervisor()
    async with supervisor:
        pass
    with pytest.raises(Unavailable):
        await supervisor.spawn(child("late", []))


async def test_many_crashes_at_once_are_settled_one_by_one() -> None:
    async with Supervisor(three([]), max_restarts=100) as supervisor:
        for name in ("lane", "store", "bank"):
            supervisor.ref(name).tell(CrashTold())
        await wait_all_tasks_blocked()
        for name in ("store", "bank", "lane"):
            assert await supervisor.ref(name).ask(Echo(name)) == name


async def test_events_tell_the_story_with_the_error() -> None:
    events = list[tuple[str, str, object]]()
    async with Supervisor(three([]), on_event=lambda *event: events.append(event)) as supervisor:
        events.clear()
        await crash(supervisor, "lane")
        story = [(kind, name) for kind, name, _ in events]
        assert story == [("crashed", "lane"), ("restarting", "lane"), ("started", "lane")]
        assert isinstance(events[0][2], ZeroDivisionError)


async def test_statistics_cover_every_child_and_dead_letters_survive_restarts() -> None:
    async with Supervisor(three([])) as supervisor:
        supervisor.ref("bank").tell(CrashTold())
        supervisor.ref("bank").tell(Note("behind it"))
        await wait_all_tasks_blocked()
        await supervisor.ref("bank").ask(Echo("hi"))
        found = supervisor.statistics()
    bank = found["children"]["bank"]
    assert (bank["running"], bank["lives"], bank["crashes"], bank["dead"]) == (True, 2, 1, {"crashed": 2})
    assert (bank["actor"]["handled"], bank["total"]["accepted"], bank["total"]["dead"]) == (1, 3, 2)
    assert found["restarts"] == 1
    assert list(found["children"]) == ["store", "bank", "lane"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_inside_an_actor_ends_the_supervisor(fault: type[BaseException]) -> None:
    class Interrupted(Clerk):
        async def after_batch(self) -> None:
            raise fault

    log = list[str]()
    with pytest.raises(BaseExceptionGroup) as caught:
        async with Supervisor([child("store", log), Child("x", Interrupted)]) as supervisor:
            supervisor.ref("x").tell(Note("now"))
            await trio.sleep_forever()
    assert caught.group_contains(fault)
    assert log[-1] == "store stops"


FACTORIES: list[Callable[[], Actor]] = [Clerk, lambda: Clerk(work_size=8)]


@pytest.mark.parametrize("factory", FACTORIES)
async def test_a_supervisor_leaves_nothing_behind(factory: Callable[[], Actor]) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    async with Supervisor([Child("a", factory)]) as supervisor:
        await crash(supervisor, "a")
    assert trio.lowlevel.current_statistics().tasks_living == before
