"""Drafts change no token: whoever drafts, whatever model, however a reply ends, and whatever comes after it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.knowing import cheap_rounds, knowing
from tests.support.system import Reply, Whole, body, serving, system_text, user, write_tiny

TEXT = "".join(random.Random(31).choices("abcdefghijklmnopqrstuvwxyz ,.", k=300))
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "partial_rotary_factor": 0.5,
}
MAMBA: dict[str, Any] = {
    "state_size": 8,
    "conv_kernel": 4,
    "time_step_rank": 4,
    "use_conv_bias": True,
    "use_bias": False,
}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {}),
    "window": ("llama", WINDOW),
    "delta": ("qwen3_5", DELTA),
    "mamba": ("mamba", MAMBA),
    "delta and experts": ("qwen3_next", DELTA | EXPERTS),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, config = KINDS[request.param]
    return write_tiny(tmp_path_factory.mktemp("drafts"), kind=kind, **config)


@pytest.fixture
async def whole(model: Path) -> AsyncIterator[Whole]:
    with cheap_rounds():
        async with serving(model) as made:
            yield made


def ask(text: str, **more: Any) -> dict[str, Any]:
    return body(system_text(TEXT), user(text), **more)


async def prompt_of(whole: Whole, wanted: Mapping[str, Any]) -> tuple[int, ...]:
    asked = {key: wanted[key] for key in ("messages", "tools") if key in wanted}
    found = (await whole.http.post("/tokenize", json=asked)).json()
    return tuple(found["tokens"])


async def plainly(whole: Whole, wanted: dict[str, Any]) -> tuple[tuple[int, ...], Reply]:
    """The prompt, and its cold reply without drafts."""
    return await prompt_of(whole, wanted), await whole.cold({**wanted, "draft": False})


SAMPLED = [0, 0.8]
SHOWN = {"ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize("temperature", SAMPLED)
async def test_replies_of_every_length_and_the_turns_after_them_are_those_without_drafts(
    whole: Whole, temperature: float
) -> None:
    drafted = 0
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17):
        wanted = ask(f"question {n}", max_tokens=n, temperature=temperature, seed=n)
        prompt, plain = await plainly(whole, wanted)
        with knowing({prompt: plain.tokens}):
            reply = await whole.ask(wanted)
        assert reply.said == plain.said
        assert len(reply.tokens) == n
        drafted += reply.onecopy["drafted"]
        after = {**wanted, "max_tokens": 6, "messages": [*wanted["messages"], said(reply), user("and then?")]}
        again = await whole.ask(after)
        assert again.said == (await whole.cold({**after, "draft": False})).said
        assert again.cached == reply.prompt + len(reply.tokens) - 1
    assert drafted > 100


@pytest.mark.parametrize("temperature", SAMPLED)
async def test_eight_drafting_side_by_side_say_what_each_says_alone_without(whole: Whole, temperature: float) -> None:
    asked = [ask(f"client {i}", max_tokens=20 + i, temperature=temperature, seed=i) for i in range(8)]
    known = [await plainly(whole, wanted) for wanted in asked]
    with knowing({prompt: reply.tokens for prompt, reply in known}):
        replies = await whole.together(asked)
    assert [r.said for r in replies] == [plain.said for _, plain in known]
    assert all(r.onecopy["accepted"] > 0 for r in replies)


async def test_an_end_token_inside_a_block_ends_the_reply_there(whole: Whole) -> None:
    wanted = ask("an early end", max_tokens=12)
    prompt, plain = await plainly(whole, wanted)
    for place in range(3, 10):
        ends = frozenset({plain.tokens[place]})
        first = next(i for i, t in enumerate(plain.tokens) if t in ends)
        salted = {**wanted, "ignore_eos": False, "cache_salt": f"end {place}"}
        with knowing({prompt: plain.tokens}, width=7), ending(whole, ends):
            reply = await whole.ask(salted)
            assert reply.tokens == plain.tokens[: first + 1]
            assert reply.finish == "stop"
            after = {**salted, "messages": [*wanted["messages"], said(reply), user("and then?")]}
            again = await whole.ask(after)
            assert again.cached == len(prompt) + first
            assert again.said == (await whole.cold({**after, "draft": False})).said


class ending:
    """End tokens of turns that begin in the block."""

    def __init__(self, whole: Whole, ends: frozenset[int]) -> None:
        self._lane = whole.system._supervisor._cells["lane"].life.actor
        self._ends, self._before = ends, frozenset[int]()

    def __enter__(self) -> None:
        self._before, self._lane._eos = self._lane._eos, self._ends

    def __exit__(self, *_: object) -> None:
        self._lane._eos = self._before


async def test_a_stop_string_inside_a_block_ends_the_reply_there(whole: Whole) -> None:
    wanted = ask("stop somewhere", max_tokens=24)
    prompt, plain = await plainly(whole, wanted)
    for offset in range(6, 12):
        stop = plain.text[offset : offset + 3]
        stopped = {**wanted, "stop": [stop], "cache_salt": f"stop {offset}"}
        want = await whole.cold({**stopped, "draft": False})
        with knowing({prompt: plain.tokens}, width=7):
            reply = await whole.ask(stopped)
        assert reply.said == want.said
        assert reply.text == plain.text[: plain.text.index(stop)]
        after = {**stopped, "messages": [*wanted["messages"], said(reply), user("go on")]}
        assert (await whole.ask(after)).said == (await whole.cold({**after, "draft": False})).said


async def test_a_client_that_leaves_inside_a_drafted_reply_spoils_nothing(whole: Whole) -> None:
    wanted = ask("leave early", max_tokens=200)
    prompt, plain = await plainly(whole, wanted)
    with knowing({prompt: plain.tokens}):
        for reads in (1, 3, 5):
            await whole.leave(wanted, reads)
            await whole.at_rest()
            assert (await whole.ask(wanted)).said == plain.said


async def test_a_grammar_and_logprobs_keep_drafts_on_and_change_nothing(whole: Whole) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
    made = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    wanted = {**ask("json please", max_tokens=40), "response_format": made, "top_logprobs": 3, "logit_bias": {}}
    prompt, plain = await plainly(whole, wanted)
    with knowing({prompt: plain.tokens}):
        reply = await whole.ask(wanted)
    assert reply.said == plain.said
    assert reply.onecopy["accepted"] > 0


async def test_a_background_reply_that_yields_goes_on_as_if_it_had_been_alone(whole: Whole) -> None:
    slow = ask("in the background", max_tokens=40, priority="background")
    asked = [slow, *(ask(f"in front {i}", max_tokens=16) for i in range(3))]
    known = [await plainly(whole, wanted) for wanted in asked]
    with knowing({prompt: reply.tokens for prompt, reply in known}):
        replies = await whole.together(asked)
    assert [r.said for r in replies] == [plain.said for _, plain in known]
    assert all(r.onecopy["accepted"] > 0 for r in replies)


async def test_penalties_and_forced_tools_are_drafted_and_unchanged(whole: Whole) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    for more in (
        {"frequency_penalty": 0.7, "presence_penalty": 0.2, "temperature": 0.6, "seed": 5},
        {"tools": [tool], "tool_choice": "required", "logit_bias": {}},
    ):
        wanted = ask("what is it like outside?", max_tokens=40, **more)
        prompt = await prompt_of(whole, wanted)
        plain = await whole.post({**wanted, "draft": False, "cache_salt": str(more)})
        tokens = plain.json()["choices"][0]["token_ids"]
        with knowing({prompt: tokens}):
            reply = (await whole.post(wanted)).json()
        assert reply["choices"][0]["token_ids"] == tokens
        assert reply["onecopy"]["token_sha"] == plain.json()["onecopy"]["token_sha"]
        assert reply["onecopy"]["drafted"] > 0


async def test_a_failed_round_leaves_no_state_that_has_seen_more_than_the_rows_say(whole: Whole) -> None:
    wanted = ask("a failing round", max_tokens=30)
    prompt, plain = await plainly(whole, wanted)
    engine = whole.system._engine
    run, rounds = engine.run, 0

    def failing(*args: Any) -> Any:
        nonlocal rounds
        rounds += 1
        made = run(*args)
        if rounds == 4:
            raise RuntimeError("the device is confused")
        return made

    engine.run = failing  # type: ignore[method-assign]
    with knowing({prompt: plain.tokens}):
        assert (await whole.post(wanted)).status_code == 503
    (left,) = [s for s in await whole.system.sessions() if not s.salt]
    assert len(prompt) < left.tokens < len(prompt) + 30
    on = {"prompt": [*prompt, *plain.tokens][: left.tokens + 1], "max_tokens": 12, "temperature": 0, **SHOWN}
    replies = [
        (await whole.post({**on, **salt}, "/v1/completions")).json()["choices"][0]["token_ids"]
        for salt in ({}, {"cache_salt": "nothing is kept under it"})
    ]
    assert replies[0] == replies[1]


def said(reply: Reply) -> dict[str, str]:
    return {"role": "assistant", "content": reply.text}


async def test_drafts_of_a_turn_are_off_when_it_says_so(whole: Whole) -> None:
    wanted = ask("no drafts", max_tokens=20, draft=False)
    prompt, plain = await plainly(whole, wanted)
    with knowing({prompt: plain.tokens}):
        assert (await whole.ask(wanted)).onecopy["drafted"] == 0
