"""The device thread: one permanent OS thread that owns MLX, and the short way there and back.

Arrays built on one thread cannot be evaluated on another, so all model code runs here. A call is one object through
a queue; its answer is one callback on the waiter's own trio loop. The waiter's loop may be another one each time.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

import outcome
import trio

from .errors import ActorStopped

LOG = logging.getLogger("onecopy.device")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_owners: set[int] = set()
"""Identifiers of the device threads alive in this process."""


class WrongThread(AssertionError):
    """Model code ran outside the device thread: a bug, never a user's error."""


def assert_device_thread() -> None:
    """Raise WrongThread unless this is a device thread. Without any device thread alive, any thread may run models."""
    if _owners and threading.get_ident() not in _owners:
        raise WrongThread(f"model code ran on thread {threading.current_thread().name!r}, not on the device thread")


class DeviceThread:
    """A `Device` on its own thread, from `start` (or entering it) to `stop` (or leaving it).

    Calls run in the order given, one at a time. A waiter that is cancelled leaves at once: its call is skipped if it
    has not begun, else runs to its end and its result is dropped. What a call raises is raised in its waiter.
    """

    def __init__(self, name: str = "onecopy-device") -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._open = False
        self._error: Exception | None = None
        self._runs = self._posts = self._skipped = self._dropped = 0

    def start(self) -> None:
        """Start the thread. Once per object; after `stop` it stays stopped."""
        self._thread.start()
        self._open = True

    def stop(self) -> None:
        """Finish the call that runs, fail those that wait with ActorStopped, end the thread. Blocks for the first;
        again changes nothing.
        """
        if self._open:
            self._open = False
            self._jobs.put(None)
            self._thread.join()
            self._drain()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """`fn(*args)` on the device thread, after all earlier calls. Raises what it raises; the error of an earlier
        `post` that failed instead of running; ActorStopped when the device is or gets stopped.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.begin(fn, *args)

    def begin(self, fn: Callable[[*Ts], T], *args: *Ts) -> Awaitable[T]:
        """`run` in two steps: the call is queued now, and its answer is what the same task awaits next."""
        self._check_open()
        job = _Job(fn, args, trio.lowlevel.current_task(), trio.lowlevel.current_trio_token())
        self._jobs.put(job)
        return job.answer()

    def post(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Queue `fn(*args)` without waiting. Its result is dropped; its error surfaces on the next `run`."""
        self._check_open()
        self._jobs.put(_Job(fn, args, None, None))

    def statistics(self) -> dict[str, Any]:
        """Counts so far: runs and posts done, skipped (waiter left before the start), dropped (left during it).
        waiting: calls in the queue now.
        """
        return {
            "runs": self._runs,
            "posts": self._posts,
            "skipped": self._skipped,
            "dropped": self._dropped,
            "waiting": self._jobs.qsize(),
        }

    def _check_open(self) -> None:
        if not self._open:
            raise ActorStopped("The device is stopped.")

    def _drain(self) -> None:
        """Fail what another thread's loop queued while this one was stopping."""
        while not self._jobs.empty():
            late = self._jobs.get()
            if late is not None:
                self._serve(late)

    def _work(self) -> None:
        _owners.add(threading.get_ident())
        try:
            while (job := self._jobs.get()) is not None:
                self._serve(job)
                del job  # its arguments and arrays must not outlive it while this thread waits
        finally:
            _owners.discard(threading.get_ident())
            _end_streams()

    def _serve(self, job: _Job) -> None:
        if not self._open:
            job.settle(outcome.Error(ActorStopped("The device was stopped.")))
        elif job.task is None:
            self._serve_post(job)
        elif job.left:
            self._skipped += 1
        else:
            self._serve_run(job)

    def _serve_run(self, job: _Job) -> None:
        error, self._error = self._error, None
        result = outcome.Error(error) if error is not None else outcome.capture(job.fn, *job.args)
        self._runs += 1
        if job.left:
            self._drop(result)
        job.settle(result)

    def _serve_post(self, job: _Job) -> None:
        self._posts += 1
        try:
            job.fn(*job.args)
        except Exception as error:
            self._error = self._error or error

    def _drop(self, result: outcome.Outcome[Any]) -> None:
        self._dropped += 1
        if isinstance(result, outcome.Error):
            LOG.warning("a device call failed after its waiter had left: %r", result.error)


def _end_streams() -> None:
    """Ends the MLX streams of this thread: MLX may abort the process at its end when some are left."""
    mlx = sys.modules.get("mlx.core")
    if mlx is not None:
        mlx.clear_streams()


class _Job:
    """One call and who waits for it. `left` is written on the waiter's loop; the device thread only reads it."""

    __slots__ = ("args", "awaited", "fn", "left", "task", "token")

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        task: trio.lowlevel.Task | None,
        token: trio.lowlevel.TrioToken | None,
    ) -> None:
        self.fn = fn
        self.args = args
        self.task = task
        self.token = token
        self.left = self.awaited = False

    async def answer(self) -> Any:
        self.awaited = True
        return await trio.lowlevel.wait_task_rescheduled(self.abandon)

    def abandon(self, _raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
        """The waiter is cancelled: it leaves at once."""
        self.left = True
        return trio.lowlevel.Abort.SUCCEEDED

    def settle(self, result: outcome.Outcome[Any]) -> None:
        """Hand `result` to the waiter's loop, from the device thread. A loop that has ended wants nothing."""
        if self.token is not None and not self.left:
            try:
                self.token.run_sync_soon(self._wake, result)
            except trio.RunFinishedError:
                self.left = True

    def _wake(self, result: outcome.Outcome[Any]) -> None:
        """A call that was begun and never awaited wakes nobody: its task waits for something else, or has ended."""
        if self.awaited and not self.left and self.task is not None:
            trio.lowlevel.reschedule(self.task, result)
