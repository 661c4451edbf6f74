"""What a session hears from the bank and the lane."""

from __future__ import annotations

from dataclasses import dataclass

from onecopy.runtime.core import Message
from onecopy.runtime.decode import Pick
from onecopy.runtime.turn import FinishReason


@dataclass(frozen=True, slots=True)
class Waiting(Message):
    """The turn is queued at the bank. position 1 is next; estimate in seconds, None when unknown."""

    position: int
    estimate: float | None


@dataclass(frozen=True, slots=True)
class Filled(Message):
    """Prompt rows computed so far, of all that were to be computed."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Produced(Message):
    """Tokens of the reply, in order. end: why these are the last, None when more may follow."""

    due = True
    picks: tuple[Pick, ...]
    end: FinishReason | None = None
    detail: str | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    compiled: int = 0


@dataclass(frozen=True, slots=True)
class Broken(Message):
    """The lane lost this turn; the error is for the client."""

    due = True
    error: Exception
