"""A conversation: its messages on this side, its rows at the bank, one turn at a time."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack
from weakref import ref

from onecopy.actors.service import ModelCard, Service, SessionInfo
from onecopy.runtime.errors import ActorStopped, BadRequest, Conflict
from onecopy.runtime.turn import Piece, Receipt, TurnSpec

from .feed import Feed
from .order import Prompt as Ids
from .order import Talk, render, specs
from .sent import Sent
from .settings import Prompt, Settings, Tools, checked, messages_in, plain, tools_in


class Home(Protocol):
    """What a conversation needs of its runtime."""

    @property
    def service(self) -> Service: ...
    @property
    def card(self) -> ModelCard: ...
    def start(self, spec: TurnSpec, *, timeout: float | None) -> Feed[Piece]: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Conversation:
    """Made by `Runtime.conversation`. `messages` is yours to read and, between turns, to edit.

    An edit costs what it changes: the next turn shares every row before the first different token.
    """

    home: Home = field(repr=False)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Tools = ()
    defaults: Settings = field(default_factory=lambda: Settings())
    key: str = ""
    """Sent as `prompt_cache_key`: tells the bank which of several equal rows are this conversation's own."""
    session: str | None = None
    """The id at the bank after the first turn."""
    receipt: Receipt | None = None
    """What the last finished turn cost."""
    parent: str | None = None
    """The session this one was forked from."""
    _ids: array[int] = field(default_factory=lambda: array("I"), repr=False)
    _running: ref[Sent] | None = field(default=None, repr=False)
    _feed: Feed[Piece] | None = field(default=None, repr=False)
    _ended: bool = field(default=False, repr=False)

    def send(
        self,
        messages: Prompt = (),
        *,
        tools: Tools | None = None,
        timeout: float | None = None,
        **settings: Unpack[Settings],
    ) -> Sent:
        """Says something. Iterate over the result for typed pieces, await it for the whole answer.

        messages: a user's text, a message or several (tool results, say); () lets the model go on from what is there.
        tools: instead of the conversation's own. timeout: seconds for the whole turn, then DeadlineExceeded. settings:
        override the conversation's defaults. When the turn has ended, what was said and the answer are part of
        `messages`; a turn that is cancelled or fails leaves them alone.

        Raises when read: Conflict (a turn already runs here: fork), BadRequest, ContextLengthExceeded,
        InsufficientMemory, Overloaded, ActorStopped and other members of the tree.
        """
        said = messages_in(messages)
        offered = self.tools if tools is None else tools
        given: Settings = {"prompt_cache_key": self.key, **self.defaults, **settings}
        asked: list[dict[str, Any]] = []
        prompt: list[Ids] = []

        async def open(sent: Sent) -> Feed[Piece]:
            await self._take_turn(sent)
            order, talk = checked(self.home.service, [*self.messages, *said], offered, given)
            asked[:] = [*self.messages, *plain(said)]
            prompt[:] = [await render(self.home.card, talk, _size(talk))]
            [spec] = specs(self.home.service, order, prompt[0])
            self._feed = self.home.start(spec, timeout=timeout)
            return self._feed

        def done(sent: Sent) -> None:
            if self._running is not None and self._running() in (sent, None):
                self._running = None
                if sent.finished:
                    self._keep(sent, asked, prompt[0], bool(given.get("continue_final_message")))

        return Sent(open, done)

    async def fork(self, at: int | None = None) -> Conversation:
        """Another conversation that goes on from here. The parent's rows are shared, never copied but a part block.

        Without `at` this is a copy of the messages, also while a turn runs, and rows are shared at the first send.
        at: share exactly the first `at` rows, reserved at the bank now; the messages that lie within them are kept.
        """
        child = Conversation(self.home, [dict(m) for m in self.messages], self.tools, self.defaults.copy())
        child.key, child.parent = self.home.service.new_id("chat_"), self.session
        if at is not None:
            if not 0 < at <= len(self._ids):
                raise BadRequest(f"at must be from 1 to {len(self._ids)}.", param="at")
            info = await self.home.service.fork(self._known(), at)
            child.session, child._ids = info.id, self._ids[:at]
            child.messages = self._within(at)
        return child

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the last finished turn: its prompt and its answer. () before the first, and when dropped."""
        return tuple(self._ids)

    @property
    def running(self) -> bool:
        """Whether a turn runs."""
        return self._running is not None and self._running() is not None

    async def info(self) -> SessionInfo:
        """The conversation as the bank sees it: rows, bytes only it holds, state. NotFound when its rows are gone."""
        return await self.home.service.session(self._known())

    async def pin(self, on: bool = True) -> SessionInfo:
        """Keeps its rows in memory whatever else is wanted, or stops doing so."""
        return await self.home.service.pin(self._known(), on)

    async def park(self) -> SessionInfo:
        """Writes its rows to disk and frees their memory. The next send restores them."""
        info = await self.home.service.park(self._known())
        self._ids = array("I")
        return info

    async def drop(self) -> None:
        """Forgets its rows, and ends its turn. The messages stay: a later send computes them again."""
        if self._feed is not None:
            await self._feed.close()
        if self.session is not None:
            await self.home.service.drop(self.session)
        self.session, self._ids = None, array("I")

    def end(self) -> None:
        """Cancels the turn that runs and refuses every later one with ActorStopped. For owners that are cancelled."""
        self._ended = True
        if self._feed is not None:
            self._feed.abandon()

    def _known(self) -> str:
        if self.session is None:
            raise Conflict("This conversation has no rows yet; send something first.")
        return self.session

    async def _take_turn(self, sent: Sent) -> None:
        if self._ended:
            raise ActorStopped("This conversation was ended.")
        if self.running:
            raise Conflict("A turn runs in this conversation already; fork it to run another.")
        self._running = ref(sent)
        if self._feed is not None:
            # A turn that was left early may still be ending; its rows are this turn's to go on from.
            await self._feed.close()

    def _keep(self, sent: Sent, asked: list[dict[str, Any]], prompt: Ids, goes_on: bool) -> None:
        answer = sent.whole
        message = answer.message
        if goes_on:
            message["content"] = asked.pop()["content"] + message["content"]
        self.messages[:] = [*asked, message]
        self.session, self.receipt = answer.session, answer.receipt
        self._ids = array("I", prompt.tokens) + array("I", answer.tokens)

    def _within(self, rows: int) -> list[dict[str, Any]]:
        """The leading messages whose rendering takes at most so many rows."""
        chat = self.home.card.chat
        assert chat is not None, "a conversation has a chat template"
        tools = checked(self.home.service, self.messages, self.tools, {})[0].tools
        kept = len(self.messages)
        while kept and len(chat.tokens(self.messages[:kept], tools, add_generation_prompt=False)) > rows:
            kept -= 1
        return [dict(m) for m in self.messages[:kept]]


def opened(
    home: Home, system: str | None, messages: Sequence[Mapping[str, Any]], tools: Tools, defaults: Settings
) -> Conversation:
    """A new conversation, checked now so that a wrong tool or setting is told where it was written."""
    first = [{"role": "system", "content": system}] if system else []
    made = [*first, *plain(messages)]
    checked(home.service, made or [{"role": "user", "content": "?"}], tools, defaults)
    return Conversation(home, made, tools_in(tools), defaults, home.service.new_id("chat_"))


def _size(talk: Talk) -> int:
    return sum(len(str(message.get("content") or "")) for message in talk.messages)


__all__ = ["Conversation", "Home", "opened"]
