"""The bank's books: who gets which rows, what it costs, and that nobody ever reads a wrong one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ledger import DEPTH, Grant, Shortage, Wanted

from tests.support.house import House, story

ROW = House.layout.row_bytes


def test_a_first_prompt_is_fresh_and_pays_for_its_blocks_only() -> None:
    house = House()
    got = house.run(story(1, 300), story(2, 5))
    assert (got.how, got.matched, got.copied) == ("fresh", 0, ())
    assert house.ledger.used == 2 * BLOCK * ROW


def test_the_next_turn_of_a_conversation_adopts_its_rows_and_copies_nothing() -> None:
    house = House()
    first, reply = story(1, 300), story(2, 5)
    house.run(first, reply)
    got = house.run(first + reply + story(3, 20), story(4, 5))
    assert (got.how, got.matched, got.copied) == ("adopted", 304, ())


def test_an_identical_prompt_leaves_one_token_to_evaluate() -> None:
    house = House()
    prompt = story(1, 300)
    house.run(prompt, story(2, 5))
    got = house.run(prompt, story(2, 5))
    assert got.matched == 299
    assert not got.copied


def test_a_strict_prefix_of_a_kept_prompt_is_served_from_it() -> None:
    house = House()
    prompt = story(1, 600)
    house.run(prompt, story(2, 5))
    got = house.run(prompt[:400], story(5, 5))
    assert (got.how, got.matched) == ("forked", 399)


@pytest.mark.parametrize("at", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1])
def test_reuse_is_exactly_the_common_prefix(at: int) -> None:
    house = House()
    x = story(1, 700)
    y = [*x[:at], x[at] + 1, *story(9, 200)]
    house.run(x, story(2, 5))
    got = house.run(y, story(3, 5))
    assert got.matched == at
    assert sum(n for _, n in got.copied) == (at % BLOCK) * ROW


def test_a_fork_shares_whole_blocks_and_costs_a_tail() -> None:
    house = House()
    parent = story(1, 1000)
    house.run(parent, story(2, 5))
    before = house.ledger.used
    for child in range(8):
        house.run(parent + story(100 + child, 30), story(200 + child, 5))
    assert house.ledger.used - before <= 8 * 2 * BLOCK * ROW


def test_alternating_between_two_tails_evaluates_about_one_token_each_time() -> None:
    house = House()
    shared = story(1, 4 * BLOCK)
    p, q = shared + story(2, 128), shared + story(3, 128)
    house.run(p, story(4, 5))
    house.run(q, story(5, 5))
    for tail in (p, q, p, q):
        assert house.run(tail, story(4, 5)).matched == len(tail) - 1


def test_an_edit_of_an_earlier_message_keeps_the_old_tail() -> None:
    house = House()
    p = story(1, 900)
    house.run(p, story(2, 5))
    edited = [*p[:500], p[500] + 1, *p[501:]]
    assert house.run(edited, story(3, 5)).matched == 500
    assert house.run(p, story(2, 5)).matched == len(p) - 1


def test_a_prompt_that_leaves_inside_the_last_reply_rewinds_without_a_copy() -> None:
    house = House()
    prompt, reply = story(1, 300), story(2, 40)
    house.run(prompt, reply)
    got = house.run(prompt + reply[:20] + story(3, 30), story(4, 5))
    assert (got.how, got.matched, got.copied) == ("adopted", 320, ())


def test_a_running_conversation_is_forked_not_shared() -> None:
    house = House()
    prompt = story(1, 300)
    house.run(prompt, story(2, 5))
    first, a = house.begin([*prompt, 7])
    second, b = house.begin([*prompt, 8])
    assert isinstance(a, Grant)
    assert isinstance(b, Grant)
    assert not {s.segment for s in a.lease.leaves} & {s.segment for s in b.lease.leaves}
    house.write(first, [*prompt, 7][a.matched :])
    house.write(second, [*prompt, 8][b.matched :])
    house.check(first, [*prompt, 7])
    house.check(second, [*prompt, 8])


def test_a_named_conversation_is_forked_not_taken_by_another_name() -> None:
    house = House()
    prompt, reply = story(1, 300), story(2, 5)
    for turn, name in ((1, "parent"), (2, "child")):
        tokens = prompt if turn == 1 else prompt + reply + story(3, 20)
        got = house.ledger.admit(turn, Wanted(tuple(tokens), 10, hint=name), name, 0.0)
        assert isinstance(got, Grant)
        house.settle()
        house.write(turn, (tokens + reply[:-1])[got.matched :])
        house.ledger.release(turn, 10_000, 1.0)
        house.settle()
    assert set(house.ledger.conversations) == {"parent", "child"}


def test_other_salts_never_share() -> None:
    house = House()
    prompt = story(1, 600)
    house.run(prompt, story(2, 5), salt=b"a")
    assert house.run(prompt, story(2, 5), salt=b"b").matched == 0


def test_undelivered_rows_are_given_up_on_release() -> None:
    house = House()
    prompt = story(1, 100)
    turn, _ = house.begin(prompt, 50)
    house.write(turn, prompt + story(2, 20))
    house.end(turn, keep=105)
    (conversation,) = house.ledger.conversations
    assert house.ledger.tokens_of(conversation) == prompt + story(2, 20)[:5]


def test_a_turn_cancelled_before_its_first_row_leaves_nothing() -> None:
    house = House()
    turn, _ = house.begin(story(1, 100))
    house.end(turn)
    assert house.ledger.used == 0
    assert not house.ledger.segments
    assert not house.ledger.conversations


def test_a_cancelled_prefill_keeps_the_rows_already_computed() -> None:
    house = House()
    prompt = story(1, 2000)
    turn, _ = house.begin(prompt)
    house.write(turn, prompt[:1024])
    house.end(turn)
    assert house.run(prompt, story(2, 5)).matched == 1024


def test_chains_stay_short_however_long_a_conversation_runs() -> None:
    house = House()
    tokens = story(1, 50)
    for k in range(60):
        reply = story(k + 10, 300)
        house.run(tokens, reply)
        tokens = tokens + reply + story(k + 1000, 20)
    tip = next(iter(house.ledger.conversations.values())).tip
    assert tip.depth <= DEPTH + 1
    assert len(house.ledger.conversations) == 1


def test_slack_of_an_idle_conversation_can_be_given_back() -> None:
    house = House()
    turn, _ = house.begin(story(1, 100), answer=2000)
    house.write(turn, story(1, 100))
    house.end(turn)
    (name,) = house.ledger.idle_slack(house.now + 5, age=2)
    assert house.ledger.trim(name) > 0
    house.settle()
    assert house.ledger.used == BLOCK * ROW
    assert house.run([*story(1, 100), 5], [6]).matched == 100


def test_a_refusal_changes_nothing_and_names_the_numbers() -> None:
    house = House(budget=4 * BLOCK * ROW)
    turn, got = house.begin(story(1, 700))
    house.write(turn, story(1, 700))
    before = (house.ledger.used, len(house.ledger.segments))
    _, refused = house.begin(story(2, 900))
    assert isinstance(refused, Shortage)
    assert refused.needed > refused.available
    assert refused.holders == 1
    assert refused.largest_prompt < 900
    assert (house.ledger.used, len(house.ledger.segments)) == before
    assert isinstance(got, Grant)


def test_the_largest_prompt_named_in_a_refusal_really_fits() -> None:
    house = House(budget=4 * BLOCK * ROW)
    house.begin(story(1, 300), answer=1)
    _, refused = house.begin(story(2, 3000))
    assert isinstance(refused, Shortage)
    _, got = house.begin(story(3, refused.largest_prompt), answer=1)
    assert isinstance(got, Grant)


def test_idle_conversations_make_room_oldest_first() -> None:
    house = House(budget=4 * BLOCK * ROW)
    a, b, c = (story(k, 300) for k in (1, 2, 3))
    house.run(a)
    house.run(b)
    house.run(c)
    assert house.run(b).matched == 299
    assert house.run(a).matched == 0


def test_what_the_incoming_request_needs_is_never_evicted_for_it() -> None:
    house = House(budget=5 * BLOCK * ROW)
    old, young = story(1, 500), story(2, 500)
    house.run(old)
    house.run(young)
    got = house.run(old + story(3, 300), story(4, 5))
    assert got.matched == 500


def test_growth_is_refused_when_nothing_can_go() -> None:
    house = House(budget=2 * BLOCK * ROW)
    turn, got = house.begin(story(1, 500), answer=5)
    assert isinstance(got, Grant)
    house.write(turn, story(1, 500))
    assert isinstance(house.ledger.grow(turn, 300), Shortage)
    house.check(turn, story(1, 500))


def test_pinned_conversations_stay() -> None:
    house = House(budget=4 * BLOCK * ROW)
    house.run(story(1, 300))
    next(iter(house.ledger.conversations.values())).pinned = True
    for k in range(2, 6):
        house.run(story(k, 300))
    assert house.run(story(1, 300)).matched == 299


STEP = st.tuples(st.sampled_from(["go on", "fork", "edit", "fresh", "cancel", "trim"]), st.integers(0, 2**32))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, min_size=1, max_size=25), st.integers(6, 40))
def test_every_turn_reads_its_own_tokens_whatever_happened_before(steps: list[Any], blocks: int) -> None:
    house = House(budget=blocks * BLOCK * ROW)
    kept: list[list[int]] = [story(0, 200)]
    for kind, seed in steps:
        draw = random.Random(seed)
        base = draw.choice(kept)
        at = draw.randrange(len(base) + 1)
        prompt = {
            "go on": base + story(seed, draw.randrange(1, 300)),
            "fork": base[:at] + story(seed, draw.randrange(1, 300)),
            "edit": base[:at] + story(seed, 1) + base[at + 1 :],
            "fresh": story(seed, draw.randrange(1, 900)),
        }.get(kind, base)[: (blocks - 2) * BLOCK - 300]
        if kind == "trim":
            for name in house.ledger.idle_slack(house.now + 10, age=1):
                house.ledger.trim(name)
            house.settle()
        elif kind == "cancel":
            turn, got = house.begin(prompt, draw.randrange(1, 200))
            assert isinstance(got, Grant)
            house.write(turn, prompt[got.matched :][: draw.randrange(1, 300)])
            house.end(turn, keep=draw.randrange(len(prompt) + 1))
        else:
            reply = story(seed + 1, draw.randrange(1, 280))
            house.run(prompt, reply)
            kept.append(prompt + reply)
    assert all(s.lease is None for s in house.ledger.segments.values())
