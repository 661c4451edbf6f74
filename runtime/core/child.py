"""A supervised child: what to run (`Child`), its place (`Cell`) and the life of the object now in that place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import trio

from .actor import Actor
from .ref import Ref

Restart = Literal["permanent", "transient", "temporary"]
OnEvent = Callable[[str, str, object], None]


@dataclass(frozen=True, slots=True)
class Child:
    """How to make and keep one actor.

    factory: makes a new object, also at each restart. restart: permanent comes back whatever ended it, transient
    after a crash only, temporary never. stop_timeout: seconds an orderly stop may take before `run` is cancelled, and
    again before `stopping` is. max_restarts: this child's own bound within the supervisor's window.
    """

    name: str
    factory: Callable[[], Actor]
    restart: Restart = "permanent"
    stop_timeout: float = 5.0
    max_restarts: int | None = None

    def returns(self, error: Exception | None) -> bool:
        """Whether it is restarted after ending with `error` (None: a normal end)."""
        return self.restart == "permanent" or (self.restart == "transient" and error is not None)


@dataclass(slots=True, eq=False)
class Life:
    """One actor object's life. error: what crashed it, once `done` is set."""

    actor: Actor
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    started: bool = False
    error: Exception | None = None


class Cell:
    """One child's place under a supervisor; its ref outlives every object that fills it.

    ended: awaited in the actor's own task when a life that had started is over.
    """

    def __init__(self, child: Child, ended: Callable[[Cell, Life], Awaitable[None]], on_event: OnEvent) -> None:
        self.child = child
        self.ref = Ref(child.name)
        self.life: Life | None = None
        self.lives = self.crashes = 0
        self._past: Counter[str] = Counter()
        self._ended = ended
        self._on_event = on_event

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def running(self) -> bool:
        return self.life is not None and self.life.started and not self.life.done.is_set()

    async def up(self, nursery: trio.Nursery) -> None:
        """Makes a new object, points the ref to it and returns once it has started. Raises what start raised."""
        actor = self.child.factory()
        actor.ref = self.ref
        self.life = Life(actor)
        self.ref.point(actor.mailbox)
        await nursery.start(self._live, self.life)
        self.lives += 1
        self._on_event("started", self.name, None)

    async def down(self) -> None:
        """Orderly stop; past each timeout a harder one. Returns when the object is gone."""
        life, self.life = self.life, None
        if life is None or life.done.is_set():
            return
        for end in (life.actor.stop, life.actor.kill):
            end()
            with trio.move_on_after(self.child.stop_timeout):
                await life.done.wait()
                return
            self._on_event("overdue", self.name, end.__name__)
        life.scope.cancel()
        await life.done.wait()

    @property
    def total(self) -> Counter[str]:
        """Messages over all lives: accepted, handled, failed, skipped, dead; dead also counts those told while down."""
        total = Counter(self._past)
        total.update(self.life.actor.counts() if self.running and self.life else {})
        total["dead"] += self.ref.dead["down"]
        return total

    def statistics(self) -> dict[str, Any]:
        """running, lives, crashes, totals over all lives, dead letters by reason, the living object's statistics."""
        return {
            "running": self.running,
            "lives": self.lives,
            "crashes": self.crashes,
            "total": dict(self.total),
            "dead": dict(self.ref.dead),
            "actor": self.life.actor.statistics() if self.life else {},
        }

    async def _live(self, life: Life, task_status: trio.TaskStatus[None]) -> None:
        def started() -> None:
            # From here only `down` may end it. A starter that was cancelled takes the child along instead.
            life.scope.shield = trio.current_effective_deadline() > -math.inf
            life.started = True
            task_status.started()

        try:
            with life.scope:
                await life.actor.live(started)
        except Exception as error:
            life.error = error
            self.crashes += 1
            self._on_event("crashed", self.name, error)
            if not life.started:
                raise
        finally:
            self._past.update(life.actor.counts())
            life.done.set()
        if life.error is None:
            self._on_event("stopped", self.name, None)
        await self._ended(self, life)
