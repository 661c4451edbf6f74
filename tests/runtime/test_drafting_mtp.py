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
from onecopy.runtime.drafting.rows import OUTPUT
from onecopy.runtime.engine import Engine
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models.loaded import Loaded
from onecopy.runtime.rows.layout import BLOCK, RowTensor
from onecopy.runtime.rows.ops import Drop, LoadAnchor, SaveAnchor
from onecopy.runtime.rows.plan import Strip
from onecopy.runtime.rows.transfer import read_rows, write_rows
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


def with_head(layers: int = 1, **config: Any) -> Loaded:
    """A random model whose checkpoint carries a random head of so many layers."""
    loaded = tiny("qwen3_5", mtp_num_hidden_layers=layers, **QWEN3_5, **config)
    mx.random.seed(11)
    head = Mtp(loaded.model.language_model.args, layers)
    return replace(loaded, draft_head={name: p * 1.5 for name, p in tree_flatten(head.parameters())})


def engine_of(loaded: Loaded) -> Engine:
    return opened(loaded, drafter=drafter_for(loaded))


HEADS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "two layers": {"layers": 2},
    "three layers": {"layers": 3},
}


@pytest.fixture(scope="module", params=HEADS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(with_head(**HEADS[request.param]))


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


def feed(talk: Talk, *ends: int) -> None:
    """TOKENS up to each of these ends, within a prompt."""
    for end in ends:
        talk.engine.run([strip_of(talk, end)])
        talk.position = end


def strip_of(talk: Talk, end: int) -> Strip:
    return Strip(talk.chain, talk.position, tuple(TOKENS[talk.position : end]), then=TOKENS[end])


def ended(talk: Talk) -> tuple[int, tuple[int, ...]]:
    """The rest of TOKENS, with which a prompt ends: its first token and proposal."""
    strip = Strip(talk.chain, talk.position, tuple(TOKENS[talk.position :]), 1, draft=4)
    found = talk.engine.run([strip], wants_for(GREEDY, strip.end))
    talk.position = strip.end
    return found.picks[0][0].token, found.drafts[0]


def rows_of(talk: Talk) -> bytes:
    """The bits of all rows of the head."""
    parts = []
    for link in talk.chain.links:
        rows = read_rows(talk.engine.pool, link.segment, link.start, link.stop)
        parts.append({name: array for name, array in rows.items() if int(name.split(".")[0]) >= 4})
    return b"".join(np.concatenate([part[name] for part in parts], axis=1).tobytes() for name in sorted(parts[0]))


def by_hand(engine: Engine, tokens: list[int], first: int, depth: int) -> list[int]:
    """Greedy guesses of the head, everything computed from the beginning for each of them, over ordinary caches."""
    text, head = engine.model.language_model, engine.model.mtp
    fed = text.model(mx.array([tokens]), cache=text.make_cache())
    embed, ids, guesses = text.model.embed_tokens, [*tokens[1:], first], list[int]()
    while True:
        outs, hidden = [], fed
        for layer in head.layers:
            outs.append(_masked(head, layer, hidden, embed(mx.array([ids]))))
            hidden = mx.concatenate([mx.zeros_like(fed[:, :1]), outs[-1][:, :-1]], axis=1)
        picked = outs[len(guesses) % len(outs)][:, -1:]
        guesses.append(int(mx.argmax(picked[0] @ embed.weight.T).item()))
        if len(guesses) == depth:
            return guesses
        fed, ids = mx.concatenate([fed, picked], axis=1), [*ids, guesses[-1]]


def _masked(head: Any, layer: Any, hidden: Any, embedded: Any) -> Any:
    joined = mx.concatenate([head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)], axis=-1)
    return head.norm(layer(head.fc(joined), mask="causal", cache=KVCache()))


def test_every_layer_of_the_head_is_one_more_layer_of_rows(engine: Engine) -> None:
    *own, last = engine.layout.layers
    kinds, earlier = [layer.kind for layer in own[:4]], own[4:]
    assert kinds == ["recurrent"] * 3 + ["attention"]
    assert last == own[3]
    assert len(earlier) == len(engine.model.mtp.layers) - 1
    kept = RowTensor(OUTPUT, 1, engine.model.language_model.args.hidden_size)
    assert all(layer == replace(last, rows=(*last.rows, kept)) for layer in earlier)


def test_the_model_says_what_it_says_without_its_head(engine: Engine) -> None:
    experts = EXPERTS if "num_experts" in engine.model.args.text_config else {}
    plain = opened(tiny("qwen3_5", **QWEN3_5, **experts))
    assert np.array_equal(Talk(engine, BLOCK).feed(TOKENS[:60]), Talk(plain, BLOCK).feed(TOKENS[:60]))


@pytest.mark.parametrize("depth", range(1, 6))
def test_proposals_are_those_of_the_head_run_by_hand(engine: Engine, depth: int) -> None:
    for start, length in ((0, 1), (5, 2), (9, 3), (20, 3), (30, 4), (40, 7), (0, 50)):
        tokens = TOKENS[start : start + length]
        first, proposed = fill(Talk(engine, BLOCK), tokens, draft=depth)
        assert list(proposed) == by_hand(engine, tokens, first, depth)


def test_rows_and_proposals_do_not_depend_on_the_chunks_of_the_prompt_nor_on_segments(engine: Engine) -> None:
    whole, parts, pieces = Talk(engine, 3 * BLOCK), Talk(engine, 3 * BLOCK), Talk(engine, BLOCK)
    want = fill(whole, TOKENS, draft=4)
    assert fill(parts, TOKENS, 1, 2, 97, 156, 256, draft=4) == want
    feed(pieces, 100, BLOCK)
    pieces.extend(2 * BLOCK)
    assert ended(pieces) == want
    assert rows_of(parts) == rows_of(pieces) == rows_of(whole)


@pytest.mark.parametrize("at", [1, BLOCK, BLOCK + 30])
def test_a_fork_that_goes_on_as_its_parent_did_keeps_and_proposes_the_same(engine: Engine, at: int) -> None:
    whole, parent = Talk(engine, 3 * BLOCK), Talk(engine, 3 * BLOCK)
    want = fill(whole, TOKENS, draft=4)
    feed(parent, at)
    fork = parent.fork(3 * BLOCK)
    engine.pool.apply((SaveAnchor(parent.leaf, 1), LoadAnchor(1, fork.leaf)))
    for talk in (fork, parent):
        assert ended(talk) == want
        assert rows_of(talk) == rows_of(whole)


def test_a_fork_that_goes_on_otherwise_still_says_what_a_fresh_conversation_says(engine: Engine) -> None:
    parent = Talk(engine, 3 * BLOCK)
    engine.run([replace(strip_of(parent, BLOCK + 30), then=(TOKENS[BLOCK + 30] + 1) % 128)])
    parent.position = BLOCK + 30
    assert ended(parent.fork(2 * BLOCK))[0] == fill(Talk(engine, 3 * BLOCK), TOKENS)[0]


def test_rows_read_out_and_written_elsewhere_go_on_as_they_would_have(engine: Engine) -> None:
    whole, first, second = Talk(engine, 3 * BLOCK), Talk(engine, 3 * BLOCK), Talk(engine, 3 * BLOCK)
    want = fill(whole, TOKENS, draft=4)
    feed(first, 300)
    rows = read_rows(engine.pool, first.leaf, 0, 300)
    write_rows(engine.pool, second.leaf, 0, {name: np.array(array) for name, array in rows.items()})
    engine.pool.apply((SaveAnchor(first.leaf, 1), LoadAnchor(1, second.leaf), Drop(first.leaf)))
    second.position = 300
    assert ended(second) == want
    assert rows_of(second) == rows_of(whole)


def test_rounds_write_the_heads_rows_in_place(engine: Engine) -> None:
    talk = Talk(engine, BLOCK)
    first, _ = fill(talk, TOKENS[:40])

    def addresses() -> list[int]:
        layers = engine.pool.segments[talk.leaf].layers[4:]
        return [np.array(b, copy=False).ctypes.data for layer in layers for b in layer.arrays.values()]

    before = addresses()
    for width in (1, 4, 20, 1):
        strip = Strip(talk.chain, talk.position, (first,) * width, 1, draft=4)
        engine.run([strip], wants_for(GREEDY, strip.end))
        talk.position += width
    assert addresses() == before


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
    assert rows_of(drafted) == rows_of(plain)


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


def test_rounds_of_one_length_side_by_side_keep_and_propose_what_each_does_alone(engine: Engine) -> None:
    def begun() -> list[Talk]:
        talks = [Talk(engine, BLOCK) for _ in range(3)]
        for i, talk in enumerate(talks):
            fill(talk, TOKENS[i : 5 + 10 * i])
        return talks

    def run(talks: list[Talk]) -> list[tuple[int, ...]]:
        strips = [Strip(t.chain, t.position, tuple(TOKENS[t.position :][:2]), 1, draft=3) for t in talks]
        found = engine.run(strips, [w for s in strips for w in wants_for(GREEDY, s.end)])
        for talk in talks:
            talk.position += 2
        return list(found.drafts)

    company, alone = begun(), begun()
    for _ in range(3):
        assert run(company) == [draft for talk in alone for draft in run([talk])]
    assert [rows_of(t) for t in company] == [rows_of(t) for t in alone]


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


def test_a_model_without_a_head_has_no_drafter() -> None:
    assert drafter_for(tiny("qwen3_5", **QWEN3_5)) is None


def test_layers_that_are_missing_or_of_another_shape_are_named() -> None:
    loaded = with_head(2)
    name = "layers.1.self_attn.k_proj.weight"
    for more in ({}, {name: loaded.draft_head[name][:-1]}):
        kept = {key: w for key, w in loaded.draft_head.items() if key != name}
        with pytest.raises(ModelLoadError, match=rf"does not fit the model: mtp\.{name}"):
            drafter_for(replace(with_head(2), draft_head=kept | more))


@pytest.mark.parametrize(("said", "kept", "layers"), [(None, 2, 2), (1, 2, 2), (2, 1, 1)])
def test_layers_are_those_whose_tensors_there_are_whatever_the_config_says(
    said: int | None, kept: int, layers: int
) -> None:
    loaded = with_head(2)
    loaded.config["mtp_num_hidden_layers"] = said
    gone = tuple(f"layers.{i}." for i in range(kept, 2)) or ("none",)
    made = drafter_for(
        replace(loaded, draft_head={k: w for k, w in loaded.draft_head.items() if not k.startswith(gone)})
    )
    assert made is not None
    assert len(made.layers) == layers


def test_layers_deeper_than_any_proposal_keep_no_rows() -> None:
    made = drafter_for(with_head(7))
    assert made is not None
    assert len(made.layers) == made.deepest == 5
