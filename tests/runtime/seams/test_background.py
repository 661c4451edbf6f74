"""Work that gives way to all other work."""

import os
import sys
import threading
from collections.abc import Callable

import pytest
import trio
from onecopy.runtime.seams import background
from onecopy.runtime.seams.background import NICE, Background


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Background:
    monkeypatch.setattr(background, "IDLE", 0.05)
    return Background("test-background")


async def test_calls_run_one_after_another_on_one_other_thread(work: Background) -> None:
    seen: list[int] = []
    threads: set[int] = set()

    def note(i: int) -> None:
        seen.append(i)
        threads.add(threading.get_ident())

    async with trio.open_nursery() as nursery:
        for i in range(20):
            nursery.start_soon(work.run, note, i)
    assert sorted(seen) == list(range(20))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
async def test_the_thread_has_a_lower_priority_and_nobody_else(work: Background) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert await work.run(priority) == min(NICE, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


async def test_results_come_back_and_errors_are_raised(work: Background) -> None:
    assert await work.run(int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await work.run(int, "x")
    assert await work.run(int, "8") == 8


async def test_a_cancelled_caller_waits_for_the_end(work: Background) -> None:
    begun, go = threading.Event(), threading.Event()
    ended: list[bool] = []

    def call() -> None:
        begun.set()
        assert go.wait(30)
        ended.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work.run, call)
        await trio.to_thread.run_sync(begun.wait)
        nursery.cancel_scope.cancel()
        go.set()
    assert ended == [True]


async def test_a_thread_without_work_ends_and_the_next_call_starts_another(work: Background) -> None:
    first = await work.run(threading.current_thread)
    await until(lambda: not first.is_alive())
    second = await work.run(threading.current_thread)
    assert second is not first
    assert second.name == first.name == "test-background"


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.01)
