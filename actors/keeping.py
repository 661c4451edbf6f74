"""What the bank saves, and when: after turns, during long prefills, before rows are given up, on request, at the end.

Part of the bank, not an actor: it touches the bank's books only from the bank's own task, and reports back to it by
messages. Rows that could not be written stay dirty and are tried again; no answer waits for a disk that fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import trio
from onecopy.runtime.core import Ref, Reply
from onecopy.runtime.errors import Conflict, NotFound, OnecopyError, Unavailable
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ledger import Conversation, Grant, Ledger
from onecopy.runtime.rows.segments import Segment, chain_tokens
from onecopy.runtime.seams.clock import Clock

from .away import OnDisk
from .messages.bank import Kept, Preserved, Saved, Source
from .messages.stager import CancelSave, Forgotten, RowsReader, Save
from .messages.store import DropConversation, Supersede
from .rows_door import RowsDoor, StateDoor

LOG = logging.getLogger("onecopy.store")

EVERY = 8
"""Blocks of a running prefill between two saves: what a crash can cost, against records written twice for nothing."""

PATIENCE = 5.0
"""Seconds that a turn which waits for memory gives a save of idle rows before they go as they are."""

RETRY = 30.0
"""Seconds before rows that could not be written are tried again."""

LEAST_STATES = 2
"""Recurrent states of a conversation that stay on disk however large they are: an edit of its end goes back to one."""

HOLD, KEEP = "save", "preserve"
NOTHING = OnDisk(())


class Keeping:
    """Saves for one bank. `bank` hears `Saved` and `Preserved`."""

    def __init__(self, ledger: Ledger, door: RowsDoor, store: Ref, stager: Ref, clock: Clock) -> None:
        self._ledger = ledger
        self._door = door
        self._store = store
        self._stager = stager
        self._clock = clock
        self._disk: dict[str, OnDisk] = {}
        self._of: dict[str, Conversation] = {}
        self._saving: dict[str, float] = {}
        self._failed: dict[str, float] = {}
        self._written: dict[str, int] = {}
        self._parted: dict[str, set[int]] = {}
        self._recurrent = ledger.layout.recurrent
        self._bank: Ref
        self._nursery: trio.Nursery
        self._order: Callable[[], None]

    def begin(self, bank: Ref, nursery: trio.Nursery, order: Callable[[], None]) -> None:
        self._bank = bank
        self._nursery = nursery
        self._order = order

    @property
    def busy(self) -> bool:
        """A save is under way: the rows it holds may soon be free to go."""
        return bool(self._saving)

    def on_disk(self, conversation: Conversation, leaf: Segment | None = None) -> OnDisk:
        """What the disk has of its rows as they are now; leaf: where they end, its tip by default."""
        return self._disk.get(conversation.id, NOTHING).upto((leaf or conversation.tip).saved)

    def written(self, conversation: str) -> int:
        """Bytes written for a conversation since this was last asked."""
        return self._written.pop(conversation, 0)

    # --- saves

    def after_rows(self, conversation: Conversation, leaf: Segment) -> None:
        """A running turn has written rows: a long prefill is saved as it goes."""
        due = leaf.frontier - leaf.saved >= EVERY * BLOCK and not self._recurrent
        if due and conversation.id not in self._failed:
            self.save(conversation, leaf)

    def save(self, conversation: Conversation, leaf: Segment) -> None:
        """Starts a save of whole blocks (and of a recurrent state), unless one runs or nothing is new."""
        if conversation.id in self._saving or not self._dirty(leaf):
            return
        wish = self._wish(conversation, leaf, whole=not self._recurrent)
        if wish is None:
            return
        leaf.holds[HOLD] = len(wish.tokens)
        self._saving[conversation.id] = self._clock.now()
        self._nursery.start_soon(self._save, leaf.id, wish)

    def _dirty(self, leaf: Segment) -> bool:
        return (leaf.frontier if self._recurrent else leaf.frontier // BLOCK * BLOCK) > leaf.saved

    def _wish(self, conversation: Conversation, leaf: Segment, *, whole: bool) -> Save | None:
        """whole: blocks only; otherwise what is behind the last one too, as the state at the end.

        None when a recurrent state is not the one at the end of the rows, or cannot be kept while it is written.
        """
        reader: RowsReader = self._door
        if self._recurrent:
            anchor = self._ledger.keep_state(leaf.id)
            if anchor is None:
                return None
            reader = self._door.with_state(anchor)
        rows = leaf.frontier // BLOCK * BLOCK if whole else leaf.frontier
        tokens, known = tuple(chain_tokens(leaf, rows)), self.on_disk(conversation, leaf).keys
        used = int(self._clock.wall() - (self._clock.now() - conversation.used))
        waypoints = tuple(self._waypoints(conversation, leaf, tokens))
        return Save(
            conversation.id, tokens, leaf.id, reader, conversation.salt, not whole, known, used, waypoints=waypoints
        )

    def _waypoints(
        self, conversation: Conversation, leaf: Segment, tokens: tuple[int, ...]
    ) -> Iterator[tuple[int, RowsReader]]:
        """States where other prompts left this one: after a restart the next such prompt goes on from there.

        An ancestor may have marks past the place where these rows left it: they are behind other tokens.
        """
        there = self._parted.get(conversation.id, frozenset[int]())
        for s in leaf.ancestors() if self._recurrent else ():
            for at in s.marks:
                if s.anchors[at] not in there and tuple(chain_tokens(s, at)) == tokens[:at]:
                    yield at, self._door.with_state(s.anchors[at])

    async def _save(self, segment: int, wish: Save) -> None:
        report = None
        with contextlib.suppress(OnecopyError):
            report = await self._stager.ask(wish)
        self._bank.tell(Saved(wish.owner, segment, report, _state(wish), _anchors(wish)))

    def saved(self, message: Saved) -> None:
        """The hold goes; what the report names is on disk. Rows that came meanwhile are next."""
        name = message.conversation
        self._saving.pop(name, None)
        leaf = self._ledger.segments.get(message.segment)
        if leaf is not None:
            leaf.holds.pop(HOLD, None)
        self._let_go(message)
        found = self._ledger.conversations.get(name)
        if found is None:
            self._forget(name)
            return
        self._note(message)
        if name in self._failed or found.tip.lease is not None:
            return
        self.save(found, found.tip)

    def _let_go(self, message: Saved) -> None:
        if message.state is not None:
            self._ledger.drop_state(message.state)

    def _note(self, message: Saved) -> None:
        name, report = message.conversation, message.report
        if report is None or not report.complete:
            self._failed[name] = self._clock.now()
        else:
            self._failed.pop(name, None)
            self._parted.setdefault(name, set()).update(message.waypoints)
        if report is None:
            return
        self._written[name] = self._written.get(name, 0) + report.written
        leaf = self._ledger.segments.get(message.segment)
        if leaf is not None:
            leaf.saved = max(leaf.saved, min(report.rows, leaf.frontier))
        self._replace(name, OnDisk(report.keys, report.anchor, report.rows))

    def _replace(self, name: str, now: OnDisk) -> None:
        """A state behind the last block that a later state has overtaken serves nobody."""
        before = self._disk.get(name, NOTHING)
        if before.anchor and before.anchor != now.anchor and now.rows > before.rows:
            now = self._overtake(before, now)
        elif before.anchor and now.anchor is None and now.keys == before.keys:
            return
        self._disk[name] = now
        self._of[name] = self._ledger.conversations[name]

    def _overtake(self, before: OnDisk, now: OnDisk) -> OnDisk:
        """Drops the state before. Recurrent ones stay while they take no more room than the rows do, and the last two
        in any case: an edit goes back to them."""
        layout, ended = self._ledger.layout, (before.anchor, *before.older) if before.anchor else before.older
        most = max(LEAST_STATES, layout.row_bytes * now.rows // layout.state_bytes) - 1 if self._recurrent else 0
        if ended[most:]:
            self._store.tell(Supersede(ended[most:]))
        return replace(now, older=ended[:most])

    def came_back(self, grant: Grant, source: Source) -> None:
        """A conversation's rows came from disk: what is there need not be hashed or written again."""
        if grant.restored:
            keys = source.keys[: grant.matched // BLOCK]
            anchor = source.anchor[1] if source.anchor and source.anchor[0] <= grant.matched + 1 else None
            self._disk[grant.conversation] = OnDisk(keys, anchor, grant.matched)
            self._of[grant.conversation] = self._ledger.conversations[grant.conversation]

    # --- giving rows up

    def before_drop(self, conversation: Conversation) -> bool:
        """Whether idle rows may go as they are. Otherwise a save begins, and they may go when it is done."""
        if conversation.id in self._failed:
            return True
        self.save(conversation, conversation.tip)
        return conversation.id not in self._saving

    def hurry(self) -> None:
        """A turn waits for memory: saves that take too long end with what they have written."""
        for name, since in self._saving.items():
            if self._clock.now() - since > PATIENCE:
                self._stager.tell(CancelSave(name))

    def retry(self) -> None:
        """One conversation whose rows could not be written is tried again: a probe that costs little if it fails."""
        name = next((n for n, at in self._failed.items() if self._clock.now() - at >= RETRY), None)
        if name is None:
            return
        del self._failed[name]
        found = self._ledger.conversations.get(name)
        if found is not None and found.tip.lease is None:
            self.save(found, found.tip)

    def take(self, conversation: Conversation) -> OnDisk:
        """Forgets a conversation that leaves memory; what the disk has of it."""
        disk = self.on_disk(conversation)
        self._forget(conversation.id)
        return disk

    def take_gone(self) -> list[tuple[Conversation, OnDisk]]:
        """As `take`, for all that the books have given up."""
        gone = [c for name, c in self._of.items() if name not in self._ledger.conversations]
        return [(c, self.take(c)) for c in gone]

    def _forget(self, name: str) -> None:
        self._stager.tell(Forgotten(name))
        for notes in (self._disk, self._of, self._failed, self._written, self._parted):
            notes.pop(name, None)

    async def erase(self, tip: bytes) -> None:
        """Drops a conversation's rows from disk up to where another one shares them. What fails is left to eviction."""
        if tip:
            with contextlib.suppress(OnecopyError):
                await self._store.ask(DropConversation(tip))

    # --- on request, and at the end

    def preserve(self, conversation: Conversation, reply: Reply[Kept], forget: bool) -> None:
        """Saves an idle conversation to its last row; the bank hears `Preserved`."""
        wish = self._wish(conversation, conversation.tip, whole=False)
        if wish is None:
            raise Conflict(f"Session {conversation.id} ends inside a reply; its state can be kept after its next turn.")
        conversation.tip.holds[KEEP] = conversation.tip.frontier
        self._nursery.start_soon(self._preserve, wish, reply, forget)

    async def _preserve(self, wish: Save, reply: Reply[Kept], forget: bool) -> None:
        report, error = None, None
        try:
            report = await self._stager.ask(wish)
        except OnecopyError as raised:
            error = raised
        if report is not None and not report.complete:
            error = Unavailable(f"The session could not be written to disk: {report.error}.", retry_after=RETRY)
        saved = Saved(wish.owner, wish.segment, report, _state(wish), _anchors(wish))
        self._bank.tell(Preserved(saved, reply, forget, error))

    def preserved(self, message: Preserved) -> Conversation:
        """The hold goes; the conversation, or the error for whoever asked."""
        leaf = self._ledger.segments.get(message.saved.segment)
        if leaf is not None:
            leaf.holds.pop(KEEP, None)
        self._let_go(message.saved)
        found = self._ledger.conversations.get(message.saved.conversation)
        if found is None:
            raise NotFound(f"Session {message.saved.conversation} is gone.")
        self._note(message.saved)
        if message.error is not None:
            raise message.error
        return found

    async def flush(self, seconds: float) -> None:
        """Saves everything dirty to the last row, last used first; one log line names what did not make it."""
        kept = sorted(self._ledger.conversations.values(), key=lambda c: c.used, reverse=True)
        left = dict.fromkeys(c.id for c in kept if self._end(c).frontier > self._end(c).saved)
        wishes = [self._wish(c, self._end(c), whole=False) for c in kept if c.id in left]
        self._order()
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for wish in [w for w in wishes if w is not None]:
                    nursery.start_soon(self._flush, replace(wish, again=False), left)
        if left:
            names = ", ".join(left)
            LOG.warning("stopping: rows of %d sessions are not on disk to the last one: %s", len(left), names)

    async def _flush(self, wish: Save, left: dict[str, None]) -> None:
        with contextlib.suppress(OnecopyError):
            report = await self._stager.ask(wish)
            if report.complete:
                del left[wish.owner]

    def _end(self, conversation: Conversation) -> Segment:
        """Where its rows end now, which a running turn may have moved on."""
        turn = next((t for t in self._ledger.turns.values() if t.conversation is conversation), None)
        written = [s for s in turn.leaves if s.tokens] if turn is not None else []
        return written[-1] if written else conversation.tip


def _state(wish: Save) -> int | None:
    """The anchor that was taken for a save."""
    return wish.reader.anchor if isinstance(wish.reader, StateDoor) else None


def _anchors(wish: Save) -> tuple[int, ...]:
    """The anchors of the states on the way."""
    return tuple(reader.anchor for _, reader in wish.waypoints if isinstance(reader, StateDoor))
