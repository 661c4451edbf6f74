"""What of a conversation and a turn can be read outside the trio thread: the same attributes, of the same objects."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from onecopy.actors.service import ModelCard
from onecopy.runtime.turn import Receipt

from .answer import Answer
from .conversation import Conversation
from .portal import Portal
from .runtime import Runtime
from .sent import Sent
from .settings import Tools

I = TypeVar("I")  # noqa: E741


class View(Generic[I]):
    """Something on the trio thread, and the way there."""

    def __init__(self, inner: I, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal


class ConversationView(View[Conversation]):
    """A conversation. `messages` is the list itself: yours to read and, between turns, to edit."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self._inner.messages

    @property
    def tools(self) -> Tools:
        return self._inner.tools

    @property
    def key(self) -> str:
        """Sent as `prompt_cache_key`."""
        return self._inner.key

    @property
    def session(self) -> str | None:
        """The id at the bank after the first turn."""
        return self._inner.session

    @property
    def parent(self) -> str | None:
        """The session this one was forked from."""
        return self._inner.parent

    @property
    def receipt(self) -> Receipt | None:
        """What the last finished turn cost."""
        return self._inner.receipt

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the last finished turn: its prompt and its answer."""
        return self._inner.tokens

    @property
    def running(self) -> bool:
        """Whether a turn runs."""
        return self._inner.running


class SentView(View[Sent]):
    """One turn."""

    @property
    def whole(self) -> Answer:
        """The answer of a turn that was read to its end; Conflict before."""
        return self._inner.whole

    @property
    def finished(self) -> bool:
        """Whether the turn was read to its end."""
        return self._inner.finished


class RuntimeView(View[Runtime]):
    """A runtime."""

    @property
    def card(self) -> ModelCard:
        """The served model."""
        return self._inner.card


__all__ = ["ConversationView", "RuntimeView", "SentView", "View"]
