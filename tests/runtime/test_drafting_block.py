"""The block drafter: its network against one written out by hand, its rows, and what it refuses to load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.decode import wants_for
from onecopy.runtime.drafting import drafter_for
from onecopy.runtime.drafting.beside import read_config
from onecopy.runtime.drafting.dflash import BlockConfig
from onecopy.runtime.engine import Engine
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.plan import Strip
from onecopy.runtime.turn import Sampling

from tests.support.engines import Talk, opened
from tests.support.heads import write_block_drafter
from tests.support.tiny import tiny

TOKENS = np.random.default_rng(9).integers(0, 320, 2 * BLOCK + 40).tolist()
GREEDY = Sampling(seed=3, temperature=0.0)
VERSIONS: dict[str, dict[str, Any]] = {
    "first": {},
    "second": {"second": True},
    "window": {"window": 40},
    "causal": {"is_causal": True},
}


class Case:
    """A target, and a drafter for it in a directory."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = write_block_drafter(path, **VERSIONS[name])
        loaded = tiny("llama", vocab_size=320)
        self.engine: Engine = opened(loaded, drafter=drafter_for(loaded, str(self.path)))
        self.config = read_config(json.loads((path / "config.json").read_text()), path)
        self.weights = mx.load(str(path / "model.safetensors"))


@pytest.fixture(scope="module", params=VERSIONS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("drafter"), request.param)


def fill(talk: Talk, tokens: list[int], *chunks: int, draft: int = 0) -> tuple[int, tuple[int, ...]]:
    """Prefills in chunks as a lane does: the first token of the reply, and the proposal behind it."""
    at = 0
    for end in [*np.cumsum(chunks).tolist(), len(tokens)]:
        last = end == len(tokens)
        rows = tuple(tokens[at:end])
        strip = Strip(talk.chain, at, rows, int(last), None if last else tokens[end], draft if last else 0)
        found = talk.engine.run([strip], wants_for(GREEDY, end) if last else ())
        talk.position = at = end
    return found.picks[0][0].token, found.drafts[0]


# --- by hand, in NumPy


def states(tokens: list[int], targets: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Outputs of the target's layers for all tokens, joined."""
    model = tiny("llama", vocab_size=320).model.model
    x, out = model.embed_tokens(mx.array([tokens])), []
    for layer in model.layers:
        x = layer(x, "causal", None)
        out.append(x)
    return np.array(mx.concatenate([out[i] for i in targets], axis=-1))[0]


def rms(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turned(x: Any, positions: Any, theta: float) -> Any:
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def guessed(case: Case, tokens: list[int], first: int, width: int) -> list[int]:
    """The proposal behind `tokens` and `first`, from a whole recomputation."""
    c = case.config
    w = {name: np.array(value, dtype=np.float64) for name, value in case.weights.items()}
    embed = np.array(tiny("llama", vocab_size=320).model.model.embed_tokens.weight, dtype=np.float64)
    context = rms(states(tokens, c.targets) @ w["fc.weight"].T, w["hidden_norm.weight"], c.eps)
    x = embed[[first, *[c.mask] * width]]
    for i, window in enumerate(c.windows):
        pre = f"layers.{i}."
        x = x + mixed(
            w, pre + "attention_conv.", c, rms(x, w[pre + "input_layernorm.weight"], c.eps),
            lambda y, pre=pre, window=window, i=i: attended(w, pre + "self_attn.", c, y, context, window, c.causal[i]),
        )  # fmt: skip
        x = x + mixed(
            w, pre + "mlp_conv.", c, rms(x, w[pre + "post_attention_layernorm.weight"], c.eps),
            lambda y, pre=pre: fed(w, pre + "mlp.", y),
        )  # fmt: skip
    hidden = rms(x, w["norm.weight"], c.eps)[1:]
    logits = hidden @ embed.T * c.scale
    logits = np.tanh(logits / c.cap) * c.cap if c.cap else logits
    return chosen(w, c, hidden, logits, first)


def mixed(w: Any, pre: str, c: BlockConfig, x: Any, part: Callable[[Any], Any]) -> Any:
    if c.conv is None:
        return part(x)
    kernel, group = c.conv
    dynamic = (x @ w[pre + "kernel_projection.weight"].T).reshape(len(x), 2, kernel, -1)

    def mix(y: Any, side: int) -> Any:
        out = np.zeros_like(y)
        for place in range(len(y)):
            for back in range(min(kernel, place + 1)):
                factor = w[pre + "base_kernel"][side, back] + np.repeat(dynamic[place, side, back], group)
                out[place] += factor * y[place - back]
        return out

    return mix(part(mix(x, 0)), 1)


def attended(w: Any, pre: str, c: BlockConfig, x: Any, context: Any, window: int | None, causal: bool) -> Any:
    start, n = len(context), len(x)
    both = np.concatenate([context, x])
    places = np.arange(start + n)

    def heads(name: str, y: Any) -> Any:
        return (y @ w[f"{pre}{name}_proj.weight"].T).reshape(len(y), -1, c.head_dim)

    keys = turned(rms(heads("k", both), w[pre + "k_norm.weight"], c.eps), places, c.theta)
    queries = turned(rms(heads("q", x), w[pre + "q_norm.weight"], c.eps), places[start:], c.theta)
    values, out = heads("v", both), np.zeros((n, c.heads, c.head_dim))
    for row in range(n):
        last = start + row if causal else start + n - 1
        seen = (places <= last) & (places > last - (window or len(places) + n))
        for head in range(c.heads):
            kv = head // (c.heads // c.kv_heads)
            scores = keys[seen, kv] @ queries[row, head] / np.sqrt(c.head_dim)
            weight = np.exp(scores - scores.max())
            out[row, head] = weight / weight.sum() @ values[seen, kv]
    return out.reshape(n, -1) @ w[pre + "o_proj.weight"].T


def fed(w: Any, pre: str, x: Any) -> Any:
    gate = x @ w[pre + "gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w[pre + "up_proj.weight"].T)) @ w[pre + "down_proj.weight"].T


def chosen(w: Any, c: BlockConfig, hidden: Any, logits: Any, first: int) -> list[int]:
    if c.selector is None:
        return logits.argmax(-1).tolist()
    out, before = [], first
    for row, scores in zip(hidden, logits, strict=True):
        best = np.argsort(scores)[-c.selector[1] :]
        edge = w["candidate_selector.predecessor_codebook"][before] * (
            w["candidate_selector.hidden_projection.weight"] @ row
        )
        before = int(best[np.argmax(scores[best] + w["candidate_selector.successor_codebook"][best] @ edge)])
        out.append(before)
    return out


# --- facts


@pytest.mark.parametrize(("length", "width"), [(50, 5), (50, 1), (BLOCK + 20, 3)])
def test_a_block_is_filled_as_by_hand(case: Case, length: int, width: int) -> None:
    first, proposed = fill(Talk(case.engine), TOKENS[:length], draft=width)
    assert list(proposed) == guessed(case, TOKENS[:length], first, width)


def test_the_drafters_layers_are_rows_beside_the_targets(case: Case) -> None:
    kinds = [(layer.kind, layer.window) for layer in case.engine.layout.layers[2:]]
    assert kinds == [("window" if w else "attention", w) for w in case.config.windows]


def test_proposals_do_not_depend_on_the_chunks_of_the_prompt(case: Case) -> None:
    whole = fill(Talk(case.engine), TOKENS, draft=5)
    assert fill(Talk(case.engine), TOKENS, 100, 156, 256, draft=5) == whole


def test_rejected_rows_and_blocks_leave_nothing_behind(case: Case) -> None:
    plain, drafted = Talk(case.engine), Talk(case.engine)
    first, tokens = fill(plain, TOKENS[:40])[0], TOKENS[:40]
    strip = Strip(plain.chain, plain.position, (first,), 1, draft=4)
    want = case.engine.run([strip], wants_for(GREEDY, 41))
    fill(drafted, tokens, draft=5)
    wrong = ((want.picks[0][0].token + 1) % 320, 5, 6)
    strip = Strip(drafted.chain, drafted.position, (first, *wrong), 4, draft=4)
    got = case.engine.run([strip], wants_for(GREEDY, 41, wrong))
    assert got.picks[0][0] == want.picks[0][0]
    assert got.drafts == want.drafts


def test_strips_side_by_side_get_the_proposals_they_get_alone(case: Case) -> None:
    alone = [fill(Talk(case.engine), TOKENS[i : i + 30 + i], draft=2 + i % 2) for i in range(4)]
    talks = [Talk(case.engine) for _ in range(4)]
    strips = [Strip(t.chain, 0, tuple(TOKENS[i : i + 30 + i]), 1, draft=2 + i % 2) for i, t in enumerate(talks)]
    found = case.engine.run(strips, [w for s in strips for w in wants_for(GREEDY, s.end)])
    assert [(p[0].token, d) for p, d in zip(found.picks, found.drafts, strict=True)] == alone


def test_a_proposal_stops_where_the_leaf_ends(case: Case) -> None:
    for left, want in ((0, 0), (1, 0), (2, 1), (4, 3)):
        assert len(fill(Talk(case.engine, BLOCK), TOKENS[: BLOCK - left], draft=5)[1]) == want


def test_the_target_says_what_it_says_by_itself(case: Case) -> None:
    plain = opened(tiny("llama", vocab_size=320))
    assert np.array_equal(Talk(case.engine).feed(TOKENS[:90]), Talk(plain).feed(TOKENS[:90]))


def test_rows_of_one_drafter_are_not_taken_for_those_of_another(tmp_path: Path) -> None:
    marks = set()
    for seed in (1, 1, 2):
        made = drafter_for(tiny("llama", vocab_size=320), str(write_block_drafter(tmp_path / str(seed), seed=seed)))
        assert made is not None
        marks.add(made.mark)
    assert len(marks) == 2
    assert "" not in marks


# --- what is refused


def refusal(path: Path, **target: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        drafter_for(tiny("llama", **{"vocab_size": 320, **target}), str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edited(path: Path, **fields: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


def test_a_directory_without_a_drafter_is_refused(tmp_path: Path) -> None:
    assert "there is no config.json" in refusal(tmp_path / "nowhere")
    edited(write_block_drafter(tmp_path), architectures=["LlamaForCausalLM"])
    assert "'LlamaForCausalLM' is no drafter that is known" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ({"hidden_size": 128}, "hidden states have 64 elements, those of llama 128"),
        ({"vocab_size": 128}, "it knows 320 tokens, llama knows 128"),
        ({"num_hidden_layers": 1}, "it reads layers [0, 1], llama has 1"),
    ],
)
def test_a_drafter_of_another_model_is_refused(tmp_path: Path, target: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(write_block_drafter(tmp_path), **target)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"head_dim": None}, "the field head_dim is missing or not understood"),
        ({"layer_types": ["full_attention"]}, "the field layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "the field sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary positions of type 'yarn'"),
        ({"dflash_config": {}}, "the field block_size"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_its_field(
    tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(edited(write_block_drafter(tmp_path), **fields))


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    file = write_block_drafter(tmp_path) / "model.safetensors"
    good = dict(mx.load(str(file)))
    mx.eval(good)
    for change, sentence in (
        ({"fc.weight": good["fc.weight"][:, 1:]}, "the tensor fc.weight is [64, 127], not [64, 128]"),
        ({"extra.weight": good["fc.weight"]}, "the tensor extra.weight belongs to nothing"),
    ):
        mx.save_safetensors(str(file), good | change)
        assert sentence in refusal(tmp_path)
    del good["norm.weight"]
    mx.save_safetensors(str(file), good)
    assert "the tensor norm.weight is missing" in refusal(tmp_path)
