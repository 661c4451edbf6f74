"""The prediction head of Qwen3.5: its rows, its proposals, and that the model beside it is the same without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from onecopy.runtime.decode import wants_for
from onecopy.runtime.drafting import drafter_for
from onecopy.runtime.drafting.qwen3_5 import Mtp
from onecopy.runtime.engine import Engine
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models.loaded import Loaded
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.plan import Strip
from onecopy.runtime.turn import Sampling

from tests.support.engines import Talk, opened
from tests.support.tiny import tiny

QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
}
TOKENS = np.random.default_rng(8).integers(0, 128, 2 * BLOCK + 40).tolist()
GREEDY = Sampling(seed=3, temperature=0.0)


def with_head(**config: Any) -> Loaded:
    """A random model whose checkpoint carries a random head."""
    loaded = tiny("qwen3_5", **QWEN3_5, **config)
    mx.random.seed(11)
    head = Mtp(loaded.model.language_model.args)
    return replace(loaded, draft_head={name: p * 1.5 for name, p in tree_flatten(head.parameters())})


def engine_of(loaded: Loaded) -> Engine:
    return opened(loaded, drafter=drafter_for(loaded))


@pytest.fixture(scope="module", params=["dense", "experts"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(with_head(**(EXPERTS if request.param == "experts" else {})))


def fill(talk: Talk, tokens: list[int], *chunks: int, draft: int = 0, sampling: Sampling = GREEDY) -> Any:
    """Prefills in chunks as a lane does: the last round's (first token, proposal)."""
    edges = [*np.cumsum(chunks).tolist(), len(tokens)]
    at = 0
    for end in edges:
        last = end == len(tokens)
        strip = Strip(
            talk.chain,
            at,
            tuple(tokens[at:end]),
            int(last),
            then=None if last else tokens[end],
            draft=draft if last else 0,
        )
        found = talk.engine.run([strip], wants_for(sampling, end) if last else ())
        talk.position = at = end
    return found.picks[0][0].token, found.drafts[0]


def by_hand(engine: Engine, tokens: list[int], first: int, depth: int) -> list[int]:
    """Greedy guesses of the head over an ordinary cache, from the model's own hidden states."""
    text = engine.model.language_model
    hidden = text.model(mx.array([tokens]), cache=text.make_cache())
    embed = text.model.embed_tokens
    cache, ids, guesses = KVCache(), mx.array([[*tokens[1:], first]]), []
    for _ in range(depth):
        mask = "causal" if ids.shape[1] > 1 else None
        out = _masked(engine.model.mtp, hidden, embed(ids), cache, mask)
        logits = out[0, -1:] @ embed.weight.T
        guesses.append(int(mx.argmax(logits).item()))
        hidden, ids = out[:, -1:], mx.array([[guesses[-1]]])
    return guesses


def _masked(head: Any, hidden: Any, embedded: Any, cache: Any, mask: Any) -> Any:
    joined = mx.concatenate([head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)], axis=-1)
    return head.norm(head.layers[0](head.fc(joined), mask=mask, cache=cache))


def test_the_head_is_one_more_layer_of_rows(engine: Engine) -> None:
    kinds = [layer.kind for layer in engine.layout.layers]
    assert kinds == ["recurrent"] * 3 + ["attention"] * 2
    assert engine.layout.layers[3] == engine.layout.layers[4]


def test_the_model_says_what_it_says_without_its_head(engine: Engine) -> None:
    if "num_experts" in engine.model.args.text_config:
        plain = opened(tiny("qwen3_5", **QWEN3_5, **EXPERTS))
    else:
        plain = opened(tiny("qwen3_5", **QWEN3_5))
    assert np.array_equal(Talk(engine, BLOCK).feed(TOKENS[:60]), Talk(plain, BLOCK).feed(TOKENS[:60]))


@pytest.mark.parametrize("depth", range(1, 6))
def test_proposals_are_those_of_the_head_run_by_hand(engine: Engine, depth: int) -> None:
    talk = Talk(engine, BLOCK)
    first, proposed = fill(talk, TOKENS[:50], draft=depth)
    assert list(proposed) == by_hand(engine, TOKENS[:50], first, depth)


def test_proposals_do_not_depend_on_the_chunks_of_the_prompt_nor_on_segments(engine: Engine) -> None:
    whole = fill(Talk(engine, 3 * BLOCK), TOKENS, draft=4)
    assert fill(Talk(engine, 3 * BLOCK), TOKENS, 100, 156, 256, draft=4) == whole
    parent = Talk(engine, 3 * BLOCK)
    fill(parent, TOKENS[: BLOCK + 30])
    fork = parent.fork(2 * BLOCK)
    strip = Strip(fork.chain, fork.position, tuple(TOKENS[fork.position :]), 1, draft=4)
    found = engine.run([strip], wants_for(GREEDY, len(TOKENS)))
    assert found.picks[0][0].token == whole[0]


def test_rejected_rows_are_overwritten_and_the_next_proposals_are_those_of_an_undrafted_reply(engine: Engine) -> None:
    plain, drafted = Talk(engine, BLOCK), Talk(engine, BLOCK)
    tokens = TOKENS[:40]
    reply = [fill(plain, tokens)[0]]
    for _ in range(12):
        strip = Strip(plain.chain, plain.position, (reply[-1],), 1, draft=3)
        found = engine.run([strip], wants_for(GREEDY, plain.position + 1))
        plain.position += 1
        reply.append(found.picks[0][0].token)
        last = found.drafts[0]
    assert [fill(drafted, tokens)[0]] == reply[:1]
    at, got = 1, ()
    for kept in (0, 2, 1, 3, 0, 0):
        guess = [*reply[at : at + kept], (reply[at + kept] + 1) % 128]
        rows = (reply[at - 1], *guess)
        strip = Strip(drafted.chain, drafted.position, rows, len(rows), draft=3)
        found = engine.run([strip], wants_for(GREEDY, drafted.position + 1, tuple(guess)))
        engine.accept([(strip, kept + 1)])
        assert [p.token for p in found.picks[0]][: kept + 1] == reply[at : at + kept + 1]
        drafted.position += kept + 1
        at += kept + 1
        got = found.drafts[0]
    assert (at, got) == (13, last)


def test_a_proposal_stops_where_the_leaf_ends(engine: Engine) -> None:
    talk = Talk(engine, BLOCK)
    for left, want in ((0, 1), (1, 2), (2, 3)):
        _, proposed = fill(Talk(engine, BLOCK), TOKENS[: BLOCK - left], draft=5)
        assert len(proposed) == want
    assert len(fill(talk, TOKENS[:20], draft=5)[1]) == 5


def test_strips_side_by_side_get_the_proposals_they_get_alone(engine: Engine) -> None:
    alone = [fill(Talk(engine, BLOCK), TOKENS[i : i + 30 + i], draft=i) for i in range(1, 4)]
    talks = [Talk(engine, BLOCK) for _ in range(3)]
    strips = [
        Strip(t.chain, 0, tuple(TOKENS[i : i + 30 + i]), 1, draft=i) for t, i in zip(talks, range(1, 4), strict=True)
    ]
    found = engine.run(strips, [w for s in strips for w in wants_for(GREEDY, s.end)])
    assert [(p[0].token, d) for p, d in zip(found.picks, found.drafts, strict=True)] == alone


def test_a_sampled_reply_is_guessed_with_its_own_noise(engine: Engine) -> None:
    cold, hot = GREEDY, Sampling(seed=3, temperature=3.0)
    guesses = {s.temperature: fill(Talk(engine, BLOCK), TOKENS[:50], draft=5, sampling=s)[1] for s in (cold, hot)}
    assert guesses[0.0] != guesses[3.0]
    assert fill(Talk(engine, BLOCK), TOKENS[:50], draft=5, sampling=hot)[1] == guesses[3.0]


def test_a_head_that_does_not_fit_is_refused_by_the_name_of_its_tensor() -> None:
    loaded = with_head()
    bad = dict(loaded.draft_head)
    bad["fc.weight"] = bad["fc.weight"][:, :-1]
    with pytest.raises(ModelLoadError, match=r"prediction head does not fit the model: mtp\.fc\.weight"):
        drafter_for(replace(loaded, draft_head=bad))
    del bad["fc.weight"]
    with pytest.raises(ModelLoadError, match=r"mtp\.fc\.weight"):
        drafter_for(replace(tiny("qwen3_5", **QWEN3_5), draft_head=bad))


def test_packed_and_separate_experts_become_the_layer_they_stand_for() -> None:
    loaded = with_head(**EXPERTS)
    stem = "layers.0.mlp.switch_mlp"
    parts = dict(loaded.draft_head)
    gate, up, down = (parts.pop(f"{stem}.{n}_proj.weight") for n in ("gate", "up", "down"))
    fused = parts | {
        "layers.0.mlp.experts.gate_up_proj": mx.concatenate([gate, up], axis=-2),
        "layers.0.mlp.experts.down_proj": down,
    }
    single = parts | {
        f"layers.0.mlp.experts.{i}.{n}_proj.weight": w[i]
        for n, w in (("gate", gate), ("up", up), ("down", down))
        for i in range(4)
    }
    want = fill(Talk(engine_of(loaded), BLOCK), TOKENS[:30], draft=4)
    for head in (fused, single):
        again = replace(tiny("qwen3_5", **QWEN3_5, **EXPERTS), draft_head=head)
        assert fill(Talk(engine_of(again), BLOCK), TOKENS[:30], draft=4) == want


def test_a_model_without_a_head_or_with_several_layers_of_one_has_no_drafter() -> None:
    assert drafter_for(tiny("qwen3_5", **QWEN3_5)) is None
    loaded = with_head()
    more = {name.replace("layers.0.", "layers.1."): w for name, w in loaded.draft_head.items()}
    assert drafter_for(replace(loaded, draft_head={**loaded.draft_head, **more})) is None
