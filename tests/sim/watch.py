"""What is checked while the system runs: each admission against brute force, each write, each batch of the bank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onecopy.actors.bank import Bank
from onecopy.actors.lane import Lane
from onecopy.actors.messages.store import Put
from onecopy.runtime.core import Ref
from onecopy.runtime.rows.caches import Strip
from onecopy.runtime.rows.layout import round_up
from onecopy.runtime.rows.ledger import Grant, Ledger, Shortage, Wanted
from onecopy.runtime.rows.ops import SaveAnchor
from onecopy.runtime.rows.prefixes import END_SLACK
from onecopy.runtime.rows.pricing import segment_bytes
from onecopy.runtime.rows.segments import Segment, chain_tokens

from tests.sim.laws import audit

if TYPE_CHECKING:
    from tests.sim.world import World


def watch_bank(world: World, bank: Bank) -> None:
    """Checks the ledger of a new bank at every admission and after every batch, and rows before they are written."""
    ledger = bank._ledger
    admit, executed, after_batch = ledger.admit, ledger.executed, bank.after_batch

    def watched_admit(turn: int, wanted: Wanted, name: str, now: float) -> Grant | Shortage:
        longest, states = longest_prefix(ledger, wanted), resumable(ledger, wanted)
        before = snapshot(ledger)
        got = admit(turn, wanted, name, now)
        check_admission(world, ledger, wanted, longest, before, got)
        if isinstance(got, Grant) and ledger.layout.recurrent and got.matched not in states:
            world.violate(f"row {got.matched} is gone on from, where no state is")
        world.log("admit", turn, _said(got))
        return got

    def watched_executed(grant: Grant) -> Grant:
        got = executed(grant)
        if got is not grant:
            world.log("bank", f"executed {got.how}")
        return got

    async def watched_batch() -> None:
        await after_batch()
        for sentence in audit(ledger):
            world.violate(sentence)

    def may_write(strip: Strip) -> None:
        if world.device.orphan:
            return
        s = ledger.segments.get(strip.chain.leaf)
        if s is None:
            world.violate(f"rows are written to segment {strip.chain.leaf}, which the bank does not know")
        elif strip.position < s.frontier:
            world.violate(f"row {strip.position} of segment {s.id} is written again below its frontier {s.frontier}")
        elif s.lease is None:
            world.violate(f"rows are written to segment {s.id}, which nobody has leased")

    ledger.admit = watched_admit  # type: ignore[method-assign]
    ledger.executed = watched_executed  # type: ignore[method-assign]
    bank.after_batch = watched_batch  # type: ignore[method-assign]
    world.engine.may_write = may_write
    restoring: Any = getattr(bank._disk, "_restoring", None)
    if restoring is not None:
        restoring._door = Door(world, restoring._door)


def watch_lane(world: World, lane: Lane) -> None:
    """Writes every round into the event log."""
    lose_all = lane._lose_all

    def lost(error: Exception) -> None:
        world.log("lane lost", repr(error))
        lose_all(error)

    lane._lose_all = lost  # type: ignore[method-assign]


def longest_prefix(ledger: Ledger, wanted: Wanted) -> int:
    """By brute force: how many leading tokens of a prompt have rows of the same key, the last token left out.

    A running turn's newest rows count once they are a block: until then nobody can find them.
    """
    best, most = 0, len(wanted.tokens) - 1
    for s in ledger.segments.values():
        if s.tokens and salt_of(ledger, s) == wanted.salt:
            stop = s.frontier if s.lease is None else s.start + _indexed(ledger, s)
            best = max(best, _common(chain_tokens(s, stop), wanted.tokens[:most]))
    return best


def resumable(ledger: Ledger, wanted: Wanted) -> set[int]:
    """Where a turn of a recurrent model may go on: where a state stands or is kept behind rows of the prompt."""
    found = {0}
    for s in ledger.segments.values():
        idle_end = {s.frontier} if s.live and s.tip is not None and s.lease is None else set()
        for at in idle_end | set(s.anchors):
            same = at < len(wanted.tokens) and chain_tokens(s, at) == list(wanted.tokens[:at])
            if same and salt_of(ledger, s) == wanted.salt:
                found.add(at)
    return found


def _indexed(ledger: Ledger, s: Segment) -> int:
    known = ledger._prefixes._edges.get(s)
    return sum(map(len, known[1])) // 4 if known else 0


def salt_of(ledger: Ledger, s: Segment) -> bytes:
    """The key of a segment's conversations, known from whoever ends at or below it; else what it is indexed under."""
    if s.tip is not None:
        return ledger.conversations[s.tip].salt
    turn = next((t for t in ledger.turns.values() if s in t.leaves), None)
    if turn is not None:
        return turn.conversation.salt
    below = next(iter(s.children), None)
    return salt_of(ledger, below) if below is not None else ledger._prefixes.salt(s) or b""


def _common(a: list[int], b: tuple[int, ...]) -> int:
    n = min(len(a), len(b))
    if a[:n] == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])


def snapshot(ledger: Ledger) -> tuple[Any, ...]:
    """What a refusal must leave as it was. It may have begun saves, which take copies of recurrent states."""
    rows = tuple((s.id, s.frontier, s.capacity, s.lease, s.tip) for s in ledger.segments.values())
    taken = ledger._books.states
    orders = tuple(op for op in ledger.orders if not (isinstance(op, SaveAnchor) and op.anchor in taken))
    return rows, ledger.used - ledger.layout.state_bytes * len(taken), orders, tuple(ledger.conversations)


def check_admission(
    world: World, ledger: Ledger, wanted: Wanted, longest: int, before: tuple[Any, ...], got: Grant | Shortage
) -> None:
    if isinstance(got, Shortage):
        if snapshot(ledger) != before:
            world.violate("a refusal changed the books")
        pinned = any(c.pinned for c in ledger.conversations.values()) or any(s.holds for s in ledger.segments.values())
        if (
            not ledger.turns
            and not pinned
            and segment_bytes(ledger.layout, round_up(len(wanted.tokens) + 1)) <= ledger.budget
        ):
            world.violate(f"a prompt of {len(wanted.tokens)} tokens is refused by an idle bank that has room for it")
        return
    if got.matched > longest:
        world.violate(f"{got.matched} rows are taken for matched, {longest} are the same")
    if ledger.layout.recurrent:
        pass  # it goes on from states alone, wherever prefixes end
    elif got.matched < longest - END_SLACK and got.how != "fresh" and (got.how, got.matched) != ("eager", 0):
        world.violate(f"{got.matched} rows are matched ({got.how}), {longest} are there")
    elif got.matched < longest and got.how in ("forked", "adopted") and got.diverged != longest:
        world.violate(f"the prompt diverges at {longest}, not at {got.diverged}")
    for leaf in got.lease.leaves:
        if leaf.segment in _read_by_others(ledger, got):
            world.violate(f"segment {leaf.segment} is leased twice")


def _read_by_others(ledger: Ledger, got: Grant) -> set[int]:
    return {s.id for t in ledger.turns.values() if t.id != got.lease.turn for s in t.leaves}


def _said(got: Grant | Shortage) -> tuple[Any, ...]:
    if isinstance(got, Shortage):
        return "short", got.needed, got.available
    return got.conversation, got.how, got.matched, got.diverged


class Heard:
    """A ref that notes which records were said to be durable."""

    def __init__(self, world: World, ref: Ref) -> None:
        self._world = world
        self._ref = ref

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ref, name)

    async def ask(self, message: Any, deadline: float | None = None) -> Any:
        answer = await self._ref.ask(message, deadline)
        if isinstance(message, Put) and not self._world.off:
            self._world.kept.acked.update({r.key: r for r in message.records})
            self._world.log("durable", len(message.records))
        return answer


def watch_disk(world: World, actor: Any) -> None:
    """Notes what is acknowledged, and what is given up on purpose."""
    store = world.scenario.store
    if actor.name == "stager":
        actor._store = Heard(world, actor._store)
        if store is not None and store.permit is not None:
            actor._permit.size = store.permit
        return
    dispatch = actor.dispatch

    async def dispatched(envelope: Any) -> None:
        _forget(world, envelope.message)
        await dispatch(envelope)

    actor.dispatch = dispatched


def _forget(world: World, message: Any) -> None:
    """Records that somebody asks to be dropped are not missed later."""
    acked = world.kept.acked
    if type(message).__name__ in ("Condemn", "Supersede"):
        for key in message.keys:
            acked.pop(key, None)
    if type(message).__name__ == "DropConversation":
        at = acked.pop(message.tip, None)
        while at is not None:
            at = acked.pop(at.parent, None)


class Door:
    """The way of restored rows to segments: they may go to whoever is restored, and to nobody who came later."""

    def __init__(self, world: World, door: Any) -> None:
        self._world = world
        self._door = door
        self._turn: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)

    def filling(self) -> Door:
        return Door(self._world, self._door.filling())

    async def place(self, segment: int, block: int) -> Any:
        place = await self._door.place(segment, block)
        self._check(segment)
        return place

    async def write_block(self, segment: int, block: int, tensors: Any) -> None:
        await self._door.write_block(segment, block, tensors)
        self._check(segment)

    async def write_anchor(self, segment: int, at: int, tensors: Any) -> None:
        await self._door.write_anchor(segment, at, tensors)
        self._check(segment)

    def _check(self, segment: int) -> None:
        """The lease is the one that the first block found."""
        found = self._door._door._ledger.segments.get(segment)
        if found is None:
            return  # the bank has ended: what is written goes to buffers that nobody reads any more
        lease = found.lease
        if lease is None or lease != (self._turn if self._turn is not None else lease):
            self._world.violate(f"rows from disk go to segment {segment}, which turn {lease} has now")
        self._turn = self._turn if self._turn is not None else lease
