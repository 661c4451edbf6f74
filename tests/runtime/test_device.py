import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
import trio
import trio.testing
from onecopy.runtime.device import DeviceThread, WrongThread, assert_device_thread
from onecopy.runtime.errors import ActorStopped
from onecopy.runtime.seams.device import Device, InlineDevice


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    with DeviceThread("test-device") as device:
        yield device


class Gate:
    """A device call that holds the thread until the test opens it; `entered` says when it has begun."""

    def __init__(self) -> None:
        self.token = trio.lowlevel.current_trio_token()
        self.entered = trio.Event()
        self._open = threading.Event()

    def __call__(self) -> str:
        self.token.run_sync_soon(self.entered.set)
        assert self._open.wait(30)
        return "through"

    def open(self) -> None:
        self._open.set()


def accepts(device: DeviceThread) -> bool:
    try:
        device.post(int)
    except ActorStopped:
        return False
    return True


def fail(error: BaseException) -> None:
    raise error


def test_the_device_thread_is_a_device() -> None:
    device: Device = DeviceThread()
    assert device.statistics()["runs"] == 0


@pytest.mark.parametrize("kind", ["thread", "inline"])
async def test_a_call_is_begun_in_one_step_and_answered_in_another(device: DeviceThread, kind: str) -> None:
    at: Device = device if kind == "thread" else InlineDevice()
    answer = at.begin(int, "7")
    assert await answer == 7
    with pytest.raises(ValueError, match="no"):
        await at.begin(fail, ValueError("no"))


async def test_a_begun_call_runs_while_its_task_does_something_else(device: DeviceThread) -> None:
    ran = threading.Event()
    answer = device.begin(ran.set)
    assert ran.wait(30)  # nothing was awaited yet
    await answer


async def test_a_begun_call_that_is_never_awaited_wakes_nobody(device: DeviceThread) -> None:
    forgotten: Any = device.begin(int, "1")
    assert await device.run(int, "2") == 2
    await trio.testing.wait_all_tasks_blocked()
    forgotten.close()
    assert await device.run(int, "3") == 3


async def test_the_streams_of_a_device_thread_end_with_it_on_that_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of them may abort the process when it ends."""
    ended: list[int] = []
    monkeypatch.setattr(mx, "clear_streams", lambda: ended.append(threading.get_ident()))
    with DeviceThread() as device:
        own = await device.run(threading.get_ident)
        assert not ended
    assert ended == [own]


async def test_every_call_runs_on_the_same_other_thread(device: DeviceThread) -> None:
    threads = {await device.run(threading.get_ident) for _ in range(5)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_calls_run_in_the_order_given(device: DeviceThread) -> None:
    seen: list[int] = []
    for i in range(50):
        device.post(seen.append, i)
    await device.run(seen.append, 50)
    assert seen == list(range(51))


async def test_waiters_get_their_own_results(device: DeviceThread) -> None:
    results: dict[int, int] = {}

    async def ask(i: int) -> None:
        results[i] = await device.run(pow, i, 2)

    async with trio.open_nursery() as nursery:
        for i in range(40):
            nursery.start_soon(ask, i)
    assert results == {i: i * i for i in range(40)}


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()])
async def test_what_a_call_raises_is_raised_in_its_waiter(device: DeviceThread, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        await device.run(fail, error)
    assert caught.value is error
    assert await device.run(str, 1) == "1"


async def test_a_failed_post_surfaces_once_on_the_next_run_instead_of_running(device: DeviceThread) -> None:
    seen: list[int] = []
    device.post(fail, ValueError("first"))
    device.post(fail, ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        await device.run(seen.append, 1)
    await device.run(seen.append, 2)
    assert seen == [2]


async def test_a_cancelled_waiter_leaves_while_its_call_still_runs(device: DeviceThread) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, gate)
        await gate.entered.wait()
        nursery.cancel_scope.cancel()
    gate.open()
    assert await device.run(str, 2) == "2"
    assert device.statistics() == {"runs": 2, "posts": 0, "skipped": 0, "dropped": 1, "waiting": 0}


async def test_a_call_whose_waiter_left_before_it_began_never_runs(device: DeviceThread) -> None:
    gate, seen = Gate(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, gate)
        await gate.entered.wait()
        with trio.CancelScope() as scope:
            scope.cancel()
            await device.run(seen.append, 1)
        async with trio.open_nursery() as inner:
            inner.start_soon(device.run, seen.append, 2)
            await trio.testing.wait_all_tasks_blocked()
            inner.cancel_scope.cancel()
        gate.open()
    await device.run(seen.append, 3)
    assert seen == [3]
    assert device.statistics()["skipped"] == 1


async def test_an_error_after_its_waiter_left_is_logged_not_lost(
    device: DeviceThread, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()

    def late() -> None:
        gate()
        raise ValueError("nobody waits")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, late)
        await gate.entered.wait()
        nursery.cancel_scope.cancel()
    gate.open()
    await device.run(str, 1)
    assert "nobody waits" in caplog.text


async def test_a_result_no_waiter_holds_is_freed_at_once(device: DeviceThread) -> None:
    freed = trio.Event()
    token = trio.lowlevel.current_trio_token()

    class Big:
        def __del__(self) -> None:
            token.run_sync_soon(freed.set)

    device.post(Big)
    device.post(lambda big: None, Big())
    with trio.fail_after(30):
        await freed.wait()


def test_one_thread_serves_one_loop_after_another(device: DeviceThread) -> None:
    async def main() -> int:
        return await device.run(threading.get_ident)

    assert trio.run(main) == trio.run(main)


def test_a_loop_that_ended_during_a_call_wants_no_answer(device: DeviceThread) -> None:
    holds = threading.Event()

    async def leaver() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await device.run(holds.wait, 30)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(device.run, holds.wait, 30)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    async def later() -> str:
        return await device.run(str, 7)

    trio.run(leaver)
    holds.set()
    assert trio.run(later) == "7"


def test_two_loops_at_a_time_share_the_thread(device: DeviceThread) -> None:
    found: list[int] = []

    async def main() -> None:
        found.extend([await device.run(threading.get_ident) for _ in range(20)])

    other = threading.Thread(target=trio.run, args=(main,))
    other.start()
    trio.run(main)
    other.join()
    assert len(found) == 40
    assert len(set(found)) == 1


async def test_stopping_fails_those_who_wait_and_ends_the_thread() -> None:
    device = DeviceThread("stopped-device")
    device.start()
    gate = Gate()
    answers: list[Any] = []

    async def ask(fn: Callable[[], Any]) -> None:
        try:
            answers.append(await device.run(fn))
        except ActorStopped as error:
            answers.append(error.code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, gate)
        await gate.entered.wait()
        nursery.start_soon(ask, dict)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(trio.to_thread.run_sync, device.stop)
        while accepts(device):
            await trio.lowlevel.checkpoint()
        gate.open()
    assert sorted(answers) == ["actor_stopped", "through"]
    assert "stopped-device" not in {thread.name for thread in threading.enumerate()}


async def test_a_stopped_device_refuses_at_once() -> None:
    with DeviceThread() as device:
        pass
    device.stop()
    with pytest.raises(ActorStopped):
        await device.run(str, 1)
    with pytest.raises(ActorStopped):
        device.post(str, 1)


async def test_model_code_outside_a_living_device_thread_is_caught(device: DeviceThread) -> None:
    with pytest.raises(WrongThread, match="MainThread"):
        assert_device_thread()
    await device.run(assert_device_thread)


async def test_without_a_device_thread_models_run_anywhere() -> None:
    await InlineDevice().run(assert_device_thread)
