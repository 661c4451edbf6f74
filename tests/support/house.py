"""A ledger with a token pool behind it, as a bank and a lane would use them together."""

from __future__ import annotations

import random

from onecopy.runtime.rows.books import BeforeDrop
from onecopy.runtime.rows.ledger import Grant, Ledger, Shortage, Wanted
from onecopy.runtime.rows.ops import Chain, Link

from tests.support.books import SMALL, TokenPool, bytes_held

BIG = 1 << 30


class House:
    """A ledger with a token pool behind it; every turn is checked to read its own tokens."""

    layout = SMALL

    def __init__(self, budget: int = BIG, before_drop: BeforeDrop | None = None) -> None:
        self.ledger = Ledger(SMALL, budget, before_drop=before_drop)
        self.pool = TokenPool()
        self.turn = 0
        self.now = 0.0

    def begin(
        self, tokens: list[int], answer: int = 10, salt: bytes = b"", capacity: int | None = None
    ) -> tuple[int, Grant | Shortage]:
        self.turn += 1
        wanted = Wanted(tuple(tokens), answer, salt, capacity=capacity)
        got = self.ledger.admit(self.turn, wanted, f"c{self.turn}", self.now)
        self.settle()
        return self.turn, got

    def write(self, turn: int, tokens: list[int]) -> None:
        made = self.ledger.turns[turn]
        position = made.frontier
        self.pool.write(made.lease, position, tuple(tokens))
        self.ledger.commit(turn, tuple(tokens))

    def end(self, turn: int, keep: int = BIG) -> None:
        self.now += 1
        self.ledger.release(turn, keep, self.now)
        self.settle()

    def settle(self) -> None:
        self.pool.apply(self.ledger.take_orders())
        assert bytes_held(self.pool, self.ledger) == self.ledger.used <= self.ledger.budget
        assert self.ledger.audit() == []

    def run(self, tokens: list[int], answer: list[int] | None = None, salt: bytes = b"") -> Grant:
        """A whole turn: the prompt and all but the last answer token become rows."""
        answer = answer or []
        turn, got = self.begin(tokens, max(1, len(answer)), salt)
        assert isinstance(got, Grant)
        self.check(turn, tokens[: got.matched])
        self.finish(turn, tokens, tokens + answer[:-1])
        return got

    def finish(self, turn: int, prompt: list[int], tokens: list[int]) -> None:
        """Writes the rest of `tokens`, growing as a lane would; an answer may end early for want of memory."""
        made = self.ledger.turns[turn]
        while made.frontier < len(tokens):
            room = made.lease.room(made.frontier)
            if room:
                self.write(turn, tokens[made.frontier :][:room])
                continue
            full = isinstance(self.ledger.grow(turn, 1), Shortage)
            self.settle()
            if full:
                break
        assert made.frontier >= len(prompt)
        self.check(turn, tokens[: made.frontier])
        self.end(turn)

    def check(self, turn: int, tokens: list[int]) -> None:
        made = self.ledger.turns[turn]
        assert made.frontier == len(tokens)
        lease = made.lease
        leaves = (Link(x.segment, x.start, min(x.end, len(tokens))) for x in lease.leaves if x.start < len(tokens))
        assert self.pool.read(Chain((*lease.base, *leaves), lease.end)) == tokens


def story(seed: int, n: int) -> list[int]:
    return [random.Random(seed).randrange(1000) for _ in range(n)] if n else []
