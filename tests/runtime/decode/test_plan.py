from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.decode.plan import Chunk, Costs, Decode, Limits, Round, View, chunk_end, passed_after, plan

COSTS = Costs(decode_ms=20, chunk_ms=500)
LIMITS = Limits()


def prompt(id: int, left: int, **more: object) -> View:
    return replace(View(id, position=0, left=left, order=id), **more)  # type: ignore[arg-type]


def reply(id: int, **more: object) -> View:
    return replace(View(id, position=100, left=0, order=id), **more)  # type: ignore[arg-type]


@dataclass
class Line:
    """A lane in miniature: it runs planned rounds on a clock that moves by their estimated cost."""

    limits: Limits = LIMITS
    costs: Costs = COSTS
    views: dict[int, View] = field(default_factory=dict)
    answers: dict[int, int] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    started: dict[int, float] = field(default_factory=dict)
    replied: dict[int, list[float]] = field(default_factory=dict)
    now: float = 0.0
    owed: float = 0.0

    def add(self, view: View, answer: int = 10) -> None:
        self.views[view.id], self.answers[view.id] = view, answer

    def step(self) -> Round:
        done = plan(list(self.views.values()), self.costs, self.limits, self.owed)
        self.owed = done.owed
        self.rounds.append(done)
        self.views = {id: replace(view, passed=passed_after(view, done)) for id, view in self.views.items()}
        self._fill(done.chunk)
        self._reply(done.decode)
        return done

    def until_done(self, id: int, bound: int = 5000) -> None:
        for _ in range(bound):
            if id not in self.views:
                return
            self.step()
        raise AssertionError(f"{id} was not served in {bound} rounds")

    def _fill(self, chunk: Chunk | None) -> None:
        if chunk is None:
            return
        self.started.setdefault(chunk.id, self.now)
        view, rows = self.views[chunk.id], chunk.end - chunk.start
        assert (chunk.start, chunk.last) == (view.position, rows == view.left)
        self.now += self.costs.chunk_ms * rows / self.limits.chunk
        self.views[chunk.id] = replace(view, position=chunk.end, left=view.left - rows)

    def _reply(self, decode: tuple[Decode, ...]) -> None:
        self.now += self.costs.decode_ms if decode else 0
        for row in decode:
            self.replied.setdefault(row.id, []).append(self.now)
            self.answers[row.id] -= 1
            self.views[row.id] = replace(self.views[row.id], rounds=self.views[row.id].rounds + 1)
            if not self.answers[row.id]:
                del self.views[row.id]


def test_without_work_a_round_is_idle() -> None:
    assert plan([], COSTS, LIMITS).idle


def test_replies_alone_decode_together_at_their_own_widths() -> None:
    done = plan([reply(1), reply(2, draft=3), reply(3, draft=50)], COSTS, LIMITS)
    assert done == Round(decode=(Decode(1, 1), Decode(2, 4), Decode(3, LIMITS.width)))


def test_drafts_give_way_before_any_reply_does() -> None:
    limits = Limits(batch=4, rows=6)
    done = plan([reply(id, draft=3) for id in range(4)], COSTS, limits)
    assert [row.width for row in done.decode] == [3, 1, 1, 1]


def test_replies_beyond_the_batch_take_turns() -> None:
    line = Line(limits=Limits(batch=2, rows=2))
    for id in range(5):
        line.add(reply(id), answer=1000)
    for _ in range(50):
        line.step()
    counts = [len(line.replied[id]) for id in range(5)]
    assert sum(counts) == 100
    assert max(counts) - min(counts) <= 1


def test_a_prompt_alone_fills_chunk_by_chunk_to_its_last_row() -> None:
    line = Line()
    line.add(prompt(1, left=1100), answer=1)
    line.until_done(1)
    assert [r.chunk for r in line.rounds[:-1]] == [
        Chunk(1, 0, 512, last=False),
        Chunk(1, 512, 1024, last=False),
        Chunk(1, 1024, 1100, last=True),
    ]


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.sampled_from([256, 512, 2048]))
def test_chunks_end_at_absolute_multiples_whatever_was_there_before(start: int, left: int, chunk: int) -> None:
    ends, position, total = [], start, start + left
    while position < total:
        position = chunk_end(position, total - position, chunk)
        ends.append(position)
    assert ends[-1] == total
    assert ends[:-1] == [end for end in range(0, total, chunk) if start < end]


def test_a_short_request_behind_a_long_prefill_starts_at_the_next_chunk() -> None:
    line = Line()
    line.add(prompt(1, left=100_000))
    for _ in range(3):
        line.step()
    line.add(prompt(2, left=200), answer=5)
    assert line.step().chunk == Chunk(2, 0, 200, last=True)
    line.until_done(2)
    assert line.now < 3 * COSTS.chunk_ms + 2 * COSTS.chunk_ms


def test_a_long_prompt_finishes_under_a_stream_of_short_ones() -> None:
    line = Line()
    line.add(prompt(0, left=20 * LIMITS.chunk), answer=1)
    for id in range(1, 2000):
        line.add(prompt(id, left=100), answer=1)
        line.step()
        if not line.views.get(0, prompt(0, 0)).left:
            break
    chunks = [r.chunk.id for r in line.rounds if r.chunk]
    assert chunks.count(0) == 20
    waits = [at for at, id in enumerate(chunks) if id == 0]
    assert max(later - sooner for sooner, later in pairwise(waits)) <= LIMITS.passes + 1


def test_replies_get_their_share_of_time_while_a_prompt_fills() -> None:
    for share in (0.1, 0.25, 0.5, 0.9):
        for decode_ms in (5, 20, 300, 2000):
            line = Line(limits=Limits(decode_share=share), costs=Costs(decode_ms, 500))
            line.add(reply(1), answer=10**6)
            line.add(prompt(2, left=60 * 512))
            while line.views[2].left:
                line.step()
            spent = len(line.replied[1]) * decode_ms
            assert spent == pytest.approx(share * line.now, abs=decode_ms + 500)


def test_the_gap_between_two_tokens_is_bounded_by_one_chunk() -> None:
    line = Line()
    line.add(reply(1), answer=2000)
    line.add(prompt(2, left=50_000))
    while line.views[2].left:
        line.step()
    times = line.replied[1]
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert max(gaps) <= COSTS.chunk_ms + COSTS.decode_ms


def test_background_yields_to_normal_and_continues_where_it_was() -> None:
    line = Line()
    line.add(prompt(1, left=2000, priority="background"), answer=5)
    line.step()
    line.add(prompt(2, left=600), answer=3)
    line.until_done(2)
    assert {id for r in line.rounds[1:] for id in r.served} == {2}
    assert line.views[1].position == 512
    assert line.step().chunk == Chunk(1, 512, 1024, last=False)
    line.until_done(1)
    assert len(line.replied[1]) == 5


def test_a_background_reply_yields_too_and_repeats_nothing() -> None:
    line = Line()
    line.add(reply(1, priority="background"), answer=6)
    line.step()
    line.add(reply(2), answer=4)
    line.until_done(2)
    assert [len(line.replied[id]) for id in (1, 2)] == [1, 4]
    line.until_done(1)
    assert len(line.replied[1]) == 6


def test_background_conversations_share_among_themselves() -> None:
    views = [reply(1, priority="background"), prompt(2, left=300, priority="background")]
    done = plan(views, COSTS, LIMITS)
    assert done.chunk is not None
    assert done.decode == (Decode(1, 1),)


def test_waiting_for_replies_owed_is_not_being_passed_over() -> None:
    done = plan([reply(1), prompt(2, left=500), prompt(3, left=900)], COSTS, LIMITS, owed=30)
    assert done.chunk is None
    assert not done.passed


VIEWS = st.lists(
    st.builds(
        View,
        id=st.integers(0, 10_000),
        position=st.integers(0, 5000),
        left=st.one_of(st.just(0), st.integers(1, 9000)),
        order=st.integers(0, 5),
        priority=st.sampled_from(["normal", "background"]),
        passed=st.integers(0, 12),
        draft=st.integers(0, 12),
    ),
    max_size=12,
    unique_by=lambda view: view.id,
)


@given(VIEWS, st.floats(-500, 500), st.randoms(use_true_random=False))
def test_a_plan_depends_on_the_views_and_not_on_their_order(views: list[View], owed: float, rng: random.Random) -> None:
    shuffled = rng.sample(views, len(views))
    assert plan(views, COSTS, LIMITS, owed) == plan(shuffled, COSTS, LIMITS, owed)


@given(VIEWS, st.floats(-500, 500))
def test_a_plan_keeps_its_limits_and_always_does_something(views: list[View], owed: float) -> None:
    limits = Limits(batch=4, rows=9, width=5)
    done = plan(views, COSTS, limits, owed)
    by_id = {view.id: view for view in views}
    assert done.idle == (not views)
    assert len(done.decode) <= limits.batch
    assert sum(row.width for row in done.decode) <= limits.rows
    assert all(1 <= row.width <= min(limits.width, 1 + by_id[row.id].draft) for row in done.decode)
    assert len({by_id[id].priority for id in done.served}) <= 1
    assert not done.served & done.passed


@given(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 60)), min_size=1, max_size=12))
def test_every_prompt_is_served_and_the_oldest_never_waits_past_the_bound(arrivals: list[tuple[int, int]]) -> None:
    line = Line(costs=Costs(50, 100))
    due = sorted(((at, id, left) for id, (left, at) in enumerate(arrivals)), reverse=True)
    for step in range(3000):
        while due and due[-1][0] <= step:
            _, id, left = due.pop()
            line.add(prompt(id, left), answer=3)
        line.step()
        filling = [view for view in line.views.values() if view.left]
        assert not filling or min(filling, key=lambda view: view.order).passed <= LIMITS.passes
        if not due and not line.views:
            return
    raise AssertionError("somebody was never served")


@pytest.mark.parametrize(
    "wrong", [{"decode_share": 0.0}, {"decode_share": 1.0}, {"chunk": 300}, {"chunk": 0}, {"batch": 0}, {"rows": 3}]
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Limits(**wrong)  # type: ignore[arg-type]
