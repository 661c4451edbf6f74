"""What the lane is asked and told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecopy.runtime.core import Ask, Message, Ref
from onecopy.runtime.rows.segments import Lease
from onecopy.runtime.text.grammar import Matcher
from onecopy.runtime.turn import TurnSpec


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Run a turn. position: rows it already has. matcher: the grammar's state, the lane's alone from here on."""

    turn: int
    spec: TurnSpec
    lease: Lease
    position: int
    to: Ref
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Cancel(Ask[int]):
    """Take a turn out of the rounds; answered with the rows it has, once no round touches it. Unknown turns: -1.

    Not a control message: it must not overtake the turn's own `Begin`.
    """

    due = True
    turn: int


@dataclass(frozen=True, slots=True)
class Consumed(Message):
    """The session has taken so many tokens of a turn on; the lane may send as many more."""

    due = True
    turn: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LaneStatistics(Ask[dict[str, Any]]):
    control = True
