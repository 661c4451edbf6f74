"""The books stay balanced whatever happens in whatever order, and memory is given up in the order that costs least."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onecopy.runtime.rows.chains import merge
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ledger import Conversation, Grant, Shortage, Wanted
from onecopy.runtime.rows.ops import Drop, Trim

from tests.support.house import House, story

SIZE = House.layout.block_bytes


class Crowd(House):
    """Many conversations at once: turns stay open, holds and pins come and go."""

    def __init__(self, seed: int, blocks: int) -> None:
        super().__init__(blocks * SIZE)
        self.draw = random.Random(seed)
        self.blocks = blocks
        self.kept: list[list[int]] = [story(seed, 100)]
        self.open: dict[int, list[int]] = {}
        self.holds: list[tuple[int, str]] = []

    def idle(self) -> list[Conversation]:
        running = {t.conversation.id for t in self.ledger.turns.values()}
        return [c for c in self.ledger.conversations.values() if c.id not in running]

    def step(self, kind: str) -> None:
        idle = self.idle()
        if kind in ("start", "fixed"):
            self.start(fixed=kind == "fixed")
        elif kind == "finish" and self.open:
            self.close(self.draw.choice(list(self.open)))
        elif idle and kind not in ("finish", "unhold"):
            getattr(self, kind)(self.draw.choice(idle))
        elif kind == "unhold" and self.holds:
            self.ledger.unhold(*self.holds.pop(self.draw.randrange(len(self.holds))))
        self.settle()

    def start(self, fixed: bool) -> None:
        base = self.draw.choice(self.kept)
        at = self.draw.choice([len(base), self.draw.randrange(len(base) + 1)])
        prompt = base[:at] + story(self.draw.randrange(1 << 30), self.draw.randrange(1, 400))
        capacity = self.draw.randrange(1, self.blocks + 2) * BLOCK if fixed else None
        before = self.snapshot()
        turn, got = self.begin(prompt, self.draw.randrange(1, 300), capacity=capacity)
        if isinstance(got, Shortage):
            assert self.snapshot() == before
        else:
            self.open[turn] = prompt

    def close(self, turn: int) -> None:
        prompt = self.open.pop(turn)
        if self.draw.random() < 0.1:
            return self.end(turn, keep=self.draw.randrange(len(prompt)))
        self.ledger.execute(turn)
        self.settle()
        tokens = prompt + story(self.draw.randrange(1 << 30), self.draw.randrange(300))
        self.kept.append(tokens)
        made = self.ledger.turns[turn]
        while made.frontier < len(tokens):
            room = made.lease.room(made.frontier)
            if not room and isinstance(self.ledger.grow(turn, 1), Shortage):
                assert made.frontier >= len(prompt)
                break
            self.settle()
            self.write(turn, tokens[made.frontier :][: max(room, 1)])
        self.check(turn, tokens[: made.frontier])
        return self.end(turn, keep=self.draw.choice([made.frontier, len(prompt)]))

    def hold(self, c: Conversation) -> None:
        name = f"h{self.draw.randrange(3)}"
        self.holds.append((self.ledger.hold(c.id, name, self.draw.randrange(c.tip.frontier + 1)), name))

    def pin(self, c: Conversation) -> None:
        c.pinned = not c.pinned

    def save(self, c: Conversation) -> None:
        c.tip.saved = max(c.tip.saved, c.tip.frontier // BLOCK * BLOCK)

    def branch(self, c: Conversation) -> None:
        self.turn += 1
        self.ledger.fork(c.id, self.draw.randrange(c.tip.frontier + 1), f"b{self.turn}", self.now)

    def trim(self, c: Conversation) -> None:
        self.ledger.trim(c.id)

    def forget(self, c: Conversation) -> None:
        self.ledger.forget(c.id)

    def snapshot(self) -> Any:
        books = self.ledger
        rows = [(s.id, s.frontier, s.capacity, s.lease, s.tip, s.locks) for s in books.segments.values()]
        return rows, books.used, books.available, list(books.conversations), list(books.orders)


KINDS = ("start", "fixed", "finish", "hold", "unhold", "pin", "save", "branch", "trim", "forget")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from((*KINDS, "start", "fixed", "finish", "finish")), min_size=5, max_size=40),
    st.integers(0, 1 << 30),
    st.integers(4, 30),
)
def test_the_books_balance_after_every_step_and_every_turn_reads_its_own_tokens(
    kinds: list[str], seed: int, blocks: int
) -> None:
    crowd = Crowd(seed, blocks)
    for kind in kinds:
        crowd.step(kind)
    for turn in list(crowd.open):
        crowd.close(turn)
    for held in crowd.holds:
        crowd.ledger.unhold(*held)
    for c in crowd.idle():
        crowd.ledger.forget(c.id)
    crowd.settle()
    assert (crowd.ledger.used, crowd.ledger.segments, crowd.ledger.conversations) == (0, {}, {})


# --- the order of giving up


def filled(blocks: int, lengths: list[int]) -> House:
    house = House(blocks * SIZE)
    for k, n in enumerate(lengths):
        house.run(story(k, n))
    return house


def names(house: House) -> list[str]:
    return list(house.ledger.conversations)


def test_unused_blocks_go_before_any_conversation() -> None:
    house = House(6 * SIZE)
    turn, _ = house.begin(story(1, 100), 900)
    house.write(turn, story(1, 100))
    house.end(turn)
    house.run(story(2, 600))
    house.run(story(3, 300))
    assert names(house) == ["c1", "c2", "c3"]
    assert house.ledger.totals.trimmed == 1


def test_conversations_on_disk_go_before_older_ones_that_are_not() -> None:
    house = filled(6, [500, 500, 500])
    house.ledger.conversations["c3"].tip.saved = 256
    house.ledger.conversations["c2"].tip.saved = 256
    house.run(story(9, 300))
    assert names(house) == ["c1", "c3", "c4"]
    house.run(story(10, 300))
    assert names(house) == ["c1", "c4", "c5"]


def test_a_conversation_that_went_on_after_its_save_is_not_on_disk() -> None:
    house = filled(6, [500, 500])
    house.ledger.conversations["c2"].tip.saved = 256
    house.run(story(1, 500) + story(7, 100))
    house.run(story(9, 500))
    assert names(house) == ["c2", "c4"]


def test_an_unsaved_conversation_is_offered_for_saving_and_kept_when_that_begins() -> None:
    offered: list[str] = []

    def save_first(c: Conversation) -> bool:
        offered.append(c.id)
        c.tip.holds["save"] = c.tip.frontier
        return False

    house = House(4 * SIZE, before_drop=save_first)
    house.run(story(1, 500))
    house.run(story(2, 500))
    _, got = house.begin(story(3, 300))
    assert isinstance(got, Shortage)
    assert (got.pending, got.needed, offered, names(house)) == (0, 2 * SIZE, ["c1", "c2"], ["c1", "c2"])
    tip = house.ledger.conversations["c1"].tip
    tip.saved = 256
    del tip.holds["save"]
    _, got = house.begin(story(3, 300))
    assert isinstance(got, Grant)
    assert names(house) == ["c2", "c4"]


def test_what_is_freed_goes_back_to_the_system_before_anything_new_is_made() -> None:
    house = filled(4, [500, 500])
    house.ledger.admit(9, Wanted(tuple(story(9, 300)), 1), "new", 9.0)
    kinds = [type(op) for op in house.ledger.take_orders()]
    assert kinds[:2] == [Drop, Trim]


def test_a_shared_parent_counts_as_room_only_when_all_its_children_go() -> None:
    house = House(8 * SIZE)
    parent = story(1, 4 * BLOCK)
    house.run([*parent, *story(2, 50)])
    house.run([*parent, 1])
    house.run([*parent, 2])
    assert names(house) == ["c1", "c2", "c3"]
    house.ledger.conversations["c3"].pinned = True
    _, got = house.begin(story(9, 900))
    assert isinstance(got, Shortage)
    house.ledger.conversations["c3"].pinned = False
    _, got = house.begin(story(9, 900))
    assert isinstance(got, Grant)


def test_rows_under_a_hold_do_not_count_as_room_when_their_readers_go() -> None:
    house = House(10 * SIZE)
    parent = story(1, 4 * BLOCK)
    house.run([*parent, *story(2, 50)])
    house.run([*parent, 1])
    root = house.ledger.hold("c2", "save", 4 * BLOCK)
    _, got = house.begin(story(9, 7 * BLOCK))
    assert isinstance(got, Shortage)
    assert names(house) == ["c1", "c2"]
    house.ledger.unhold(root, "save")
    _, got = house.begin(story(9, 7 * BLOCK))
    assert isinstance(got, Grant)


def test_as_many_conversations_go_as_it_takes_when_a_hold_keeps_their_parent() -> None:
    house = House(10 * SIZE)
    parent = story(1, 4 * BLOCK)
    house.run([*parent, *story(2, 50)])
    house.run([*parent, 1])
    house.run(story(3, 300))
    house.ledger.hold("c2", "save", 4 * BLOCK)
    house.ledger.forget("c1")
    _, got = house.begin(story(9, 5 * BLOCK - 1))
    assert isinstance(got, Grant)
    assert names(house) == ["c4"]


def test_a_merge_is_made_only_with_room_left_for_the_leaf_it_is_for() -> None:
    house = House(100 * SIZE)
    house.run(story(1, 200), story(2, 400))
    house.run(story(1, 200) + story(2, 400) + story(3, 400))
    house.run(story(1, 200) + story(2, 400) + story(3, 400) + story(4, 400))
    books = house.ledger._books
    tip = house.ledger.conversations["c1"].tip
    assert tip.depth == 3
    assert tip.parent is not None
    rows = tip.end - tip.parent.start
    books.budget = books.used + books.size(rows)
    assert merge(books, tip, SIZE) == (tip, 0)
    assert merge(books, tip, 0)[1] > 0


def test_rows_computed_again_after_a_cut_are_not_taken_for_saved() -> None:
    house = House()
    prompt, reply = story(1, 300), story(2, 400)
    house.run(prompt, reply)
    c = house.ledger.conversations["c1"]
    c.tip.saved = 512
    house.run(prompt + reply[:50] + story(3, 300))
    assert c.tip.saved == 350


# --- numbers


def test_a_hold_on_rows_of_an_ancestor_holds_that_ancestor_only() -> None:
    house = House()
    tokens = story(1, 300)
    house.run(tokens)
    house.run(tokens + story(2, 600))
    root = house.ledger.hold("c1", "save", 200)
    house.ledger.forget("c1")
    house.settle()
    assert list(house.ledger.segments) == [root]
    house.ledger.unhold(root, "save")
    house.settle()
    assert house.ledger.used == 0


def test_a_forgotten_parent_gives_back_the_rows_no_child_reads() -> None:
    house = House(12 * SIZE)
    parent = story(1, 8 * BLOCK - 1)
    house.run(parent)
    house.run([*parent[: 2 * BLOCK], 5])
    house.ledger.forget("c1")
    assert house.run(story(9, 8 * BLOCK)).how == "fresh"
    assert "c2" in names(house)


def test_idle_slack_names_the_longest_unused_first_and_stops_at_the_young() -> None:
    house = House()
    for k in (1, 2, 3):
        turn, _ = house.begin(story(k, 100), 900)
        house.write(turn, story(k, 100))
        house.end(turn)
    assert house.ledger.idle_slack(4.0, age=2.0) == ["c1", "c2"]
    house.ledger.trim("c1")
    assert house.ledger.idle_slack(4.0, age=2.0) == ["c2"]


def test_books_that_are_wrong_are_found_out() -> None:
    house = filled(8, [500, 300])
    s = house.ledger.conversations["c1"].tip
    s.holds["x"] = 9000
    s.capacity += BLOCK
    s.locks += 1
    found = "\n".join(house.ledger.audit())
    for part in ("bytes are accounted for", "rows up to 9000", "counts 2 locks, there are 1", "locked"):
        assert part in found


@pytest.mark.parametrize("holder", ["save", "pin"])
def test_a_hold_taken_twice_is_one_hold(holder: str) -> None:
    house = filled(8, [500])
    s = house.ledger.conversations["c1"].tip
    s.holds[holder] = 100
    s.holds[holder] = 300
    assert (s.held, s.locks) == (300, 1)
    del s.holds[holder]
    assert (s.held, s.locks) == (0, 0)
