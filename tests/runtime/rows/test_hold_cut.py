"""Buffers of a fixed size over a QSA layout: no resize ever cuts a held row, and none that cannot be made is an error.

Real buffers, filled with values that name their layer, head, position and column, so that a lost or foreign row shows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ledger import Grant, Ledger, Wanted
from onecopy.runtime.rows.ops import Allocate, ResizeLayer
from onecopy.runtime.rows.segments import Segment

from tests.support.pooled import QsaPool

RATIO = 4
LAYER = LayerLayout("qsa", (RowTensor("k", 1, 1), RowTensor("i", 1, 1)), (RowTensor("p", 1, 1),), RATIO)
QSA = Layout((LAYER, LAYER))
BIG = 1 << 30


class Stage:
    """A ledger, a pool of real buffers behind it, and a hand that writes rows as a model would."""

    def __init__(self, budget: int = BIG) -> None:
        self.ledger = Ledger(QSA, budget)
        self.pool = QsaPool(QSA)
        self.turn = 0

    def settle(self) -> None:
        self.pool.apply(self.ledger.take_orders())
        assert self.ledger.audit() == []

    def begin(self, tokens: list[int], capacity: int | None = None) -> tuple[int, Grant]:
        self.turn += 1
        got = self.ledger.admit(self.turn, Wanted(tuple(tokens), 1, capacity=capacity), f"c{self.turn}", self.turn)
        assert isinstance(got, Grant)
        self.settle()
        return self.turn, got

    def execute(self, turn: int) -> str:
        how = self.ledger.execute(turn)
        self.settle()
        return how

    def fill(self, turn: int, tokens: list[int]) -> None:
        """Computes the rest of `tokens`: rows, and the pooled entries they complete."""
        made = self.ledger.turns[turn]
        while made.frontier < len(tokens):
            at = made.frontier
            n = min(made.lease.room(at), len(tokens) - at)
            assert n
            leaf = self.pool.segments[made.lease.chain(at).leaf]
            self.ledger.commit(turn, tuple(tokens[at : at + n]))
            for layer in range(len(QSA.layers)):
                for name in ("k", "i"):
                    leaf.layers[layer].write(name, at - leaf.start, mx.array(rows(tokens, at, at + n)))
                self._pool(tokens, layer, at, at + n, made.lease.chain(at).leaf)
            mx.eval(leaf.flat())
        self.settle()

    def _pool(self, tokens: list[int], layer: int, start: int, stop: int, segment: int) -> None:
        first, last = start // RATIO, stop // RATIO
        if first < last:
            origin = self.pool.segments[segment].start // RATIO
            self.pool.write_pooled(segment, layer, "p", first - origin, mx.array(pooled(tokens, first, last)))

    def end(self, turn: int) -> None:
        self.ledger.release(turn, BIG, float(self.turn))
        self.settle()

    def run(self, tokens: list[int], capacity: int | None = None) -> Grant:
        turn, got = self.begin(tokens, capacity)
        self.execute(turn)
        self.fill(turn, tokens)
        self.end(turn)
        return got

    def check(self, tokens: list[int], end: Segment) -> None:
        """Every row and pooled entry of `tokens` through the chain of `end` is what was written."""
        stop = len(tokens)
        assert end.frontier >= stop
        for s in end.ancestors():
            for key, found in self.pool.segments[s.id].row_views(s.start, stop).items():
                np.testing.assert_array_equal(found, rows(tokens, s.start, stop), err_msg=key)
            for key, found in self.pool.pooled_views(s.id, s.start, stop).items():
                np.testing.assert_array_equal(found, pooled(tokens, s.start // RATIO, stop // RATIO), err_msg=key)
            stop = s.start

    def tip(self, conversation: str) -> Segment:
        return self.ledger.conversations[conversation].tip


def rows(tokens: list[int], start: int, stop: int) -> np.ndarray[Any, Any]:
    return np.array([[[t * 1000 + i] for i, t in enumerate(tokens[start:stop], start)]], np.float32)


def pooled(tokens: list[int], first: int, last: int) -> np.ndarray[Any, Any]:
    groups = (tokens[g * RATIO : (g + 1) * RATIO] for g in range(first, last))
    return np.array([[[sum(group) + 0.5] for group in groups]], np.float32)


def story(seed: int, n: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(1, 1000, n)]


# --- case 1


CLAIM, TARGET = 42_593, 32_768
"""Pooled entries a stale state claims, and what the new buffers hold."""


def test_a_stale_pooled_claim_is_resized_in_place_with_its_valid_entries_unchanged() -> None:
    pool = QsaPool(QSA)
    have, frontier = 45_000 * RATIO // BLOCK * BLOCK, 30_000 * RATIO + 3
    pool.apply((Allocate(1, 0, have),))
    claimed = np.arange(CLAIM, dtype=np.float32)[None, :, None]
    for layer in range(2):
        assert pool.enter(1, layer, {"p": mx.array(claimed)}, frontier) == frontier // RATIO
    pool.apply(tuple(ResizeLayer(1, layer, TARGET * RATIO, frontier) for layer in range(2)))
    for stop in (frontier, TARGET * RATIO):
        for found in pool.pooled_views(1, 0, stop).values():
            np.testing.assert_array_equal(found[:, : frontier // RATIO], claimed[:, : frontier // RATIO])
            assert not found[:, frontier // RATIO :].any(), "a later reader sees the stale claim"


def test_a_shrink_that_fits_the_rows_is_a_resize_in_place_and_copies_no_segment() -> None:
    stage = Stage()
    tokens = story(1, 700)
    stage.run(tokens, capacity=8 * BLOCK)
    before = set(stage.ledger.segments)
    turn, got = stage.begin([*tokens, 7], capacity=4 * BLOCK)
    assert (got.how, stage.execute(turn), set(stage.ledger.segments)) == ("resized", "resized", before)
    stage.fill(turn, [*tokens, 7])
    stage.end(turn)
    stage.check([*tokens, 7], stage.tip("c1"))
    assert stage.tip("c1").capacity == 4 * BLOCK


def test_entries_of_rows_that_were_given_up_do_not_outlive_a_resize() -> None:
    pool = QsaPool(QSA)
    pool.apply((Allocate(1, 0, 1024),))
    for layer in range(2):
        pool.write_pooled(1, layer, "p", 0, mx.full((1, 1024 // RATIO, 1), 7.0))
    pool.apply(tuple(ResizeLayer(1, layer, 768, 402) for layer in range(2)))
    for found in pool.pooled_views(1, 0, 768).values():
        assert (found[:, : 402 // RATIO] == 7).all()
        assert not found[:, 402 // RATIO :].any()


def test_a_saved_and_restored_block_carries_the_derived_entries_only() -> None:
    stage = Stage()
    tokens = story(1, 600)
    stage.run(tokens)
    s = stage.tip("c1")
    views = stage.pool.pooled_views(s.id, BLOCK, 600)
    assert {v.shape[1] for v in views.values()} == {(600 - BLOCK) // RATIO}
    other = QsaPool(QSA)
    other.apply((Allocate(9, 0, 1024),))
    for layer in range(2):
        entries = {"p": mx.array(np.array(stage.pool.pooled_views(s.id, 0, 1024)[f"{layer}.p"]))}
        assert other.enter(9, layer, entries, 600) == 150
    for found in other.pooled_views(9, 0, 1024).values():
        assert not found[:, 150:].any()


# --- case 2


def held_reply(stage: Stage) -> tuple[list[int], list[int], str]:
    """A conversation of 900 rows, its reply from row 300 on held to its end: prompt, all rows, its name."""
    prompt, reply = story(1, 300), story(2, 600)
    turn, got = stage.begin(prompt, capacity=4 * BLOCK)
    stage.fill(turn, prompt)
    stage.fill(turn, prompt + reply)
    stage.end(turn)
    stage.ledger.hold(got.conversation, "save")
    return prompt, prompt + reply, got.conversation


def test_a_genuine_cut_is_refused_as_a_resize_and_served_by_a_copy() -> None:
    stage = Stage()
    _, all_rows, name = held_reply(stage)
    old = stage.tip(name)
    wanted = [*all_rows[:400], 5]
    turn, got = stage.begin(wanted, capacity=2 * BLOCK)
    assert (got.how, got.matched, got.conversation) == ("copied", 400, name)
    assert got.peak == got.price == QSA.capacity_bytes(2 * BLOCK)
    assert dict(got.copied) == {"copy": 400 * QSA.row_bytes}
    stage.execute(turn)
    stage.fill(turn, wanted)
    stage.end(turn)
    stage.check(wanted, stage.tip(name))
    stage.check(all_rows, old)


def test_rows_held_past_the_prompt_are_never_written_over_even_in_larger_buffers() -> None:
    stage = Stage()
    _, all_rows, name = held_reply(stage)
    old = stage.tip(name)
    wanted = [*all_rows[:400], 5]
    turn, got = stage.begin(wanted, capacity=8 * BLOCK)
    assert (got.how, stage.execute(turn)) == ("copied", "copied")
    stage.fill(turn, wanted)
    stage.end(turn)
    stage.check(wanted, stage.tip(name))
    stage.check(all_rows, old)


def test_a_cut_that_cannot_be_copied_either_is_served_by_a_fork() -> None:
    stage = Stage()
    _, all_rows, name = held_reply(stage)
    old = stage.tip(name)
    wanted = [*all_rows[:400], 5]
    turn, got = stage.begin(wanted, capacity=BLOCK)
    assert (got.how, got.matched) == ("forked", 400)
    assert got.conversation != name
    stage.fill(turn, wanted)
    stage.end(turn)
    stage.check(wanted, stage.tip(got.conversation))
    stage.check(all_rows, old)


def test_what_a_hold_kept_goes_with_the_hold() -> None:
    stage = Stage()
    _, all_rows, name = held_reply(stage)
    old = stage.tip(name)
    stage.run([*all_rows[:400], 5], capacity=2 * BLOCK)
    stage.ledger.unhold(old.id, "save")
    stage.settle()
    assert old.id not in stage.ledger.segments
    assert stage.ledger.used == QSA.capacity_bytes(2 * BLOCK)


# --- case 3


@pytest.mark.parametrize("first", ["hold", "admission"])
def test_a_hold_and_an_admission_in_either_order_are_both_served(first: str) -> None:
    stage = Stage()
    prompt, reply = story(1, 300), story(2, 600)
    turn, got = stage.begin(prompt, capacity=4 * BLOCK)
    stage.fill(turn, prompt + reply)
    stage.end(turn)
    name, all_rows, wanted = got.conversation, prompt + reply, [*prompt, *reply[:100], 5]
    old = stage.tip(name)
    if first == "hold":
        stage.ledger.hold(name, "save")
    turn, got = stage.begin(wanted, capacity=2 * BLOCK)
    if first == "admission":
        stage.ledger.hold(name, "save")
    assert got.how == {"hold": "copied", "admission": "resized"}[first]
    assert stage.execute(turn) == {"hold": "copied", "admission": "eager"}[first]
    stage.fill(turn, wanted)
    stage.end(turn)
    stage.check(wanted, stage.tip(name))
    stage.check(all_rows, old)
    assert stage.ledger.totals.admitted.get("resized", 0) == 0


def test_a_fork_that_comes_between_admission_and_execution_keeps_its_rows() -> None:
    stage = Stage()
    prompt, reply = story(1, 300), story(2, 600)
    turn, got = stage.begin(prompt, capacity=4 * BLOCK)
    stage.fill(turn, prompt + reply)
    stage.end(turn)
    turn, _ = stage.begin([*prompt, 5], capacity=2 * BLOCK)
    stage.ledger.fork(got.conversation, 800, "child", 9.0)
    assert stage.execute(turn) == "eager"
    stage.fill(turn, [*prompt, 5])
    stage.end(turn)
    stage.check([*prompt, 5], stage.tip(got.conversation))
    stage.check((prompt + reply)[:800], stage.tip("child"))


def test_memory_set_aside_for_a_planned_resize_is_nobody_elses() -> None:
    budget = QSA.capacity_bytes(8 * BLOCK)
    stage = Stage(budget)
    tokens = story(1, 300)
    stage.run(tokens)
    turn, got = stage.begin([*tokens, 5], capacity=5 * BLOCK)
    assert got.how == "resized"
    assert stage.ledger.used + got.peak <= budget
    assert stage.ledger.available <= budget - stage.ledger.used - got.peak
    assert not isinstance(stage.ledger.admit(99, Wanted(tuple(story(9, 1200)), 1), "x", 9.0), Grant)
    assert stage.execute(turn) == "resized"


def test_a_grant_given_back_before_it_was_executed_leaves_everything_as_it_was() -> None:
    stage = Stage()
    prompt, reply = story(1, 300), story(2, 300)
    turn, got = stage.begin(prompt, capacity=4 * BLOCK)
    stage.fill(turn, prompt + reply)
    stage.end(turn)
    before = stage.ledger.used
    turn, _ = stage.begin([*prompt, 5], capacity=2 * BLOCK)
    stage.ledger.release(turn, 300, 5.0)
    stage.settle()
    assert stage.ledger.used == before
    stage.check(prompt + reply, stage.tip(got.conversation))


# --- case 5 and the ways around it


@pytest.mark.parametrize(
    ("have", "want", "how"),
    [(4, 4, "adopted"), (5, 4, "adopted"), (6, 4, "resized"), (3, 4, "resized")],
)
def test_buffers_are_adopted_at_the_size_or_one_bucket_more(have: int, want: int, how: str) -> None:
    stage = Stage()
    tokens = story(1, 600)
    stage.run(tokens, capacity=have * BLOCK)
    turn, got = stage.begin([*tokens, 5], capacity=want * BLOCK)
    assert (got.how, got.matched) == (how, 600)
    assert stage.execute(turn) == how
    stage.fill(turn, [*tokens, 5])
    stage.end(turn)
    stage.check([*tokens, 5], stage.tip("c1"))


def test_a_size_that_cannot_be_afforded_runs_eagerly_at_the_capacity_at_hand() -> None:
    stage = Stage(QSA.capacity_bytes(6 * BLOCK))
    tokens = story(1, 600)
    stage.run(tokens)
    turn, got = stage.begin([*tokens, 5], capacity=32 * BLOCK)
    assert (got.how, got.matched, got.price) == ("eager", 600, 0)
    assert stage.execute(turn) == "eager"
    stage.fill(turn, [*tokens, 5])


def test_a_size_too_small_for_the_prompt_is_not_a_reason_to_refuse() -> None:
    stage = Stage()
    tokens = story(1, 600)
    turn, got = stage.begin(tokens, capacity=BLOCK)
    assert got.how == "eager"
    stage.fill(turn, tokens)


def test_a_resize_costs_what_it_gains_and_one_layer_at_most() -> None:
    stage = Stage()
    tokens = story(1, 300)
    stage.run(tokens, capacity=2 * BLOCK)
    _, got = stage.begin([*tokens, 5], capacity=16 * BLOCK)
    gained = QSA.capacity_bytes(16 * BLOCK) - QSA.capacity_bytes(2 * BLOCK)
    assert got.price == gained
    assert got.peak <= gained + LAYER.capacity_bytes(16 * BLOCK)
