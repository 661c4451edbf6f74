"""Steps: tokens, log probabilities and choices for frameworks that run the loop themselves."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from onecopy.api import Runtime
from onecopy.runtime.errors import BadRequest, DeadlineExceeded
from onecopy.runtime.turn import Grammar

from tests.support.scripted import Say, ScriptedService


async def test_a_step_is_one_token_unless_told_otherwise() -> None:
    service = ScriptedService("abc")
    async with Runtime.over(service) as runtime:
        one = await runtime.step("x")
        more = await runtime.step("x", max_tokens=2)
    assert (one.text, one.reason, len(one.tokens)) == ("a", "length", 1)
    assert (more.text, len(more.tokens)) == ("ab", 2)


async def test_steps_go_on_from_the_tokens_of_the_last() -> None:
    service = ScriptedService("abc")
    async with Runtime.over(service) as runtime:
        first = await runtime.step([5, 6, 7])
        second = await runtime.step(first.all)
    assert service.specs[1].tokens == (5, 6, 7, *first.tokens)
    assert second.usage.cached == len(first.all) - 1


async def test_a_text_gets_no_template() -> None:
    service = ScriptedService()
    async with Runtime.over(service) as runtime:
        await runtime.step("plain")
    assert service.tokenizer.decode(service.specs[0].tokens, special=True) == "plain"


async def test_log_probabilities_come_with_every_token() -> None:
    async with Runtime.over(ScriptedService("abc")) as runtime:
        step = await runtime.step("x", max_tokens=3, logprobs=2)
        bare = await runtime.step("x")
    assert [item.token for item in step.logprobs] == list(step.tokens)
    assert [len(item.top) for item in step.logprobs] == [2, 2, 2]
    assert step.logprob == pytest.approx(-1.5)
    assert (bare.logprobs, bare.logprob) == ((), 0)


async def test_choices_constrain_the_answer_and_have_room() -> None:
    service = ScriptedService("yes")
    async with Runtime.over(service) as runtime:
        await runtime.step("x", choices=["yes", "no, thanks"])
    [spec] = service.specs
    assert spec.grammar == Grammar("choice", '["yes","no, thanks"]')
    assert spec.max_new > len("no, thanks")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"choices": []}, "guided_choice"),
        ({"choices": [""]}, "guided_choice"),
        ({"logprobs": 21}, "logprobs"),
        ({"temperature": 9}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_is_wrong_is_named(wrong: dict[str, Any], param: str) -> None:
    async with Runtime.over(ScriptedService()) as runtime:
        with pytest.raises(BadRequest) as caught:
            await runtime.step("x", **wrong)
    assert caught.value.param == param


async def test_foreign_tokens_are_refused() -> None:
    async with Runtime.over(ScriptedService()) as runtime:
        with pytest.raises(BadRequest):
            await runtime.step([10**6])


async def test_a_late_step_ends_its_turn(autojump_clock: trio.testing.MockClock) -> None:
    service = ScriptedService(Say("a", before=lambda: trio.sleep(5)))
    async with Runtime.over(service) as runtime:
        with pytest.raises(DeadlineExceeded):
            await runtime.step("x", timeout=1)
        assert service.active == 0
