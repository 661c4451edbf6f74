"""The prediction head of qwen4_exp over the bank's rows, against the same head over plain buffers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.decode import wants_for
from onecopy.runtime.drafting import drafter_for
from onecopy.runtime.engine import Engine
from onecopy.runtime.models import load
from onecopy.runtime.models.qwen4_exp import Round, load_qwen4_exp, mtp_logits
from onecopy.runtime.models.qwen4_exp.memory import Buffers, MemoryIndexed
from onecopy.runtime.rows.plan import Strip
from onecopy.runtime.turn import Sampling

from tests.support.engines import Talk, opened
from tests.support.qwen4_run import fresh
from tests.support.qwen4_tiny import write_served

TOKENS = np.random.default_rng(2).integers(0, 500, 90).tolist()
GREEDY = Sampling(seed=1, temperature=0.0)


@pytest.fixture(scope="module", params=(1, 2, 3), ids="{} layers".format)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("indexed"), mtp=request.param)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    loaded = load(str(path), dtype="float32")
    return opened(loaded, drafter=drafter_for(loaded))


def by_hand(path: Path, tokens: list[int], first: int, depth: int) -> list[int]:
    """Greedy guesses of the head, everything computed from the beginning for each of them."""
    model, _ = load_qwen4_exp(path)
    fed = model.streams([tokens], Round([fresh(model)]).layers)
    ids, guesses, count = [*tokens[1:], first], list[int](), len(model.mtp.layers)
    while True:
        picked, streams = None, fed
        for layer in range(count):
            rows = MemoryIndexed([Buffers.empty(model.config)], [0], model.config)
            logits, out = mtp_logits(model, streams, [ids], rows, layer)
            if layer == len(guesses) % count:
                picked, guess = out[:, -1:], int(mx.argmax(logits[0, -1]).item())
            streams = mx.concatenate([mx.zeros_like(out[:, :1]), out[:, :-1]], axis=1)
        guesses.append(guess)
        if len(guesses) == depth:
            return guesses
        fed, ids = mx.concatenate([fed, picked], axis=1), [*ids, guess]


@pytest.mark.parametrize("length", [1, 3, 7, 60, 90])
def test_proposals_are_those_of_the_head_run_by_hand(engine: Engine, path: Path, length: int) -> None:
    talk, tokens = Talk(engine), TOKENS[:length]
    found = engine.run([Strip(talk.chain, 0, tuple(tokens), 1, draft=4)], wants_for(GREEDY, length))
    assert list(found.drafts[0]) == by_hand(path, tokens, found.picks[0][0].token, 4)


def test_the_heads_last_layer_is_an_indexed_one_like_the_models_own(engine: Engine) -> None:
    *own, head = engine.layout.layers
    assert head.kind == "qsa"
    assert head in own


def test_proposals_after_rejected_drafts_are_those_of_an_undrafted_reply(engine: Engine) -> None:
    plain, drafted = Talk(engine), Talk(engine)
    tokens = tuple(TOKENS[:45])
    first = [
        engine.run([Strip(t.chain, 0, tokens, 1)], wants_for(GREEDY, 45)).picks[0][0].token for t in (plain, drafted)
    ]
    plain.position = drafted.position = 45
    want = engine.run([Strip(plain.chain, 45, (first[0],), 1, draft=4)], wants_for(GREEDY, 46))
    wrong = ((want.picks[0][0].token + 1) % 500, 3, 4, 5)
    strip = Strip(drafted.chain, 45, (first[1], *wrong), 5, draft=4)
    got = engine.run([strip], wants_for(GREEDY, 46, wrong))
    assert got.drafts == want.drafts
