"""qwen4_exp on the bank's rows: indexed layers read chains where they lie, states follow, logits are the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.engine import Engine
from onecopy.runtime.forward import Forward
from onecopy.runtime.models import Loaded, load
from onecopy.runtime.models.qwen4_exp import Conversation, Round
from onecopy.runtime.rows.indexed import IndexedCache
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ops import LoadAnchor, SaveAnchor
from onecopy.runtime.rows.transfer import read_rows, read_state, write_rows, write_state

from tests.support.engines import Logits, Talk, opened, together
from tests.support.qwen4_tiny import tiny, write

IDS = np.random.default_rng(3).integers(2, 512, 2 * BLOCK + 90).tolist()
SHAPES: dict[str, dict[str, Any]] = {
    "ratio 4": {},
    "ratio 3": {"indexer_compress_ratio": 3, "indexer_budget": 12},
    "a budget of blocks": {"indexer_compress_ratio": 8, "indexer_budget": 320},
}
"""Ratios that do and do not divide a block; a budget that ends inside the second block."""


@pytest.fixture(scope="module", params=SHAPES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    config = tiny(num_hidden_layers=4, **SHAPES[request.param])
    return load(str(write(tmp_path_factory.mktemp("tiny"), config)))


@pytest.fixture(scope="module")
def bare(loaded: Loaded) -> Logits:
    """Logits of all ids by the model alone, before an engine prepares it."""
    model: Any = loaded.model
    round_ = Round([Conversation(model.config, model.states(), model.kinds)])
    return np.array(model([IDS], round_.layers)[0])


@pytest.fixture(scope="module")
def engine(loaded: Loaded, bare: Logits) -> Engine:
    return opened(loaded, context=4096)


@pytest.fixture(scope="module")
def whole(engine: Engine) -> Logits:
    """Logits of all ids, fed at once into one segment."""
    return Talk(engine, 3 * BLOCK).feed(IDS)


def test_rows_of_the_bank_give_what_the_bare_model_gives(whole: Logits, bare: Logits) -> None:
    assert np.abs(whole - bare).max() <= 1e-5 * np.abs(bare).max()
    assert (whole.argmax(-1) == bare.argmax(-1)).all()


def test_the_layout_prices_rows_pooled_keys_and_states(engine: Engine, loaded: Loaded) -> None:
    model: Any = loaded.model
    c = model.config
    *_, qsa = engine.layout.layers
    assert [layer.kind for layer in engine.layout.layers] == ["recurrent"] * 3 + ["qsa"]
    assert qsa.row_bytes == 4 * (2 * c.kv_heads * c.head_dim + c.index_dim)
    assert qsa.capacity_bytes(3 * BLOCK) - qsa.row_bytes * 3 * BLOCK == 4 * c.index_dim * -(-3 * BLOCK // c.ratio)
    assert engine.layout.state_bytes == sum(4 * int(np.prod(s.shape)) for layer in model.states() for s in layer)


def test_rows_have_the_same_bits_in_any_steps(engine: Engine, whole: Logits) -> None:
    assert engine.exactness == ("exact", ())
    assert np.array_equal(Talk(engine, 3 * BLOCK).feed(IDS, 200, 1, 3, 56, 7, 100), whole)


@pytest.mark.parametrize("width", range(1, 17))
def test_a_row_has_the_same_bits_at_every_verify_width(engine: Engine, whole: Logits, width: int) -> None:
    assert np.array_equal(Talk(engine, 3 * BLOCK).feed(IDS, width), whole)


@pytest.mark.parametrize("count", range(2, 17))
def test_a_row_has_the_same_bits_in_every_batch(engine: Engine, whole: Logits, count: int) -> None:
    steps = -(-512 // count)
    talks = [Talk(engine, 3 * BLOCK) for _ in range(count)]
    for i, talk in enumerate(talks):
        talk.feed(IDS[: (37 * i + 11) % (len(IDS) - steps)])
    for _ in range(steps):
        for row, talk in zip(together([(t, [IDS[t.position]]) for t in talks]), talks, strict=True):
            assert np.array_equal(row[0], whole[talk.position - 1])


def test_a_chain_of_segments_gives_the_bits_of_one(engine: Engine, whole: Logits) -> None:
    talk = Talk(engine, BLOCK)
    found = [talk.feed(IDS[:BLOCK], 100)]
    talk.extend(BLOCK)
    found.append(talk.feed(IDS[BLOCK : 2 * BLOCK], 255, 1))
    talk.extend(BLOCK)
    found.append(talk.feed(IDS[2 * BLOCK :], 40, 1))
    assert np.array_equal(np.concatenate(found), whole)


def test_conversations_of_other_lengths_do_not_change_a_bit(engine: Engine, whole: Logits) -> None:
    lengths = (5, 19, 64, 250, 257, 300, 511, 580)
    talks = [Talk(engine, 3 * BLOCK) for _ in lengths]
    for talk, n in zip(talks, lengths, strict=True):
        talk.feed(IDS[:n])
    widths = (1, 1, 4, 1, 2, 1, 4, 9)
    work = [(talk, IDS[n : n + w]) for talk, n, w in zip(talks, lengths, widths, strict=True)]
    for rows, n, w in zip(together(work), lengths, widths, strict=True):
        assert np.array_equal(rows, whole[n : n + w])


@pytest.mark.parametrize("at", [20, BLOCK, BLOCK + 2, 2 * BLOCK + 7])
def test_a_fork_and_its_parent_go_on_apart(engine: Engine, whole: Logits, at: int) -> None:
    parent = Talk(engine, 3 * BLOCK)
    parent.feed(IDS[:at])
    engine.pool.apply((SaveAnchor(parent.leaf, 5),))
    child = parent.fork(2 * BLOCK)
    engine.pool.apply((LoadAnchor(5, child.leaf),))
    parent.feed([7] * 30)
    assert np.array_equal(child.feed(IDS[at : at + 40], 3), whole[at : at + 40])
    rows = together([(parent, [9]), (child, IDS[at + 40 : at + 41])])
    assert np.array_equal(rows[1], whole[at + 40 : at + 41])


def test_a_rewind_to_an_anchor_forgets_what_came_after_it(engine: Engine, whole: Logits) -> None:
    talk = Talk(engine, 3 * BLOCK)
    talk.feed(IDS[:70])
    engine.pool.apply((SaveAnchor(talk.leaf, 5),))
    talk.feed([5] * 300)
    engine.pool.apply((LoadAnchor(5, talk.leaf),))
    talk.position = 70
    assert np.array_equal(talk.feed(IDS[70:400], 5, 90), whole[70:400])


@pytest.mark.parametrize("kept", range(1, 6))
def test_a_verify_round_keeps_states_and_pooled_keys_at_the_accepted_row(
    engine: Engine, whole: Logits, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    talk = Talk(engine, 3 * BLOCK)
    talk.feed(IDS[:40])
    strip = talk.strip([*IDS[40 : 40 + kept], *[1] * (6 - kept)])
    engine.settle([strip], engine.forward([strip]))
    monkeypatch.setattr(Forward, "__call__", lambda *_: pytest.fail("a state that is told is not computed again"))
    engine.accept([(strip, kept)])
    monkeypatch.undo()
    talk.position += kept
    assert np.array_equal(talk.feed(IDS[40 + kept : 90], 9), whole[40 + kept : 90])


@pytest.mark.parametrize("at", [30, BLOCK, BLOCK + 101])
def test_rows_and_states_written_elsewhere_go_on_as_they_would_have(engine: Engine, whole: Logits, at: int) -> None:
    talk = Talk(engine, 3 * BLOCK)
    talk.feed(IDS[:at])
    engine.pool.apply((SaveAnchor(talk.leaf, 5),))
    back = Talk(engine, 3 * BLOCK)
    for start in range(0, at, BLOCK):
        rows = read_rows(engine.pool, talk.leaf, start, min(at, start + BLOCK))
        write_rows(engine.pool, back.leaf, start, {key: array.copy() for key, array in rows.items()})
    write_state(engine.pool, back.leaf, read_state(engine.pool, 5))
    back.position = at
    assert np.array_equal(back.feed(IDS[at : at + 60], 1), whole[at : at + 60])


def test_pooled_keys_past_the_frontier_are_never_believed(engine: Engine, whole: Logits, loaded: Loaded) -> None:
    model: Any = loaded.model
    talk = Talk(engine, 3 * BLOCK)
    talk.feed(IDS[:350])
    *_, layer = engine.pool.segments[talk.leaf].layers
    layer.pooled["p"][:, 350 // model.config.ratio :] = 1e6
    for array in layer.arrays.values():
        array[:, 350:] = 1e6
    assert np.array_equal(talk.feed(IDS[350:400], 1, 20), whole[350:400])


def test_decoding_writes_every_buffer_in_place(engine: Engine) -> None:
    parent = Talk(engine, 2 * BLOCK)
    parent.feed(IDS[:BLOCK])
    engine.pool.apply((SaveAnchor(parent.leaf, 5),))
    child = parent.fork(BLOCK)
    engine.pool.apply((LoadAnchor(5, child.leaf),))

    def addresses() -> list[int]:
        leaves = [engine.pool.segments[t.leaf] for t in (parent, child)]
        buffers = (b for s in leaves for x in s.layers for b in (*x.arrays.values(), *x.pooled.values()))
        return [np.array(b, copy=False).ctypes.data for b in buffers]

    before = addresses()
    for i in range(20):
        together([(parent, [IDS[i]]), (child, [IDS[-i]])])
    assert addresses() == before


def test_past_the_budget_only_selected_rows_are_read(
    engine: Engine, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = loaded.model
    read: list[int] = []
    gather = IndexedCache.gather

    def counted(self: IndexedCache, conversation: int, positions: mx.array) -> tuple[mx.array, mx.array]:
        read.append(int(positions.size))
        return gather(self, conversation, positions)

    def never(*_: object) -> None:
        raise AssertionError("a row past the budget read a whole prefix")

    talk = Talk(engine, 3 * BLOCK)
    talk.feed(IDS[:400])
    monkeypatch.setattr(IndexedCache, "gather", counted)
    monkeypatch.setattr(IndexedCache, "prefix", never)
    talk.feed([11])
    c = model.config
    assert read == [-(-(c.budget + 401 % c.ratio) // c.tile) * c.tile]


def test_what_a_token_copies_does_not_grow_with_the_context(engine: Engine) -> None:
    """The rows before it are all zeros, which is as much to read as any others."""

    def peak(position: int) -> int:
        talk = Talk(engine, position + BLOCK)
        talk.position = position
        talk.feed([11])
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        talk.feed([12])
        engine.pool.segments.pop(talk.leaf)
        return mx.get_peak_memory() - before

    far, qsa = 200 * BLOCK, engine.layout.layers[-1]
    scores = 16 * 4 * far // qsa.ratio
    joined = 2 * qsa.pooled[0].row_bytes * far // qsa.ratio if BLOCK % qsa.ratio else 0
    assert peak(far) <= peak(2 * BLOCK) + scores + joined < qsa.row_bytes * far // 4


def test_a_directory_loads_with_its_table_in_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "named", tiny(num_hidden_layers=4))
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    found = load(str(path))
    model: Any = found.model
    assert (found.id, found.eos, found.context, found.vocab_size) == ("named", {1, 7}, 4096, 512)
    maps = model.layers[1].ple._table._maps
    assert all(isinstance(shard, np.memmap) for shard in maps)
    assert load(str(write(tmp_path / "other" / "named", tiny(num_hidden_layers=4, seed=9)))).digest != found.digest
