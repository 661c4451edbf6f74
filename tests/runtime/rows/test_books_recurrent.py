"""The books of layouts whose state cannot be trimmed: where turns go on, and which states are kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
from onecopy.runtime.rows.layout import LayerLayout, Layout
from onecopy.runtime.rows.ledger import Grant, Ledger, Wanted

from tests.support.house import House, story

SIZE = House.layout.block_bytes


class Recurrent(House):
    """A house of a layout whose state cannot be trimmed."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Layout((*House.layout.layers, LayerLayout("recurrent", anchor_bytes=1000))), 1 << 30)

    def settle(self) -> None:
        self.pool.apply(self.ledger.take_orders())
        assert self.ledger.audit() == []

    def write(self, turn: int, tokens: list[int]) -> None:
        """In several rounds where marks lie between, as a lane does."""
        at = self.ledger.turns[turn].frontier
        places = [mark.position - at for mark in self.ledger.turns[turn].lease.marks]
        for start, stop in pairwise([0, *(p for p in places if 0 < p < len(tokens)), len(tokens)]):
            super().write(turn, tokens[start:stop])

    def child(self, tokens: list[int], hint: str) -> Grant:
        """A whole turn of a client that names itself; its prompt is all it leaves."""
        self.turn += 1
        got = self.ledger.admit(self.turn, Wanted(tuple(tokens), 1, hint=hint), f"c{self.turn}", self.now)
        assert isinstance(got, Grant)
        self.settle()
        self.finish(self.turn, tokens, tokens)
        return got


def test_a_recurrent_conversation_goes_on_where_its_state_stands() -> None:
    house = Recurrent()
    house.run(story(1, 300), story(2, 5))
    got = house.run(story(1, 300) + story(2, 5) + story(3, 20))
    assert (got.how, got.matched) == ("adopted", 304)
    assert house.ledger.used == 2 * SIZE + 2 * 1000


@pytest.mark.parametrize("at", [300, 512, 699, 720])
def test_a_recurrent_prompt_that_leaves_anywhere_else_begins_again(at: int) -> None:
    house = Recurrent()
    house.run(story(1, 700), story(2, 50))
    assert house.run([*(story(1, 700) + story(2, 50))[:at], 5000]).matched == 0


def test_undelivered_rows_leave_a_recurrent_state_past_the_end_so_it_is_not_used() -> None:
    house = Recurrent()
    turn, _ = house.begin(story(1, 300), 50)
    house.write(turn, story(1, 320))
    house.end(turn, keep=310)
    assert house.run([*story(1, 310), 5000]).matched == 0


@pytest.mark.parametrize(("stop", "matched"), [(None, 300), (300, 300), (299, 0), (0, 0)])
def test_a_recurrent_fork_is_resumed_where_it_has_a_state_and_not_elsewhere(stop: int | None, matched: int) -> None:
    house = Recurrent()
    house.run(story(1, 300))
    house.ledger.fork("c1", stop, "child", 1.0)
    house.settle()
    house.ledger.forget("c1")
    assert house.run([*story(1, 300), 7]).matched == matched


def talk(house: Recurrent, turns: int) -> list[list[int]]:
    """Turns of 100 new tokens and a reply of 50: the rows after each."""
    rows, after = list[int](), list[list[int]]()
    for k in range(turns):
        rows = rows + story(2 * k, 100) + story(2 * k + 1, 50)
        house.run(rows[:-50], rows[-50:])
        after.append(rows)
    return after


def test_an_edit_of_any_message_goes_back_to_the_state_before_it() -> None:
    house = Recurrent()
    after = talk(house, 5)
    found = [house.run([*rows, 5000]) for rows in reversed(after)]
    assert [got.how for got in found] == ["adopted", "forked", "forked", "forked", "forked"]
    assert [got.matched for got in found] == [len(rows) - 1 for rows in reversed(after)]


def test_where_memory_is_short_only_edits_of_late_messages_find_a_state() -> None:
    house = Recurrent()
    house.ledger = Ledger(house.ledger.layout, 7 * SIZE)
    after = talk(house, 5)
    found = [house.run([*rows, 5000]) for rows in reversed(after)]
    assert [got.how for got in found] == ["adopted", "forked", "fresh", "fresh", "fresh"]
    assert [got.matched for got in found[:2]] == [len(after[-1]) - 1, len(after[-2]) - 1]


def test_children_of_a_recurrent_parent_share_its_rows_and_start_from_its_state() -> None:
    house = Recurrent()
    rows = story(1, 700)
    house.child(rows, "parent")
    before = house.ledger.used
    for child in range(4):
        got = house.child([*rows, 9000 + child], f"child {child}")
        assert (got.how, got.matched) == ("forked", len(rows))
    assert house.ledger.used <= before + 1000 + 4 * (2 * SIZE + 1000)


def test_the_third_prompt_that_begins_alike_starts_where_the_first_two_part() -> None:
    house, common = Recurrent(), story(1, 600)
    first = house.run([*common, *story(2, 90)], story(3, 40))
    second = house.run([*common, *story(4, 90)], story(5, 40))
    assert (first.lease.marks, second.matched) == ((), 0)
    assert [(mark.position, mark.parts) for mark in second.lease.marks] == [(len(common), True)]
    for k in range(3):
        got = house.run([*common, *story(6 + k, 90)], story(9, 40))
        assert (got.how, got.matched, got.lease.marks) == ("forked", len(common), ())


def test_a_state_where_prompts_part_outlives_the_turns_after_it() -> None:
    house, common = Recurrent(), story(1, 600)
    house.run([*common, 1, 2, 3])
    rows = [*common, *story(4, 90)]
    for k in range(5):
        house.run(rows, story(5 + k, 50))
        rows = rows + story(5 + k, 50) + story(20 + k, 30)
    assert house.run([*common, 7]).matched == len(common)


@pytest.mark.parametrize("end", ["before the mark", "over it at once", "crash"])
def test_a_mark_that_no_round_stops_at_keeps_nothing(end: str) -> None:
    house, common = Recurrent(), story(1, 600)
    house.run([*common, 1])
    turn, got = house.begin([*common, 2])
    assert isinstance(got, Grant)
    assert got.lease.marks
    House.write(house, turn, common[:500] if end != "over it at once" else [*common, 2])
    if end == "crash":
        house.ledger.doubt(turn)
    house.end(turn, keep=500)
    assert house.run([*common, 3]).matched == 0


def test_a_restore_takes_the_mark_back() -> None:
    house, common = Recurrent(), story(1, 600)
    house.run([*common, 1])
    turn, got = house.begin([*common, 2])
    assert isinstance(got, Grant)
    assert house.ledger.unmark(turn, len(common)).marks == ()
    House.write(house, turn, common)
    house.settle()
    assert not any(s.anchors for s in house.ledger.segments.values())


def test_older_states_go_before_conversations_and_the_latest_two_stay() -> None:
    house, common = Recurrent(), story(1, 300)
    house.run([*common, 1])
    rows = [*common, *story(4, 20)]
    for k in range(3):
        house.run(rows, story(5 + k, 20))
        rows = rows + story(5 + k, 20) + story(20 + k, 20)
    tip = max(house.ledger.segments.values(), key=lambda s: len(s.anchors))
    assert len(tip.anchors) == 3
    latest = sorted(tip.anchors)[1:]
    house.ledger._books.budget = house.ledger.used + SIZE
    house.run(story(8, 200))
    assert sorted(tip.anchors) == latest
    assert tip.id in house.ledger.segments
    assert house.ledger.totals.dropped == 0


def test_anchors_go_with_their_rows() -> None:
    house = Recurrent()
    talk(house, 4)
    for name in list(house.ledger.conversations):
        house.ledger.forget(name)
    house.settle()
    assert house.ledger.used == 0


def test_states_are_not_kept_where_there_is_no_room_for_them() -> None:
    house = Recurrent()
    house.ledger = Ledger(house.ledger.layout, 2 * (SIZE + 1000))
    after = talk(house, 2)
    assert house.ledger.used <= house.ledger.budget
    assert house.run([*after[-1], 7]).matched == len(after[-1]) - 1


def test_a_recurrent_chain_is_never_merged() -> None:
    house = Recurrent()
    tokens = story(1, 50)
    for k in range(30):
        reply = story(k + 10, 300)
        house.run(tokens, reply)
        tokens = tokens + reply + story(k + 1000, 20)
    assert "merge" not in house.ledger.totals.copied


def at_starts(house: Recurrent, tokens: list[int], starts: list[int]) -> list[int]:
    """A whole turn whose messages start there: where states are kept on the way."""
    house.turn += 1
    got = house.ledger.admit(house.turn, Wanted(tuple(tokens), 1, starts=tuple(starts)), f"c{house.turn}", 0.0)
    assert isinstance(got, Grant)
    house.settle()
    house.finish(house.turn, tokens, tokens)
    return [mark.position for mark in got.lease.marks]


def test_a_long_prompt_keeps_a_state_where_each_of_its_messages_starts() -> None:
    house, rows = Recurrent(), story(1, 1200)
    assert at_starts(house, rows, [200, 500, 900]) == [200, 500, 900]
    for start in (900, 500, 200):
        assert house.run([*rows[: start + 3], 5000, *story(start, 40)]).matched == start


@pytest.mark.parametrize(
    ("starts", "kept"),
    [
        ([10, 20, 30], []),
        ([10, 20, 400, 405, 410], [20, 400]),
        ([200, 205, 210], [200]),
        ([300, 310, 320, 600], [300, 320, 600]),
    ],
)
def test_of_short_messages_in_a_row_only_what_spares_an_edit_many_rows_is_kept(
    starts: list[int], kept: list[int]
) -> None:
    assert at_starts(Recurrent(), story(1, 700), starts) == kept


def test_states_at_the_latest_messages_are_kept_where_memory_is_short() -> None:
    house, starts = Recurrent(), list(range(200, 1300, 200))
    house.ledger = Ledger(house.ledger.layout, 7 * SIZE)
    assert at_starts(house, story(1, 1400), starts) == starts[-2:]


def test_states_at_message_starts_leave_half_of_the_memory_free() -> None:
    house, starts = Recurrent(), list(range(150, 1400, 150))
    house.ledger = Ledger(house.ledger.layout, 2 * (6 * SIZE + 1000 + 4 * 1000))
    assert at_starts(house, story(1, 1400), starts) == starts[-4:]


def test_a_restore_passes_the_starts_before_it_and_keeps_those_behind_it() -> None:
    house, rows = Recurrent(), story(1, 1200)
    house.turn += 1
    got = house.ledger.admit(house.turn, Wanted(tuple(rows), 1, starts=(300, 512, 900)), "c", 0.0)
    assert isinstance(got, Grant)
    lease = house.ledger.unmark(house.turn, 512)
    assert [mark.position for mark in lease.marks] == [900]
    house.settle()
    House.write(house, house.turn, rows[:512])
    house.finish(house.turn, rows, rows)
    assert house.run([*rows[:905], 5000]).matched == 900


def test_a_fork_never_pays_for_its_rows_with_the_state_it_goes_on_from() -> None:
    house, rows = Recurrent(), story(1, 1000)
    house.ledger = Ledger(house.ledger.layout, 14 * SIZE)
    at_starts(house, rows, [300, 600, 900])
    house.run([*rows, 7], story(2, 790))  # fills its last block: there is no slack to give back first
    books = house.ledger._books
    books.budget = books.used + SIZE - 500  # the oldest state would make up for it
    got = house.run([*rows[:303], 5000])
    assert (got.how, got.matched) == ("forked", 300)


def test_states_that_go_with_tidied_rows_are_given_up_once() -> None:
    house, rows = Recurrent(), story(1, 1200)
    house.ledger = Ledger(house.ledger.layout, 20 * SIZE)
    assert at_starts(house, rows, [520, 650, 780, 910, 1040]) == [520, 650, 780, 910, 1040]
    assert house.run([*rows[:523], 5000, *story(3, 200)]).matched == 520
    house.ledger.forget("c1")
    house.settle()
    books = house.ledger._books
    books.budget = books.used + 3 * SIZE - 500  # what the tidied rows leave is not enough for the next prompt
    assert house.run(story(4, 1300)).how == "fresh"
