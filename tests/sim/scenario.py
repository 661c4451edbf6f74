"""Scenarios as data, drawn from a grammar by a seed: a house, clients with programs, and what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.store.rows_on_disk import DEFAULT_FLOOR as FLOOR

from tests.sim.model import LAYOUTS, VOCAB

Leave = Literal["ticks", "pieces", "seconds"]


@dataclass(frozen=True, slots=True)
class Say:
    """A user's message and the reply to it.

    tokens: appended to the history. keep: rows of the history that stay before them, as a share (an edit when below
    1). again: the last message once more, for another reply. leave: go away after so many of something. slow: seconds
    before each piece is read. fill: more tokens, so that the prompt ends so many rows before a block does.
    """

    tokens: tuple[int, ...]
    max_new: int
    seed: int
    temperature: float = 0.0
    keep: float = 1.0
    again: bool = False
    leave: tuple[Leave, float] | None = None
    slow: float = 0.0
    penalty: float = 0.0
    ignore_eos: bool = False
    background: bool = False
    fill: int | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    """Subagents: each goes on from this history with its own program, beside the others."""

    programs: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Care:
    """Something done to the conversation itself."""

    what: Literal["pin", "unpin", "fork", "drop", "list"]
    at: float = 1.0


Step = Say | Branch | Rest | Care


@dataclass(frozen=True, slots=True)
class Client:
    """begins: seconds into the run. salt: its key's. base: which shared beginning its history starts with, how long.

    resume: it goes on where a client of an earlier life was, chosen by this number; None for a new conversation.
    """

    program: tuple[Step, ...]
    begins: float = 0.0
    salt: bytes = b""
    base: tuple[int, int] = (0, 0)
    resume: int | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """One process on the same disk. Scenarios with a disk have several; the first one's clients are the scenario's own.

    end: how it ends: "stop" in order, "kill" at once with the system's page cache intact, "cut" with the power: after
    `at` disk calls, or `lingers` seconds after its clients are done. Chances of faults are per disk call. rival:
    another process has the directory. term: told to stop after so many scheduler ticks, with its clients still there.
    weights: the model's; rows that other weights left on disk are nobody's rows.
    """

    clients: tuple[Client, ...] = ()
    end: Literal["stop", "kill", "cut"] = "stop"
    at: int = 0
    lingers: float = 0.0
    eio: float = 0.0
    enospc: float = 0.0
    short: float = 0.0
    rate: float | None = None
    rival: bool = False
    term: int | None = None
    weights: int = 0


@dataclass(frozen=True, slots=True)
class Store:
    """A scenario's disk. capacity: of the medium; quota: of the store; permit: of the stager. Bytes. None: plenty."""

    lives: tuple[Life, ...]
    capacity: int | None = None
    quota: int | None = None
    permit: int | None = None


@dataclass(frozen=True, slots=True)
class Crash:
    """An actor fails at its n-th message, before or after it handled it."""

    actor: Literal["bank", "lane", "stager", "rows store"]
    at: int
    after: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. blocks: the budget. term: stop the system after so many scheduler ticks; None lets clients finish.

    fixed: rows in multiples of which turns that draft want their buffers; 0 for any number.
    """

    seed: int
    layout: str
    blocks: int
    parallel: int
    clients: tuple[Client, ...]
    slow: float = 0.0
    drafts: int = 0
    mailbox: int = 4096
    fail_run: tuple[int, ...] = ()
    fail_after: tuple[int, ...] = ()
    fail_orders: tuple[int, ...] = ()
    crashes: tuple[Crash, ...] = ()
    term: int | None = None
    jumps: tuple[float, ...] = ()
    chunk: int = 2 * BLOCK
    fixed: int = 0
    store: Store | None = None

    @property
    def calm(self) -> bool:
        """Nothing is made to fail."""
        faults = (
            self.fail_run
            or self.fail_after
            or self.fail_orders
            or self.crashes
            or self.term is not None
            or self.mailbox < 64
        )
        lives = self.store.lives if self.store is not None else ()
        return not faults and all(life.end != "cut" and life.term is None for life in lives)


@dataclass(slots=True)
class Grammar:
    """Draws scenarios. Sizes crowd around block edges, where the mistakes are."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def stored(self) -> Scenario:
        """A scenario with a disk and two or three lives on it."""
        r = self.rng
        drawn = self.scenario()
        lives = tuple(self.life(number) for number in range(r.choice((2, 2, 3))))
        store = Store(
            lives,
            capacity=r.choice((None, None, None, None, None, FLOOR // 2, FLOOR + 40_000, FLOOR + 90_000)),
            quota=r.choice((None, None, None, None, 400_000)),
            permit=r.choice((None, 4096, 20_000)),
        )
        crashes = tuple(replace(c, actor=r.choice(("bank", "lane", "stager", "rows store"))) for c in drawn.crashes)
        return replace(drawn, term=None, crashes=crashes, mailbox=4096, store=store)

    def life(self, number: int) -> Life:
        r = self.rng
        clients = tuple(replace(self.client(), resume=r.randrange(8)) for _ in range(r.choice((1, 2, 3))))
        faulty = r.random() < 0.15
        return Life(
            clients if number else (),
            r.choice(("stop", "stop", "kill", "cut")),
            r.randrange(5, r.choice((60, 150, 400))),
            r.choice((0.0, 0.1, 10.0)),
            eio=0.05 * faulty * r.random(),
            enospc=0.1 * faulty * r.random(),
            short=0.3 * faulty * r.random(),
            rate=r.choice((None, None, 1e6, 3e4)),
            rival=r.random() < 0.06,
            term=None if r.random() < 0.85 else r.randrange(1, 2000),
            weights=1 if number and r.random() < 0.1 else 0,
        )

    def scenario(self) -> Scenario:
        r = self.rng
        calm = r.random() < 0.5
        clients = tuple(self.client() for _ in range(r.choice((1, 1, 2, 2, 3, 4))))
        fixed = r.choice((0, 0, BLOCK, 4 * BLOCK, 4 * BLOCK))
        return Scenario(
            self.seed,
            r.choice(sorted(LAYOUTS)),
            blocks=r.choice((1000, 1000, 40, 24, 16, 10, 6)),
            parallel=r.choice((1, 2, 8, 8)),
            clients=clients,
            slow=r.choice((0.0, 0.0, 0.05, 1.0)),
            drafts=r.choice((0, 0, 3, 7)) if not fixed else r.choice((1, 3, 7)),
            mailbox=4096 if calm or r.random() < 0.9 else r.choice((2, 4, 8)),
            fail_run=self._some_runs(0.0 if calm else 0.15),
            fail_after=self._some_runs(0.0 if calm else 0.15),
            fail_orders=self._some_runs(0.0 if calm else 0.1),
            crashes=self._crashes(0.0 if calm else 0.25),
            term=None if calm or r.random() < 0.85 else r.randrange(1, 2000),
            jumps=tuple(r.choice((-1e6, -60.0, 3600.0, 1e7)) for _ in range(r.random() < 0.05)),
            chunk=r.choice((BLOCK, 2 * BLOCK)),
            fixed=fixed,
        )

    def client(self) -> Client:
        r = self.rng
        base = (r.randrange(2), self.length() if r.random() < 0.7 else 0)
        salt = b"" if r.random() < 0.85 else b"other"
        begins = 0.0 if r.random() < 0.7 else r.choice((0.01, 1.0, 5.0)) * r.random()
        return Client(self.program(r.choice((1, 2, 3, 4)), 1), begins, salt, base)

    def program(self, steps: int, depth: int) -> tuple[Step, ...]:
        crossing = self.crossing(depth) if depth and self.rng.random() < 0.2 else ()
        return crossing + tuple(self.step(depth) for _ in range(steps))

    def crossing(self, depth: int) -> tuple[Step, ...]:
        """A reply that goes over a block's edge, somebody who shares the rows past it, and then another reply."""
        r = self.rng
        say = replace(self.say("say"), fill=r.randrange(1, 12), max_new=20, ignore_eos=True, leave=None)
        share = Care("fork") if r.random() < 0.5 else Branch((self.program(1, 0),))
        return say, share, replace(self.say("again"), again=True), self.say("say")

    def step(self, depth: int) -> Step:
        r = self.rng
        kind = r.choices(("say", "again", "edit", "branch", "rest", "care"), (10, 2, 3, 2 * (depth > 0), 2, 2))[0]
        if kind == "branch":
            n = r.choice((1, 2, 3))
            return Branch(tuple(self.program(r.choice((1, 1, 2)), depth - 1) for _ in range(n)))
        if kind == "rest":
            return Rest(r.choice((0.001, 0.5, 5.0, 10.0)) * r.random())
        if kind == "care":
            return Care(r.choice(("pin", "unpin", "fork", "fork", "drop", "list")), r.choice((1.0, r.random())))
        return self.say(kind)

    def say(self, kind: str) -> Say:
        r = self.rng
        return Say(
            self.words(self.length() if r.random() < 0.3 else r.randrange(1, 40)),
            max_new=r.choice((1, 2, 5, 10, 20)) if r.random() < 0.93 else r.choice((255, 256, 257, 300, 520)),
            seed=r.getrandbits(64),
            temperature=r.choice((0.0, 0.0, 1.0)),
            keep=1.0 if kind != "edit" else r.choice((0.0, r.random(), r.random())),
            again=kind == "again",
            leave=self._leave() if r.random() < 0.2 else None,
            slow=r.choice((0.1, 1.0)) if r.random() < 0.05 else 0.0,
            penalty=1.0 if r.random() < 0.08 else 0.0,
            ignore_eos=r.random() < 0.4,
            background=r.random() < 0.1,
        )

    def length(self) -> int:
        """Rows: around block edges mostly."""
        r = self.rng
        edge = BLOCK * r.choice((1, 1, 1, 2, 2, 3))
        return r.choice((edge - 1, edge, edge + 1, edge + r.randrange(-20, 20), r.randrange(1, 2 * BLOCK)))

    def words(self, n: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(1, VOCAB), k=n))

    def _leave(self) -> tuple[Leave, float]:
        r = self.rng
        how = r.choice(("ticks", "ticks", "pieces", "seconds"))
        return how, {"ticks": r.randrange(1, 120), "pieces": r.randrange(6), "seconds": r.random()}[how]

    def _some_runs(self, chance: float) -> tuple[int, ...]:
        r = self.rng
        return tuple(sorted(r.randrange(1, 30) for _ in range(r.choice((1, 1, 2))))) if r.random() < chance else ()

    def _crashes(self, chance: float) -> tuple[Crash, ...]:
        r = self.rng
        if r.random() >= chance:
            return ()
        return tuple(
            Crash(r.choice(("bank", "lane")), r.randrange(1, 30), r.random() < 0.5) for _ in range(r.choice((1, 1, 2)))
        )


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    return Grammar(seed).scenario()


def stored(seed: int) -> Scenario:
    """The scenario of a seed, with a disk."""
    return Grammar(seed).stored()


def small(seed: int) -> Scenario:
    """One or two short conversations of the same grammar."""
    grammar = Grammar(seed)
    drawn = grammar.scenario()
    clients = tuple(replace(c, program=c.program[:2], base=(0, min(300, c.base[1]))) for c in drawn.clients[:2])
    return replace(drawn, clients=tuple(replace(c, program=tuple(map(_short, c.program))) for c in clients))


def _short(step: Step) -> Step:
    if isinstance(step, Branch):
        return Branch(tuple(tuple(map(_short, program[:1])) for program in step.programs[:2]))
    if isinstance(step, Rest):
        return Rest(min(step.seconds, 3.0))
    return replace(step, max_new=min(step.max_new, 4), tokens=step.tokens[:300]) if isinstance(step, Say) else step


_base = random.Random(0)
BASES = tuple(tuple(_base.choices(range(1, VOCAB), k=1100)) for _ in range(2))
"""Two beginnings that many conversations share, as a system prompt is shared."""
