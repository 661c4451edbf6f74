"""A thread whose work gives way to all other work of the machine."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

NICE = 10
"""Steps of priority below the rest of the process: about a tenth of a busy core, all of an idle one."""
IDLE = 10.0
"""Seconds after which a thread without work ends; the next call starts another."""


class Background:
    """Runs calls one after another, in the order given, on a thread of low priority (on Linux; elsewhere an ordinary
    one). A thread's priority can be lowered and not raised again, so it is nobody else's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._alive = False

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """`fn(*args)` on the thread. It always runs to its end: a cancelled caller waits for it."""
        task, token = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()

        def job() -> None:
            result = outcome.capture(fn, *args)
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(trio.lowlevel.reschedule, task, result)

        await trio.lowlevel.checkpoint_if_cancelled()
        self._put(job)
        result: T = await trio.lowlevel.wait_task_rescheduled(_stays)
        return result

    def _put(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.put(job)
            if not self._alive:
                self._alive = True
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (job := self._next()) is not None:
            job()
            del job  # what it holds must not outlive it while this thread waits

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._jobs.get(timeout=IDLE)
        except queue.Empty:
            with self._lock:
                self._alive = not self._jobs.empty()
                return self._jobs.get() if self._alive else None


def _stays(_: Any) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED
