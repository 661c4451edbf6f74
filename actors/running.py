"""A turn while it runs: its tokens, its rows, and what one round asks for it and brings it. Pure, no trio, no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onecopy.runtime.core import Ref
from onecopy.runtime.decode import Drafter, Pick, Prices, TokenCounts, View, Want, drafter_for, verify, wants_for
from onecopy.runtime.rows.caches import Strip
from onecopy.runtime.rows.segments import Lease
from onecopy.runtime.text.grammar import Mask, Matcher
from onecopy.runtime.turn import FinishReason, TurnSpec

from .messages.lane import Begin

UNREAD = 64
"""Tokens sent and not yet taken by the session before a turn pauses: a slow reader costs its own reply only."""


@dataclass(frozen=True, slots=True)
class Brought:
    """What a round brought one turn.

    rows: tokens that became rows. picks: what is delivered. end: why the reply ends here. drafted: tokens that were
    proposed, accepted: those of them that were delivered.
    """

    rows: tuple[int, ...]
    picks: tuple[Pick, ...] = ()
    end: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True, eq=False)
class Running:
    """One turn in the lane. `tokens` is the conversation: the prompt and what was delivered. `position` counts rows.

    A reply's newest token is delivered before it is a row: while decoding, `position == len(tokens) - 1`.
    """

    id: int
    spec: TurnSpec
    lease: Lease
    position: int
    to: Ref
    order: int
    eos: frozenset[int]
    prices: Prices = field(default_factory=Prices)
    matcher: Matcher | None = None
    tokens: list[int] = field(default_factory=list)
    counts: TokenCounts | None = None
    drafter: Drafter | None = None
    proposal: tuple[int, ...] = ()
    passed: int = 0
    rounds: int = 0
    unread: int = 0
    drafted: int = 0
    accepted: int = 0
    compiled: int = 0
    first: int = 0

    @classmethod
    def of(cls, begin: Begin, order: int, eos: frozenset[int], prices: Prices) -> Running:
        """The turn at its start: its prompt, and the rows it was granted."""
        spec = begin.spec
        made = cls(begin.turn, spec, begin.lease, begin.position, begin.to, order, eos, prices, begin.matcher)
        made.tokens = list(spec.tokens)
        made.counts = TokenCounts.wanted(spec.sampling, spec.tokens)
        made.first = begin.position
        return made

    @property
    def prompt(self) -> int:
        return len(self.spec.tokens)

    @property
    def left(self) -> int:
        """Prompt rows still to compute."""
        return max(0, self.prompt - self.position)

    @property
    def produced(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def paused(self) -> bool:
        return self.unread >= UNREAD

    @property
    def stuck(self) -> bool:
        """The next row lies in no leaf: it takes growth to go on."""
        return self.lease.room(self.position) == 0

    def propose(self) -> None:
        """Sets the proposal for the next round: within the leaf, the answer's length and what the grammar allows."""
        self.proposal = ()
        if self.drafter is None or self.left:
            return
        most = min(self.prices.limit, self.lease.room(self.position) - 1, self.spec.max_new - self.produced - 1)
        self.proposal = self.drafter.propose(most) if most > 0 else ()
        if self.proposal and self.matcher is not None:
            self.proposal = self.proposal[: self.matcher.accepts(self.proposal)]

    def view(self) -> View:
        return View(
            self.id,
            self.position,
            self.left,
            self.order,
            self.spec.priority,
            self.passed,
            self.rounds,
            len(self.proposal),
        )

    # --- a round

    def chunk(self, end: int) -> tuple[Strip, tuple[Want, ...]]:
        """Prompt rows up to `end` and, with the last of them, what the first pick wants."""
        end, keep = self._to_mark(min(end, self.position + self.lease.room(self.position)))
        chain, tokens = self.lease.chain(self.position), tuple(self.tokens[self.position : end])
        if end < self.prompt:
            return Strip(chain, self.position, tokens, then=self.tokens[end], keep=keep), ()
        self._start_drafting()
        return Strip(chain, self.position, tokens, 1, draft=self._ahead()), self._wants(())

    def _to_mark(self, end: int) -> tuple[int, int | None]:
        """Where a chunk ends that reaches a mark on the way, and the anchor that is kept there."""
        mark = next((m for m in self.lease.marks if self.position < m.position <= end), None)
        return (end, None) if mark is None else (mark.position, mark.anchor)

    def decode(self, width: int) -> tuple[Strip, tuple[Want, ...]]:
        """The newest token and the first `width - 1` proposed ones, with one want a row."""
        self.proposal = self.proposal[: width - 1]
        rows = (self.tokens[-1], *self.proposal)
        chain = self.lease.chain(self.position)
        strip = Strip(chain, self.position, rows, len(rows), draft=self._ahead())
        return strip, self._wants(self.proposal)

    def _ahead(self) -> int:
        """Tokens the device is to propose for the round after this one, which brings one token at least."""
        limit = min(self.prices.limit, self.spec.max_new - self.produced - 2)
        return self.drafter.ahead(limit) if self.drafter is not None and limit > 0 else 0

    def offer(self, tokens: tuple[int, ...]) -> None:
        """The device proposes these to follow the newest token."""
        if tokens and self.drafter is not None:
            self.drafter.offer(tokens)

    def _wants(self, proposal: tuple[int, ...]) -> tuple[Want, ...]:
        return wants_for(self.spec.sampling, len(self.tokens), proposal, self.counts, self._masks(proposal))

    def _masks(self, proposal: tuple[int, ...]) -> list[Mask | None]:
        if self.matcher is None:
            return []
        masks: list[Mask | None] = [self.matcher.mask()]
        taken = 0
        for token in proposal:
            if not self.matcher.accept(token):
                break
            taken += 1
            masks.append(self.matcher.mask())
        self.matcher.rollback(taken)
        return masks

    def filled(self, strip: Strip, picks: Sequence[Pick]) -> Brought:
        """After a chunk."""
        self.position = strip.end
        if not picks:
            return Brought(strip.tokens)
        kept, end = self._deliver(picks)
        return Brought(strip.tokens, kept, end)

    def decoded(self, picks: Sequence[Pick], compiled: bool = False) -> Brought:
        """After a decode: keeps the drafts that equal the picks and delivers what the picks say."""
        self.rounds += 1
        self.compiled += compiled
        drafted, verdict = len(self.proposal), verify(self.proposal, [p.token for p in picks])
        kept, end = self._deliver(picks[: len(verdict.tokens)])
        accepted = min(verdict.kept, len(kept))
        self.drafted += drafted
        self.accepted += accepted
        rows = tuple(self.tokens[self.position : len(self.tokens) - 1])
        self.position += len(rows)
        return Brought(rows, kept, end, drafted, accepted)

    def _deliver(self, picks: Sequence[Pick]) -> tuple[tuple[Pick, ...], FinishReason | None]:
        out: list[Pick] = []
        end: FinishReason | None = None
        for pick in picks:
            out.append(pick)
            end = self._took(pick.token)
            if end is not None:
                break
        new = [p.token for p in out]
        if self.counts is not None:
            self.counts.extend(new)
        if self.drafter is not None:
            self.drafter.accept(new)
        self.unread += len(out)
        return tuple(out), end

    def _took(self, token: int) -> FinishReason | None:
        self.tokens.append(token)
        if token in self.eos and not self.spec.ignore_eos:
            return "stop"
        if self.matcher is not None:
            self.matcher.accept(token)
            if self.matcher.finished:
                return "stop"
        return "length" if self.produced >= self.spec.max_new else None

    def _start_drafting(self) -> None:
        if self.spec.draft and self.drafter is None and self.prices.widths:
            self.drafter = drafter_for(self.tokens, self.prices)
