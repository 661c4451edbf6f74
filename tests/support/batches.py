"""Messages that the bank finds in one batch, in the order a test wants: what comes around an admission."""

from __future__ import annotations

from typing import Any

from onecopy.actors.messages.bank import Admit, Fork
from onecopy.actors.system import System
from onecopy.runtime.core import Envelope, Message, Reply


def beside_admission(system: System, message: Message, *, first: bool) -> Reply[Any]:
    """Has the bank find `message` in the same batch as the next `Admit`, before or behind it."""
    bank: Any = system._supervisor.actor("bank")
    dispatch, answer = bank.dispatch, Reply[Any]()

    async def both(envelope: Envelope) -> None:
        if not isinstance(envelope.message, Admit):
            await dispatch(envelope)
            return
        bank.dispatch = dispatch
        other = Envelope(message, answer if isinstance(message, Fork) else None)
        for one in (other, envelope) if first else (envelope, other):
            await dispatch(one)

    bank.dispatch = both
    return answer
