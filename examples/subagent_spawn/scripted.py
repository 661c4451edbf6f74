"""A model made of rules over the bank's real books: who shares which rows is computed, only the text is scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import trio
from onecopy.actors.service import SessionInfo
from onecopy.runtime.errors import Conflict, InsufficientMemory, NotFound
from onecopy.runtime.rows.layout import LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ledger import Conversation, Grant, Ledger, Wanted
from onecopy.runtime.text.tokenizer import Tokenizer
from onecopy.runtime.turn import Finished, Piece, Receipt, Started, TurnSpec

from tests.support.scripted import Say, ScriptedService
from tests.support.tokens import CHATML, byte_tokenizer

LAYOUT = Layout((LayerLayout("attention", (RowTensor("keys", 3, 64), RowTensor("values", 3, 64))),) * 30)
"""Rows as large as those of SmolLM2-135M."""
ARGUMENTS = {"list_dir": {"path": "."}, "read_file": {"path": "api/sse.py"}, "grep": {"text": "class "}}


class LedgerService(ScriptedService):
    """A scripted service whose sessions, receipts and bytes come from a ledger, as a bank's would.

    before: awaited by each turn between its admission and its first token.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, budget: int = 8 << 30) -> None:
        super().__init__(self.reply, tokenizer=tokenizer or byte_tokenizer(CHATML), context=1 << 17)
        self.before: Callable[[], Awaitable[None]] | None = None
        self.card = replace(self.card, features={"row_bytes": LAYOUT.row_bytes})
        self.ledger = Ledger(LAYOUT, budget)
        self.turns = count(1)

    def reply(self, spec: TurnSpec) -> Say:
        """A call of the tool that was chosen; else a report, or a word for a file that was shown."""
        choice = spec.format.tool_choice
        if choice in ARGUMENTS:
            return Say(
                "<tool_call>\n" + json.dumps({"name": choice, "arguments": ARGUMENTS[choice]}) + "\n</tool_call>"
            )
        tail = self.tokenizer.decode(spec.tokens[-400:])
        return Say("I looked, and it is in order." if "tool_response" in tail else "Noted.", before=self.before)

    @asynccontextmanager
    async def turn(self, spec: TurnSpec) -> AsyncIterator[AsyncIterator[Piece]]:
        number = next(self.turns)
        grant = self.ledger.admit(
            number, Wanted(spec.tokens, spec.max_new, spec.salt, spec.hint), self.new_id("s_"), trio.current_time()
        )
        if not isinstance(grant, Grant):
            raise InsufficientMemory(
                needed=grant.needed,
                available=grant.available,
                holders=grant.holders,
                largest_prompt=grant.largest_prompt,
            )
        self.ledger.execute(number)
        written: list[int] = []
        try:
            async with super().turn(spec) as pieces:
                yield self._accounted(spec, grant, pieces, number, written)
        finally:
            keep = len(spec.tokens) + max(0, len(written) - 1) if written else grant.matched
            self.ledger.release(number, keep, trio.current_time())
            self.ledger.take_orders()

    async def _accounted(
        self, spec: TurnSpec, grant: Grant, pieces: AsyncIterator[Piece], number: int, written: list[int]
    ) -> AsyncIterator[Piece]:
        """The pieces with the ledger's facts in them; rows are committed as the lane would."""
        async for piece in pieces:
            tokens = getattr(piece, "tokens", ())
            if tokens:
                prompt = spec.tokens[grant.matched :] if not written else ()
                rows = (*prompt, *written[-1:], *tokens[:-1])
                written += tokens
                self._commit(number, rows)
            if isinstance(piece, Started):
                piece = replace(piece, session=grant.conversation, cached=grant.matched)
            elif isinstance(piece, Finished):
                piece = replace(
                    piece,
                    usage=replace(piece.usage, cached=grant.matched),
                    receipt=_receipt(grant, len(spec.tokens)),
                )
            yield piece

    def _cached(self, spec: TurnSpec) -> int:
        return 0  # the ledger knows

    def _commit(self, number: int, rows: tuple[int, ...]) -> None:
        room = sum(s.end - s.frontier for s in self.ledger.turns[number].leaves)
        if room < len(rows):
            self.ledger.grow(number, len(rows) - room)
        self.ledger.commit(number, rows)

    async def sessions(self) -> list[SessionInfo]:
        return [self._info(c) for c in self.ledger.conversations.values()]

    async def session(self, id: str) -> SessionInfo:
        return self._info(self._conversation(id))

    async def drop(self, id: str) -> None:
        if self._conversation(id).tip.lease is not None:
            raise Conflict("The session is running.")
        self.ledger.forget(id)

    async def metrics(self) -> dict[str, Any]:
        return {"bank": {"bytes_used": self.ledger.used, "segments": len(self.ledger.segments)}}

    def _conversation(self, id: str) -> Conversation:
        if id not in self.ledger.conversations:
            raise NotFound(f"There is no session {id!r}.")
        return self.ledger.conversations[id]

    def _info(self, c: Conversation) -> SessionInfo:
        state = "running" if c.tip.lease is not None else "idle"
        return SessionInfo(c.id, state, c.tip.frontier, self.ledger.owned_bytes(c), c.used, salt=c.salt)  # type: ignore[arg-type]


def _receipt(grant: Grant, prompt: int) -> Receipt:
    forked = grant.how in ("forked", "copied")
    return Receipt(
        grant.how,
        rows_adopted=0 if forked else grant.matched,
        rows_forked=grant.matched if forked else 0,
        rows_prefilled=prompt - grant.matched,
        diverged_at=grant.diverged,
        copied=grant.copied,
        exact="exact",
    )
