"""Compiled rounds have the bits of others, write in place, and are left alone where they cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime import compiled
from onecopy.runtime.compiled import BUCKET, CompiledRounds, why_not
from onecopy.runtime.decode import wants_for
from onecopy.runtime.drafting import drafter_for
from onecopy.runtime.engine import Engine
from onecopy.runtime.forward import Forward
from onecopy.runtime.rows.fixed import FixedRound
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ops import Chain, Link
from onecopy.runtime.rows.plan import Strip
from onecopy.runtime.rows.transfer import read_rows
from onecopy.runtime.turn import Sampling

from tests.support.elsewhere import compiler, elsewhere
from tests.support.engines import Case, Talk, opened, together
from tests.support.heads import write_block_drafter
from tests.support.tiny import tiny

LENGTH = 2 * BLOCK + 60
GREEDY = Sampling(seed=0, temperature=0.0)
ROWS = (RowTensor("kv", 4, 16),)

pytestmark = compiler


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    with elsewhere():
        yield Case(opened(tiny("llama", scale=3.0)), 128, LENGTH)


def rounds_of(engine: Engine) -> CompiledRounds:
    found = engine._compiled
    assert found is not None
    return found


def bucket(case: Case, position: int) -> Talk:
    """A new conversation of the first tokens, in a leaf of whole buckets."""
    talk = Talk(case.engine, BUCKET)
    talk.feed(case.tokens[:position], BLOCK)
    return talk


def ran(talk: Talk, tokens: Sequence[int]) -> bool:
    """Whether a round of these tokens is compiled. It moves nothing."""
    strip = talk.strip(tokens)
    found = talk.engine.run([strip], [w for i in range(len(tokens)) for w in wants_for(GREEDY, strip.position + i)])
    return found.compiled


@pytest.mark.parametrize("width", [1, 2, 4, 5, 16])
def test_rounds_have_the_bits_of_others_at_every_width_and_place(case: Case, width: int) -> None:
    first = 2 * BLOCK - 20
    talk = bucket(case, first)
    assert ran(talk, case.tokens[:width])
    graphs = len(rounds_of(case.engine)._graphs)
    assert np.array_equal(talk.feed(case.tokens[first : first + 48], width), case.whole[first : first + 48])
    assert len(rounds_of(case.engine)._graphs) <= graphs + 1  # the last strip may be shorter


def test_a_leaf_behind_other_segments_is_compiled_too(case: Case) -> None:
    talk = Talk(case.engine, BLOCK)
    talk.feed(case.tokens[:BLOCK])
    talk.extend(BLOCK)
    talk.feed(case.tokens[BLOCK : 2 * BLOCK])
    talk.extend(BUCKET)
    assert len(talk.chain.links) == 3
    assert ran(talk, case.tokens[:4])
    assert np.array_equal(talk.feed(case.tokens[2 * BLOCK :], 4), case.whole[2 * BLOCK :])


def test_forks_of_one_size_share_a_graph_and_keep_their_rows_apart(case: Case) -> None:
    parent = case.at(2 * BLOCK + 3)
    forks = [parent.fork(BUCKET) for _ in range(3)]
    forks[0].feed(case.tokens[-4:], 4)
    graphs = len(rounds_of(case.engine)._graphs)
    for fork in forks[1:]:
        found = fork.feed(case.tokens[fork.position : fork.position + 4], 4)
        assert np.array_equal(found, case.whole[fork.position - 4 : fork.position])
    assert len(rounds_of(case.engine)._graphs) == graphs


def test_what_is_read_behind_a_compiled_round_is_what_it_wrote(case: Case) -> None:
    talk = bucket(case, 300)
    talk.feed(case.tokens[300:310], 5)
    other = bucket(case, 20)
    rows = together([(talk, case.tokens[310:330]), (other, case.tokens[20:21])])
    assert np.array_equal(rows[0], case.whole[310:330])
    assert np.array_equal(rows[1], case.whole[20:21])


def test_buffers_are_written_in_place_also_while_a_save_reads_them(case: Case) -> None:
    talk = bucket(case, 40)

    def places() -> list[int]:
        layers = case.engine.pool.segments[talk.leaf].layers
        return [np.array(a, copy=False).ctypes.data for layer in layers for a in layer.flat()]

    talk.feed(case.tokens[40:44])
    before = places()
    held, views = mx.get_active_memory(), []
    for _ in range(4):
        views.append(read_rows(case.engine.pool, talk.leaf, 0, 40))
        talk.feed(case.tokens[talk.position : talk.position + 4], 4)
    assert places() == before
    assert mx.get_active_memory() - held < 4 * case.engine.layout.row_bytes
    assert all(np.array_equal(views[0][name], view[name]) for view in views for name in view)


def test_only_a_short_strip_alone_in_whole_buckets_is_compiled(case: Case) -> None:
    talk, small = bucket(case, 30), Talk(case.engine, 3 * BLOCK)
    assert ran(talk, case.tokens[30:46])
    assert not ran(talk, case.tokens[30:47])
    assert not ran(small, [1])
    tail = Strip(talk.chain, 30, (5, 6), 1)
    assert not case.engine.run([tail], wants_for(GREEDY, 31)).compiled
    strips = [talk.strip([1]), small.strip([1])]
    wants = [w for s in strips for w in wants_for(GREEDY, s.position)]
    assert not case.engine.run(strips, wants).compiled
    assert not case.engine.run([Strip(talk.chain, 30, (5, 6))]).compiled


def test_rows_that_do_not_fit_are_refused_before_anything_is_written(case: Case) -> None:
    talk = bucket(case, 30)
    talk.feed(case.tokens[30:34], 4)
    rows = read_rows(case.engine.pool, talk.leaf, 0, BUCKET)
    before = {name: np.array(view) for name, view in rows.items()}
    chain = Chain((Link(talk.leaf, 0, BUCKET - 2),), BUCKET)
    with pytest.raises(AssertionError, match=r"rows 1022\.\.1026 do not fit"):
        case.engine.forward([Strip(chain, BUCKET - 2, (1, 2, 3, 4), 4)])
    assert all(np.array_equal(rows[name], before[name]) for name in rows)


def test_a_link_without_rows_is_nothing_to_read(case: Case) -> None:
    talk, empty = bucket(case, 30), Talk(case.engine, BLOCK)
    chain = Chain((Link(empty.leaf, 0, 0), *talk.chain.links), BUCKET)
    strip = Strip(chain, 30, tuple(case.tokens[30:34]), 4)
    logits = case.engine.forward([strip])
    case.engine.settle([strip], logits)
    assert np.array_equal(np.array(logits), case.whole[30:34])


def test_the_graph_used_longest_ago_is_dropped(case: Case) -> None:
    talk, rounds = bucket(case, 30), rounds_of(case.engine)
    with mock.patch.object(compiled, "GRAPHS", 2):
        for width in (1, 2, 1, 4):
            talk.feed(case.tokens[talk.position : talk.position + width], width)
        assert [rows for rows, *_ in rounds._graphs] == [1, 4]
    assert np.array_equal(talk.feed(case.tokens[38:40], 2), case.whole[38:40])


def test_what_a_round_shows_to_a_drafter_comes_out_of_the_graph(tmp_path: Path) -> None:
    tokens = np.random.default_rng(9).integers(0, 320, 50).tolist()
    with elsewhere():
        path = write_block_drafter(tmp_path)
        loaded = tiny("llama", vocab_size=320)
        engine = opened(loaded, drafter=drafter_for(loaded, str(path)))
        found = []
        for capacity in (BLOCK, BUCKET):
            talk = Talk(engine, capacity)
            engine.run([Strip(talk.chain, 0, tuple(tokens), 0, 7)])
            talk.position = len(tokens)
            result = engine.run([Strip(talk.chain, 50, (7,), 1, draft=3)], wants_for(GREEDY, 51))
            assert result.compiled == (capacity == BUCKET)
            found.append((result.picks, result.drafts))
        assert found[0] == found[1]
        assert any(found[0][1])


# --- where it is not


def test_on_a_cpu_nothing_is_compiled() -> None:
    with elsewhere(mx.DeviceType.cpu):
        engine = opened(tiny("llama"))
        assert engine.eager == why_not(engine.layout, True)
        assert engine.fixed_rows == 0
        assert not ran(Talk(engine, BUCKET), [1])


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (LayerLayout("window", ROWS, window=9), "window layers read other rows each round"),
        (LayerLayout("recurrent", anchor_bytes=8), "recurrent layers read other rows each round"),
    ],
)
def test_layers_that_read_other_rows_each_round_are_not_compiled(layer: LayerLayout, why: str) -> None:
    plain = LayerLayout("attention", ROWS)
    assert why_not(Layout((plain, layer)), False) == why
    assert why_not(Layout((plain,)), False) is None


def test_a_device_whose_graphs_have_other_bits_runs_eagerly_and_says_so() -> None:
    sees = FixedRound._last_seen
    with elsewhere(), mock.patch.object(FixedRound, "_last_seen", lambda *a: sees(*a) - 1):
        engine = opened(tiny("llama"))
    assert engine.eager == "compiled rounds have other bits than others"
    assert (engine.fixed_rows, engine.pool.segments) == (0, {})
    assert engine.exactness == ("exact", ())


def test_a_device_whose_sums_over_many_tiles_go_another_way_runs_eagerly() -> None:
    last = FixedRound._last_seen

    def wrong(self: FixedRound, *given: Any) -> Any:
        return last(self, *given) - (self.pool.segments[self.strips[0].chain.leaf].capacity > BUCKET)

    with elsewhere(), mock.patch.object(FixedRound, "_last_seen", wrong):
        engine = opened(tiny("llama"))
    assert engine.eager == "compiled rounds have other bits than others"


@pytest.mark.parametrize("error", [KeyError("layer 7"), NotImplementedError("no such thing")])
def test_a_model_that_cannot_be_traced_runs_eagerly_and_says_why(error: Exception) -> None:
    with elsewhere(), mock.patch.object(Forward, "traced", side_effect=error):
        engine = opened(tiny("llama"))
    assert engine.eager == f"its rounds do not compile here: {error}"


def test_a_device_that_cannot_compile_runs_eagerly_and_says_why() -> None:
    with elsewhere(), mock.patch.object(compiled.mx, "compile", _fails):
        engine = opened(tiny("llama"))
    assert engine.eager == "its rounds do not compile here: no compiler found"
    assert (engine.fixed_rows, engine.pool.segments) == (0, {})


def _fails(_: Any) -> Any:
    raise RuntimeError("no  compiler\nfound")


def test_a_graph_that_fails_leaves_the_rows_where_they_were(case: Case) -> None:
    talk = bucket(case, 30)
    arrays = [id(a) for layer in case.engine.pool.segments[talk.leaf].layers for a in layer.arrays.values()]
    with (
        mock.patch.object(case.engine._forward, "traced", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        case.engine.forward([talk.strip([1, 2, 3])])
    after = [id(a) for layer in case.engine.pool.segments[talk.leaf].layers for a in layer.arrays.values()]
    assert after == arrays
    assert np.array_equal(talk.feed(case.tokens[30:33], 3), case.whole[30:33])
