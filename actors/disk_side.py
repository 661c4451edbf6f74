"""The bank's side of the disk: `DiskSide` with a rows store, `NoDisk` without one. Called from the bank's own task."""

from __future__ import annotations

from collections.abc import Callable

import trio
from onecopy.runtime.core import Ref, Reply
from onecopy.runtime.errors import Unsupported
from onecopy.runtime.rows.ledger import Conversation, Grant, Ledger, Shortage, Turn
from onecopy.runtime.seams.clock import Clock

from .away import Away, OnDisk
from .keeping import NOTHING, Keeping
from .messages.bank import Admit, Kept, Preserved, Restored, Saved, Source
from .restoring import Restoring
from .rows_door import RowsDoor


class NoDisk:
    """Rows live in memory alone. Its methods say what a bank may ask of the disk, and answer that there is none."""

    def __init__(self) -> None:
        self.away = Away()

    def begin(self, bank: Ref, nursery: trio.Nursery, order: Callable[[], None]) -> None:
        """Before the first message: where to report to, where to run, and how the device gets the books' orders."""

    async def flush(self) -> None:
        """At the end: what is not on disk yet goes there, within its time."""

    def tend(self, *, waiting: bool) -> None:
        """From time to time. waiting: turns wait for memory."""

    @property
    def busy(self) -> bool:
        """A save is under way: the rows it holds may soon be free to go."""
        return False

    def before_drop(self, conversation: Conversation) -> bool:
        """For the books: whether rows that are not on disk may go."""
        return True

    def on_disk(self, conversation: Conversation) -> OnDisk:
        """What the disk has of a conversation in memory."""
        return NOTHING

    # --- admission

    def worth_a_look(self, ask: Admit) -> bool:
        """Whether to `look` before rows are granted."""
        return False

    def look(self, ask: Admit, reply: Reply[Grant]) -> None:
        """Looks what the disk has of a prompt; the bank hears `LookedUp`."""

    def name(self, ask: Admit, source: Source) -> str:
        """What a new conversation over these rows is called: one that comes back from disk keeps its name."""
        return ask.conversation

    def admitted(self, got: Grant | Shortage) -> None:
        """The books have answered a turn, and may have given up others' rows for it."""

    def extends(self, ask: Admit, grant: Grant, source: Source) -> bool:
        """Whether the disk has more of the prompt than the grant."""
        return False

    def restore(self, ask: Admit, reply: Reply[Grant], grant: Grant, source: Source) -> None:
        """Fills granted rows from disk; the bank hears `Restored`."""

    def restoring(self, turn: int) -> bool:
        """Whether rows of a turn are on their way from disk."""
        return False

    def restored(self, message: Restored) -> Grant | None:
        """Enters restored rows in the books; the grant as it is now, None when its buffers cannot be believed."""
        return message.grant

    def written(self, conversation: str) -> int:
        """Bytes written for a conversation since this was last asked."""
        return 0

    # --- a running turn

    def after_rows(self, turn: Turn) -> None:
        """A round has written rows of a turn."""

    def failed(self, turn: int) -> int | None:
        """A turn's round failed. Rows it had before rows came from disk that no round has run on, else None."""
        return None

    def ended(self, turn: int, conversation: Conversation) -> None:
        """A turn has given its lease back."""

    # --- conversations

    def preserve(self, conversation: Conversation, reply: Reply[Kept], forget: bool) -> None:
        """Saves an idle conversation to its last row; the bank hears `Preserved`."""
        raise Unsupported("This server keeps no rows on disk, so there is nowhere to put a session.")

    def preserved(self, message: Preserved) -> Conversation:
        """The conversation that was preserved. Raises what went wrong."""
        raise AssertionError("nothing can be preserved without a disk")

    def left(self, conversation: Conversation) -> Kept | None:
        """A conversation has left memory; how it is known from now on, if the disk has any of it."""
        return None

    def erase(self, tip: bytes, reply: Reply[None]) -> None:
        """Drops the rows of a conversation that has left memory from disk, then answers."""
        reply.set(None)

    def saved(self, message: Saved) -> None:
        """A save has ended."""


class DiskSide(NoDisk):
    """Restores at admission, saves whenever rows have settled. drain: seconds that the last saves may take."""

    def __init__(self, ledger: Ledger, door: RowsDoor, store: Ref, stager: Ref, clock: Clock, drain: float) -> None:
        super().__init__()
        self._ledger = ledger
        self._drain = drain
        self._dropped = 0
        self._nursery: trio.Nursery
        self._keeping = Keeping(ledger, door, store, stager, clock)
        self._restoring = Restoring(ledger, door, store, stager, clock)

    def begin(self, bank: Ref, nursery: trio.Nursery, order: Callable[[], None]) -> None:
        self._nursery = nursery
        self._keeping.begin(bank, nursery, order)
        self._restoring.begin(bank, nursery)

    async def flush(self) -> None:
        await self._keeping.flush(self._drain)

    def tend(self, *, waiting: bool) -> None:
        if waiting:
            self._keeping.hurry()
        self._keeping.retry()

    @property
    def busy(self) -> bool:
        return self._keeping.busy

    def on_disk(self, conversation: Conversation) -> OnDisk:
        return self._keeping.on_disk(conversation)

    def before_drop(self, conversation: Conversation) -> bool:
        return self._keeping.before_drop(conversation)

    # --- admission

    def worth_a_look(self, ask: Admit) -> bool:
        return self._restoring.worth_a_look(ask)

    def look(self, ask: Admit, reply: Reply[Grant]) -> None:
        self._restoring.look(ask, reply)

    def name(self, ask: Admit, source: Source) -> str:
        known = self.away.named(source.tips, ask.wanted.salt)
        return ask.conversation if known is None or known in self._ledger.conversations else known

    def admitted(self, got: Grant | Shortage) -> None:
        if isinstance(got, Grant):
            self.away.remove(got.conversation)
        if self._ledger.totals.dropped != self._dropped:
            self._dropped = self._ledger.totals.dropped
            for conversation, disk in self._keeping.take_gone():
                self.away.add(conversation, disk)

    def extends(self, ask: Admit, grant: Grant, source: Source) -> bool:
        return self._restoring.extends(ask, grant, source)

    def restore(self, ask: Admit, reply: Reply[Grant], grant: Grant, source: Source) -> None:
        self._restoring.restore(ask, reply, grant, source)

    def restoring(self, turn: int) -> bool:
        return turn in self._restoring.under_way

    def restored(self, message: Restored) -> Grant | None:
        grant = self._restoring.restored(message)
        if grant is not None:
            self._keeping.came_back(grant, message.source)
        return grant

    def written(self, conversation: str) -> int:
        return self._keeping.written(conversation)

    # --- a running turn

    def after_rows(self, turn: Turn) -> None:
        self._restoring.proven(turn.id)
        written = [s for s in turn.leaves if s.tokens]
        if written:
            self._keeping.after_rows(turn.conversation, written[-1])

    def failed(self, turn: int) -> int | None:
        return self._restoring.failed(turn)

    def ended(self, turn: int, conversation: Conversation) -> None:
        self._restoring.proven(turn)
        if conversation.id in self._ledger.conversations:
            self._keeping.save(conversation, conversation.tip)

    # --- conversations

    def preserve(self, conversation: Conversation, reply: Reply[Kept], forget: bool) -> None:
        self._keeping.preserve(conversation, reply, forget)

    def preserved(self, message: Preserved) -> Conversation:
        return self._keeping.preserved(message)

    def left(self, conversation: Conversation) -> Kept | None:
        self.away.add(conversation, self._keeping.take(conversation))
        return self.away.get(conversation.id)

    def erase(self, tip: bytes, reply: Reply[None]) -> None:
        self._nursery.start_soon(self._erase, tip, reply)

    async def _erase(self, tip: bytes, reply: Reply[None]) -> None:
        await self._keeping.erase(tip)
        reply.set(None)

    def saved(self, message: Saved) -> None:
        self._keeping.saved(message)
