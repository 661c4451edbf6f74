"""qwen4_exp's rows: a row's bits are its own, states follow rewinds, pooled keys are derived, buffers stay put."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.models.qwen4_exp import Model, Round, load_qwen4_exp, propose
from onecopy.runtime.models.qwen4_exp.memory import Buffers, MemoryIndexed

from tests.support.qwen4_run import F32, feed, feed_together, fresh, in_steps, row_tiled_linears
from tests.support.qwen4_tiny import tiny, write

IDS = np.random.default_rng(3).integers(2, 512, 203).tolist()
SHAPES = {"ratio 4": {}, "ratio 3": {"indexer_compress_ratio": 3, "indexer_budget": 12}}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = tiny(num_hidden_layers=4, **SHAPES[request.param])
    return load_qwen4_exp(write(tmp_path_factory.mktemp("tiny"), config, mtp=1))[0]


@pytest.fixture(autouse=True)
def exact_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    row_tiled_linears(monkeypatch)


@pytest.fixture(scope="module")
def whole(model: Model) -> F32:
    with pytest.MonkeyPatch.context() as patch:
        row_tiled_linears(patch)
        return feed(model, fresh(model), IDS)


def test_chunks_of_any_width_give_the_bits_of_one_prefill(model: Model, whole: F32) -> None:
    assert np.array_equal(in_steps(model, fresh(model), IDS, [7, 64, 1, 100, 31]), whole)


def test_decoding_row_by_row_gives_the_bits_of_one_prefill(model: Model, whole: F32) -> None:
    assert np.array_equal(in_steps(model, fresh(model), IDS[:80], [1] * 80), whole[:80])


def test_a_conversation_in_a_batch_has_the_bits_it_has_alone(model: Model, whole: F32) -> None:
    lengths = (203, 20, 77)
    conversations = [fresh(model) for _ in lengths]
    for conversation, length in zip(conversations, lengths, strict=True):
        feed(model, conversation, IDS[: length - 8])
    for back in (8, 4):
        rows = feed_together(model, conversations, [IDS[n - back : n - back + 4] for n in lengths])
        for logits, n in zip(rows, lengths, strict=True):
            assert np.array_equal(logits, whole[n - back : n - back + 4])


def test_rejected_drafts_leave_no_trace(model: Model, whole: F32) -> None:
    conversation, kept = fresh(model), []
    feed(model, conversation, IDS[:60])
    for accepted in (1, 3, 2, 4, 1, 4, 2):
        at = conversation.length
        draft = IDS[at : at + accepted] + [9] * (4 - accepted)
        round_ = Round([conversation], trail=True)
        kept.append(np.array(model([draft], round_.layers)[0])[:accepted])
        round_.commit([accepted])
    assert np.array_equal(np.concatenate(kept), whole[60 : conversation.length])


def test_a_rewind_to_an_anchor_forgets_everything_after_it(model: Model, whole: F32) -> None:
    conversation = fresh(model)
    feed(model, conversation, IDS[:70])
    anchor = conversation.anchor()
    feed(model, conversation, [5] * 50)
    conversation.rewind(70, anchor)
    assert np.array_equal(feed(model, conversation, IDS[70:120]), whole[70:120])


def test_a_fork_and_its_parent_go_on_apart(model: Model, whole: F32) -> None:
    parent = fresh(model)
    feed(model, parent, IDS[:50])
    child = parent.fork()
    feed(model, parent, [7] * 20)
    assert np.array_equal(feed(model, child, IDS[50:90]), whole[50:90])
    alone = feed(model, fresh(model), [*IDS[:50], *[7] * 20, 8])
    assert np.array_equal(feed(model, parent, [8]), alone[-1:])


def test_pooled_keys_past_the_frontier_are_never_believed(model: Model, whole: F32) -> None:
    conversation = fresh(model)
    feed(model, conversation, IDS[:90])
    for buffers in filter(None, conversation.rows):
        buffers.pooled[90 // model.config.ratio :] = 1e6
        buffers.keys[:, 90:] = 1e6
        buffers.values[:, 90:] = 1e6
        buffers.raw[90:] = 1e6
    assert np.array_equal(in_steps(model, conversation, IDS[90:130], [1, 20, 19]), whole[90:130])


def test_decoding_writes_buffers_in_place(model: Model) -> None:
    conversation = fresh(model)
    feed(model, conversation, IDS[:100])
    before = [address(a) for b in conversation.rows if b for a in (b.keys, b.values, b.raw, b.pooled)]
    in_steps(model, conversation, IDS[100:140], [1] * 40)
    assert before == [address(a) for b in conversation.rows if b for a in (b.keys, b.values, b.raw, b.pooled)]


def address(array: mx.array) -> int:
    mx.eval(array)
    return np.array(array, copy=False).ctypes.data


def test_a_token_past_the_budget_reads_only_selected_rows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    gather = MemoryIndexed.gather

    def counted(self: MemoryIndexed, conversation: int, positions: mx.array) -> tuple[mx.array, mx.array]:
        read.append(int(positions.size))
        return gather(self, conversation, positions)

    def never(*_: object) -> None:
        raise AssertionError("a row past the budget read a whole prefix")

    conversation, c = fresh(model), model.config
    feed(model, conversation, IDS)
    monkeypatch.setattr(MemoryIndexed, "gather", counted)
    monkeypatch.setattr(MemoryIndexed, "prefix", never)
    feed(model, conversation, [11])
    assert read == [c.tile] * c.layer_types.count("indexed_attention")
    assert c.tile < 2 * (c.budget + c.ratio)


def test_proposals_have_the_asked_depth_and_are_repeatable(model: Model) -> None:
    conversation = fresh(model)
    round_ = Round([conversation])
    streams = model.streams([IDS[:40]], round_.layers)[:, -1:]
    round_.commit([40])

    def proposed() -> list[list[int]]:
        buffers = Buffers.empty(model.config)
        return propose(model, streams, [IDS[40]], lambda i: MemoryIndexed([buffers], [i], model.config), 4)

    first = proposed()
    assert [len(guess) for guess in first] == [4]
    assert first == proposed()
