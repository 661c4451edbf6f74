"""Directories as they are published and as mlx-lm quantizes them: loaded, served, and refused only by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from onecopy.runtime.engine import Engine
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models import load

from tests.support.published import QUANTIZATION, write_published, write_quantized
from tests.support.system import Whole, body, serving, system_text, user

PROMPT = np.random.default_rng(4).integers(0, 250, 90).tolist()
WRITERS: dict[str, Callable[..., Path]] = {"published": write_published, "quantized": write_quantized}


def own_tokens(path: Path, count: int) -> list[int]:
    """Greedy tokens of mlx-lm's model code over the weights as our loader reads them."""
    model = load(str(path)).model
    cache, feeding, out = make_prompt_cache(model), PROMPT, list[int]()
    for _ in range(count):
        out.append(int(mx.argmax(model(mx.array([feeding]), cache=cache)[0, -1]).item()))
        feeding = out[-1:]
    return out


async def completed(whole: Whole, **more: Any) -> dict[str, Any]:
    wanted = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = await whole.post({**wanted, **more}, "/v1/completions")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", WRITERS)
async def test_a_directory_is_served_with_the_tokens_of_mlx_lm(tmp_path: Path, kind: str, experts: bool) -> None:
    path = WRITERS[kind](tmp_path / "model", experts=experts)
    async with serving(path) as whole:
        found = await completed(whole)
        assert whole.system.card.exactness == "exact"
    assert found["choices"][0]["token_ids"] == own_tokens(path, 24)


@pytest.mark.parametrize("kind", WRITERS)
async def test_weights_held_as_they_are_stored_are_served_too(tmp_path: Path, kind: str) -> None:
    path = WRITERS[kind](tmp_path / "model")
    async with serving(path, dtype="native") as whole:
        found = await completed(whole)
    assert len(found["choices"][0]["token_ids"]) == 24


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="other devices have these products")
def test_experts_in_a_type_that_this_device_cannot_multiply_are_refused_in_one_line(tmp_path: Path) -> None:
    loaded = load(str(write_published(tmp_path / "model", experts=True)), dtype="native")
    with pytest.raises(ModelLoadError, match=r"^model: does not run on this machine .* Try --dtype float32") as refusal:
        Engine.open(loaded, context=512, stopwatch=lambda: 0.0)
    assert "\n" not in str(refusal.value)


def test_a_quantized_directory_stays_packed_when_native_and_is_unpacked_otherwise(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model")
    packed, plain = (load(str(path), dtype=dtype) for dtype in ("native", "float32"))
    assert packed.quantization == plain.quantization == QUANTIZATION
    kinds = [{p.dtype for _, p in tree_flatten(x.model.parameters())} for x in (packed, plain)]
    assert mx.uint32 in kinds[0]
    assert kinds[1] == {mx.float32}
    assert packed.vocab_size == plain.vocab_size == 320


def test_the_draft_head_of_a_published_directory_is_kept_in_the_form_of_the_model(tmp_path: Path) -> None:
    head = load(str(write_published(tmp_path / "model"))).draft_head
    assert {name: w.shape for name, w in head.items()} == {
        "fc.weight": (64, 128),
        "norm.weight": (64,),
        "pre_fc_norm_hidden.weight": (64,),
    }
    assert mx.all(head["fc.weight"] == 0.25).item()
    assert mx.all(head["norm.weight"] == 1.25).item()
    assert load(str(write_quantized(tmp_path / "other"))).draft_head == {}


async def test_a_directory_without_a_tokenizer_serves_token_ids_and_says_so(tmp_path: Path) -> None:
    path = write_published(tmp_path / "model", tokenizer=False)
    async with serving(path) as whole:
        choice = (await completed(whole))["choices"][0]
        assert choice["token_ids"] == own_tokens(path, 24)
        assert choice["text"] == ""
        again = await completed(whole, prompt=[*PROMPT, *choice["token_ids"], 7])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) + 23
        for wanted, where in (({"prompt": "text"}, "/v1/completions"), (body(user("hi")), "/v1/chat/completions")):
            answer = await whole.post(wanted, where)
            assert answer.status_code == 400
            assert "send token ids to /v1/completions" in answer.json()["error"]["message"]
        assert "token ids on /v1/completions" in whole.system.card.features["text"]


async def test_a_third_conversation_of_a_delta_net_model_starts_where_the_first_two_part_inside_a_message(
    tmp_path: Path,
) -> None:
    common = "".join(chr(97 + i * i % 26) for i in range(700))
    endings = ("one thing", "two things", "three things", "twice the same")
    asked = [body(system_text(f"{common} {text}"), user("go on")) for text in endings]
    async with serving(write_published(tmp_path / "model")) as whole:
        replies = [await whole.ask(wanted) for wanted in asked]
        assert [r.said for r in replies] == [(await whole.cold(wanted)).said for wanted in asked]
    assert [r.onecopy["how"] for r in replies] == ["fresh", "fresh", "forked", "forked"]
    assert all(r.cached > 700 for r in replies[2:])
