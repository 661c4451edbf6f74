"""One model, kept two ways: our rows in a bank, and mlx-lm's prompt cache, copied as its server copies it.

Both sides do the same work on weights of their own: turns of one conversation, sessions that begin beside a long one,
forks that decode together. What a benchmark needs of a side is `Side`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from onecopy.runtime.decode import wants_for
from onecopy.runtime.engine import Engine
from onecopy.runtime.models import load
from onecopy.runtime.rows.ledger import Grant, Ledger, Shortage, Wanted
from onecopy.runtime.rows.plan import Strip
from onecopy.runtime.turn import Sampling

CHUNK = 512
"""Rows of a prompt computed at once, on both sides."""
GREEDY = Sampling(seed=0, temperature=0.0)
PLENTY = 1 << 40


class Side(Protocol):
    """name: what the tables call it. row_bytes: of one token. A talk is whatever a side keeps of one conversation."""

    name: str
    row_bytes: int

    def rest(self) -> None:
        """What a server does with what it keeps while nobody asks."""

    def start(self, tokens: Sequence[int]) -> Any:
        """A new talk over a prompt, computed, idle."""

    def go_on(self, talk: Any, tokens: Sequence[int], reply: int) -> Any:
        """The talk after a message and a greedy reply of so many tokens, idle."""

    def branch(self, talk: Any, tokens: Sequence[int], reply: int) -> Any:
        """A talk that begins as this one and has a message of its own, computed, about to reply. The parent stays."""

    def decode(self, talks: Sequence[Any], tokens: int) -> float:
        """Seconds for so many tokens of each of these branches, all at once."""

    def drop(self, talks: Sequence[Any]) -> None:
        """They are not needed any more."""


class Rows:
    """Our engine and the bank's books, driven as bank and lane drive them."""

    name = "onecopy"

    def __init__(self, model: str, context: int) -> None:
        self._engine = Engine.open(load(model), context=context, stopwatch=time.perf_counter)
        self.layout = self._engine.layout
        self.row_bytes = self.layout.row_bytes
        self.ledger = Ledger(self.layout, PLENTY)
        self._turn = 0

    def start(self, tokens: Sequence[int]) -> list[int]:
        return self._turned(list(tokens), 0)

    def go_on(self, talk: list[int], tokens: Sequence[int], reply: int) -> list[int]:
        return self._turned([*talk, *tokens], reply)

    def branch(self, talk: list[int], tokens: Sequence[int], reply: int) -> Any:
        prompt = [*talk, *tokens]
        grant = self._begin(prompt, reply)
        return [grant.lease.turn, [*prompt, self._fill(grant, prompt)]]

    def decode(self, talks: Sequence[Any], tokens: int) -> float:
        begun = time.perf_counter()
        for _ in range(tokens):
            self._round(talks)
        return time.perf_counter() - begun

    def drop(self, talks: Sequence[Any]) -> None:
        for turn, tokens in talks:
            self.ledger.release(turn, len(tokens) - 1, float(self._turn))
        for name in [c.id for c in self.ledger.conversations.values() if c.tip.lease is None]:
            self.ledger.forget(name)
        self._settle()

    def rest(self) -> None:
        """What the bank does with idle conversations: unused blocks go back."""
        for name in list(self.ledger.conversations):
            self.ledger.trim(name)
        self._settle()

    def _turned(self, prompt: list[int], reply: int) -> list[int]:
        grant = self._begin(prompt, max(1, reply))
        talk = [grant.lease.turn, [*prompt, self._fill(grant, prompt)]]
        for _ in range(max(0, reply - 1)):
            self._round([talk])
        self.ledger.release(grant.lease.turn, len(talk[1]) - 1, float(self._turn))
        self._settle()
        return talk[1] if reply else prompt

    def _begin(self, prompt: list[int], reply: int) -> Grant:
        self._turn += 1
        got = self.ledger.admit(self._turn, Wanted(tuple(prompt), reply), f"c{self._turn}", float(self._turn))
        if isinstance(got, Shortage):
            raise MemoryError(got)
        self._settle()
        return got

    def _fill(self, grant: Grant, prompt: list[int]) -> int:
        """Computes the rest of a prompt; the token that follows."""
        at, turn = grant.matched, grant.lease.turn
        while at < len(prompt):
            end = min(at // CHUNK * CHUNK + CHUNK, len(prompt), at + self._room(turn, at))
            last = end == len(prompt)
            strip = Strip(grant.lease.chain(at), at, tuple(prompt[at:end]), int(last))
            picks = self._engine.run([strip], wants_for(GREEDY, end) if last else ()).picks
            self.ledger.commit(turn, strip.tokens)
            at = end
        return int(picks[0][0].token)

    def _round(self, talks: Sequence[Any]) -> None:
        strips = []
        for turn, tokens in talks:
            at = len(tokens) - 1
            self._room(turn, at)
            strips.append(Strip(self.ledger.turns[turn].lease.chain(at), at, (tokens[-1],), 1))
        picks = self._engine.run(strips, [w for s in strips for w in wants_for(GREEDY, s.end)]).picks
        for (turn, tokens), strip, (pick,) in zip(talks, strips, picks, strict=True):
            self.ledger.commit(turn, strip.tokens)
            tokens.append(int(pick.token))

    def _room(self, turn: int, at: int) -> int:
        """Rows that can be written at a position, once the turn has grown if it had to."""
        if not self.ledger.turns[turn].lease.room(at):
            if isinstance(self.ledger.grow(turn, 1), Shortage):
                raise MemoryError("growth")
            self._settle()
        return self.ledger.turns[turn].lease.room(at)

    def _settle(self) -> None:
        self._engine.pool.apply(self.ledger.take_orders())


class PromptCache:
    """mlx-lm's model code and caches. A branch is a deep copy, as its server's prompt cache makes it.

    A talk is [cache, the newest token], which is no row yet; after `start` there is none.
    """

    name = "mlx-lm"

    def __init__(self, model: str, context: int) -> None:
        self._model = load(model).model
        self.joined = 0
        (cache, _) = self.start([2, 3])
        self.row_bytes = sum(a.nbytes // a.shape[2] for c in cache for a in (c.keys, c.values))

    def start(self, tokens: Sequence[int]) -> Any:
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self._model)
        self._fill(cache, tokens)
        return [cache, None]

    def go_on(self, talk: Any, tokens: Sequence[int], reply: int) -> Any:
        cache = talk[0]
        token = self._fill(cache, _after(talk, tokens))
        for _ in range(reply - 1):
            token = self._fill(cache, [token])
        return [cache, token]

    def branch(self, talk: Any, tokens: Sequence[int], reply: int) -> Any:
        cache = copy.deepcopy(talk[0])
        mx.eval([c.state for c in cache])
        return [cache, self._fill(cache, _after(talk, tokens))]

    def decode(self, talks: Sequence[Any], tokens: int) -> float:
        if len(talks) == 1:
            return self._one(talks[0], tokens)
        from mlx_lm.generate import BatchGenerator

        batch = BatchGenerator(self._model, max_tokens=tokens + 8, completion_batch_size=len(talks))
        batch.insert([[token] for _, token in talks], caches=[cache for cache, _ in talks])
        batch.next_generated()  # joins the caches into one
        for talk in talks:
            talk[0] = None
        self.joined = mx.get_active_memory()
        begun = time.perf_counter()
        for _ in range(tokens):
            batch.next_generated()
        took = time.perf_counter() - begun
        batch.close()
        return took

    def _one(self, talk: Any, tokens: int) -> float:
        begun = time.perf_counter()
        for _ in range(tokens):
            talk[1] = self._fill(talk[0], [talk[1]])
        return time.perf_counter() - begun

    def drop(self, talks: Sequence[Any]) -> None:
        for talk in talks:
            talk.clear()

    def rest(self) -> None:
        """It gives nothing back."""

    def _fill(self, cache: Any, tokens: Sequence[int]) -> int:
        for at in range(0, len(tokens), CHUNK):
            logits = self._model(mx.array([list(tokens[at : at + CHUNK])]), cache=cache)
            token = logits[0, -1].argmax()
            mx.eval(token, [c.state for c in cache])
        return int(token)


def _after(talk: Any, tokens: Sequence[int]) -> list[int]:
    return list(tokens) if talk[1] is None else [talk[1], *tokens]
