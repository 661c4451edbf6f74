"""A session: one turn of one conversation, from admission to the last piece. It owns the reading of the reply.

It asks the bank for rows, hands them to the lane, turns tokens into pieces for the client, and gives the lease back
however it ends: finished, cancelled, refused or broken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio
from onecopy.runtime.core import Actor, Ref, handles
from onecopy.runtime.decode import Pick
from onecopy.runtime.errors import ActorStopped, LaneCrashed, OnecopyError, Overloaded
from onecopy.runtime.rows.ledger import Grant, Wanted
from onecopy.runtime.seams.clock import Clock
from onecopy.runtime.text.grammar import Matcher
from onecopy.runtime.text.reader import Reader
from onecopy.runtime.turn import (
    Finished,
    FinishReason,
    Piece,
    Prefilling,
    Queued,
    Receipt,
    Started,
    Text,
    TokenLogprob,
    TurnSpec,
    Usage,
)

from .messages.bank import Admit, Release
from .messages.lane import Begin, Cancel, Consumed
from .messages.session import Broken, Filled, Produced, Waiting
from .outbox import Outbox

Spell = Callable[[int], bytes]

AGAIN = 0.05
"""Seconds before a full mailbox is tried again."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a session is made from. turn: its number at bank and lane. name: the conversation's id if it is new.

    reader: None for a model without text: its pieces carry tokens only. spell: a token's bytes, for log probabilities.
    fixed: its drafts are verified by a compiled forward where the bank can give buffers of a fixed size. starts: where
    the prompt's messages start, for a model that cannot go back to any token.
    """

    turn: int
    name: str
    spec: TurnSpec
    reader: Reader | None
    matcher: Matcher | None
    spell: Spell
    exact: str
    fixed: bool = False
    starts: tuple[int, ...] = ()


class Session(Actor):
    """Runs one turn and writes its pieces to `outbox`, which it closes at the end."""

    def __init__(self, work: Work, bank: Ref, lane: Ref, clock: Clock, outbox: Outbox) -> None:
        super().__init__(f"session {work.turn}")
        self._work = work
        self._spec = work.spec
        self._bank = bank
        self._lane = lane
        self._clock = clock
        self._out = outbox
        self._grant: Grant | None = None
        self._delivered: list[int] = []
        self._thoughts = 0
        self._last = Produced(())
        self._waited = 0.0
        self._over = False
        self._gave_back = False
        self._broken = False
        self._heard = False

    @property
    def conversation(self) -> str | None:
        """The conversation this turn runs in, once it was admitted."""
        return self._grant.conversation if self._grant is not None else None

    @property
    def doubtful(self) -> bool:
        """It has rows from disk that no round has run on yet."""
        return self._grant is not None and self._grant.restored > 0 and not self._heard

    async def run(self) -> None:
        try:
            await self._admitted()
            while not self._over:
                await self.work(await self.mailbox.receive())
        except OnecopyError as error:
            self._out.close(error)
        except Exception as bug:
            # A crash is no orderly end: `stopping` will not run, and the lease must go back all the same.
            self._out.close(bug)
            await self._give_back()
            raise

    async def stopping(self) -> None:
        self._broken = self._broken or not self._lane.alive
        await self._give_back()
        self._out.close(lane_crashed() if self._broken else ActorStopped("The turn was stopped.", retry_after=1.0))

    async def _give_back(self) -> None:
        """The lease, or the place in the queue, goes back once, after the last commit of the turn's rows."""
        if self._gave_back:
            return
        self._gave_back = True
        with trio.CancelScope(shield=True):
            if self._grant is not None and self._last.end is None:
                try:
                    await self._lane.ask(Cancel(self._work.turn))
                except OnecopyError:  # a lane that is down runs nothing, and nobody knows what its last round left
                    self._broken = True
            await self._release(len(self._spec.tokens) + max(0, len(self._delivered) - 1))

    async def _release(self, keep: int) -> None:
        """A full mailbox is waited for: a lease that was lost on the way would be lost for ever."""
        while True:
            try:
                self._bank.tell(Release(self._work.turn, keep, self._broken))
                return
            except Overloaded:
                await self._clock.sleep(AGAIN)

    async def _admitted(self) -> None:
        """Waits for rows while hearing of the queue, then starts the lane on them."""
        begun = self._clock.now()
        ask = Admit(self._work.turn, _wanted(self._work), self._work.name, self.ref)
        refused: OnecopyError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hear_queue)
            try:
                self._grant = await self._bank.ask(ask)
            except OnecopyError as error:
                refused = error
            nursery.cancel_scope.cancel()
        if self._grant is None:
            raise refused or ActorStopped("The bank gave no answer.", retry_after=1.0)
        self._waited = self._clock.now() - begun
        grant = self._grant
        await self._put([Started(grant.conversation, len(self._spec.tokens), grant.matched, self._spec.sampling.seed)])
        self._lane.tell(Begin(self._work.turn, self._spec, grant.lease, grant.matched, self.ref, self._work.matcher))

    async def _hear_queue(self) -> None:
        while True:
            await self.work(await self.mailbox.receive())

    # --- what is heard

    @handles(Waiting)
    async def waiting(self, message: Waiting) -> None:
        await self._put([Queued(message.position, message.estimate)])

    @handles(Filled)
    async def filled(self, message: Filled) -> None:
        self._heard = True
        await self._put([Prefilling(message.done, message.total)])

    @handles(Broken)
    def broken(self, message: Broken) -> None:
        self._broken = True
        raise message.error

    @handles(Produced)
    async def produced(self, message: Produced) -> None:
        if self._over:
            return
        self._heard = True
        pieces: list[Piece] = []
        stopped = False
        for pick in message.picks:
            self._delivered.append(pick.token)
            pieces += self._read(pick)
            stopped = self._work.reader is not None and self._work.reader.stopped
            if stopped:
                break
        self._last = message
        if stopped or message.end is not None:
            self._over = True
            reason: FinishReason = "stop" if stopped else message.end or "stop"
            pieces += self._finish(reason)
        if self._over:
            # First the lease, then the last pieces: memory must not wait for a client, and whoever reads that the
            # turn is over may continue it at once.
            await self._give_back()
        await self._put(pieces)
        if self._over:
            self._out.close()
        else:
            self._lane.tell(Consumed(self._work.turn, len(message.picks)))

    async def _put(self, pieces: list[Piece]) -> None:
        if pieces:
            await self._out.put(pieces)

    # --- reading the reply

    def _read(self, pick: Pick) -> Sequence[Piece]:
        logprob = self._logprob(pick)
        if self._work.reader is None:
            return [Text("", (pick.token,), (logprob,) if logprob else ())]
        pieces = self._work.reader.feed(pick.token, logprob)
        self._thoughts += sum(len(p.tokens) for p in pieces if type(p).__name__ == "Reasoning")
        return pieces

    def _logprob(self, pick: Pick) -> TokenLogprob | None:
        if pick.logprob is None:
            return None
        spell = self._work.spell
        return TokenLogprob(pick.token, pick.logprob, spell(pick.token), tuple((t, p, spell(t)) for t, p in pick.top))

    def _finish(self, reason: FinishReason) -> list[Piece]:
        reader, grant, last = self._work.reader, self._grant, self._last
        assert grant is not None
        pieces: list[Piece] = list(reader.finish(cut=reason == "length")) if reader is not None else []
        usage = Usage(len(self._spec.tokens), len(self._delivered), grant.matched, self._thoughts)
        pieces.append(
            Finished(
                reader.finish_reason(reason) if reader is not None else reason,
                usage,
                self._receipt(grant, last),
                token_sha(self._delivered),
                self._spec.sampling.seed,
                stop=reader.stop if reader is not None else None,
                detail=last.detail,
            )
        )
        return pieces

    def _receipt(self, grant: Grant, last: Produced) -> Receipt:
        forked = grant.how in ("forked", "copied")
        return Receipt(
            how=grant.how,
            rows_adopted=0 if forked else grant.matched - grant.restored,
            rows_forked=grant.matched - grant.restored if forked else 0,
            rows_restored=grant.restored,
            rows_prefilled=len(self._spec.tokens) - grant.matched,
            diverged_at=grant.diverged,
            copied=grant.copied,
            bytes_written=grant.written,
            price_bytes=grant.price,
            peak_bytes=grant.peak,
            queued_s=self._waited,
            rounds=last.rounds,
            drafted=last.drafted,
            accepted=last.accepted,
            compiled=last.compiled,
            exact=self._work.exact,
        )

    def statistics(self) -> dict[str, Any]:
        return {**super().statistics(), "delivered": len(self._delivered)}


def lane_crashed() -> LaneCrashed:
    """What a client hears of a round that failed. A stop for a restart may overtake the lane's own word."""
    return LaneCrashed("The round failed; the conversation is intact.", retry_after=1.0)


def _wanted(work: Work) -> Wanted:
    spec = work.spec
    fixed = work.fixed and spec.draft
    return Wanted(spec.tokens, spec.max_new, spec.salt, spec.hint, fixed=fixed, starts=work.starts)


def token_sha(tokens: Sequence[int]) -> str:
    """A short digest over the token ids: equal replies have equal digests, however they were computed."""
    return hashlib.sha256(np.asarray(tokens, dtype="<u4").tobytes()).hexdigest()[:16]
