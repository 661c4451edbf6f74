"""Messages: what actors say to each other. A tell is a `Message`, a question an `Ask[R]` answered with an R."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from .reply import Reply

R = TypeVar("R")


class Message:
    """Base of every message. Subclasses are frozen slotted dataclasses.

    control: True puts the message in the mailbox's control queue, which is drained before work.
    due: True is for what comes back to an actor that handed something out, or that it waits for. A full mailbox takes
    it too: there can be no more of these than was handed out, and refusing one would lose that for good.
    """

    __slots__ = ()
    control: ClassVar[bool] = False
    due: ClassVar[bool] = False


class Ask(Message, Generic[R]):
    """A message that is answered exactly once, with an R or with an error."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Envelope:
    """A message on its way. reply: where its answer goes; None for a tell."""

    message: Message
    reply: Reply[Any] | None = None
