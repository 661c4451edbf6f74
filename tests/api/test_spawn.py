"""Children of a conversation: results as they finish, ends with their nursery, first-error policies, limits."""

from __future__ import annotations

import pytest
import trio
from onecopy.api import Answer, Conversation, Runtime
from onecopy.runtime.errors import ActorStopped, Conflict, OnecopyError, Overloaded

from tests.support.scripted import Say, ScriptedService

PROMPTS = ["slow", "fast", "middle"]
WAITS = {"slow": 3.0, "middle": 2.0, "fast": 1.0}


class Errands(ScriptedService):
    """Answers with the last word of the prompt, after as many seconds as WAITS says; "fail" is refused."""

    def __init__(self) -> None:
        super().__init__(lambda spec: self._say(self.tokenizer.decode(spec.tokens)))

    def _say(self, prompt: str) -> Say:
        word = prompt.removesuffix("assistant\n").split()[-1]
        refusal = Overloaded("Too many.") if word == "fail" else None
        return Say(word, before=lambda: trio.sleep(WAITS.get(word, 0.5)), refuse=refusal)


async def parent_of(runtime: Runtime) -> Conversation:
    chat = runtime.conversation("Be brief.")
    await chat.send("hello")
    return chat


async def test_all_results_come_in_the_order_of_the_prompts(autojump_clock: trio.testing.MockClock) -> None:
    async with Runtime.over(Errands()) as runtime:
        children = await runtime.spawn(await parent_of(runtime), PROMPTS)
    assert [child.result.text for child in children] == PROMPTS
    assert [child.prompt for child in children] == PROMPTS


async def test_results_are_read_as_they_finish(autojump_clock: trio.testing.MockClock) -> None:
    async with Runtime.over(Errands()) as runtime, runtime.spawn(await parent_of(runtime), PROMPTS) as children:
        assert [child.result.text async for child in children] == ["fast", "middle", "slow"]


async def test_children_share_the_parent_and_leave_it_alone(autojump_clock: trio.testing.MockClock) -> None:
    service = Errands()
    async with Runtime.over(service) as runtime:
        parent = await parent_of(runtime)
        before = [dict(m) for m in parent.messages]
        children = await runtime.spawn(parent, PROMPTS)
    assert parent.messages == before
    for child in children:
        assert child.chat.messages[:-2] == before
        assert child.result.usage.cached >= len(parent.tokens)


async def test_children_can_go_on_after_the_spawn(autojump_clock: trio.testing.MockClock) -> None:
    async with Runtime.over(Errands()) as runtime:
        [child] = await runtime.spawn(await parent_of(runtime), ["one"])
        assert (await child.chat.send("two")).text == "two"


async def test_a_child_may_do_more_than_one_turn(autojump_clock: trio.testing.MockClock) -> None:
    async def twice(chat: Conversation, prompt: int) -> list[str]:
        return [(await chat.send(f"say {prompt}")).text, (await chat.send(f"say {prompt + 1}")).text]

    async with Runtime.over(Errands()) as runtime:
        children = await runtime.spawn(await parent_of(runtime), [1, 5], run=twice)
    assert [child.result for child in children] == [["1", "2"], ["5", "6"]]


@pytest.mark.parametrize(("limit", "peak"), [(1, 1), (2, 2), (None, 3), (99, 3)])
async def test_at_most_limit_children_work_at_a_time(
    limit: int | None, peak: int, autojump_clock: trio.testing.MockClock
) -> None:
    service = Errands()
    async with Runtime.over(service) as runtime:
        parent = await parent_of(runtime)
        assert len(await runtime.spawn(parent, PROMPTS, limit=limit)) == 3
    assert service.peak == peak


async def test_settings_go_to_every_child(autojump_clock: trio.testing.MockClock) -> None:
    service = Errands()
    async with Runtime.over(service) as runtime:
        await runtime.spawn(runtime.conversation(), PROMPTS, max_tokens=2, seed=4)
    assert {(spec.max_new, spec.sampling.seed) for spec in service.specs} == {(2, 4)}


async def test_no_prompts_are_no_children() -> None:
    async with Runtime.over(Errands()) as runtime:
        assert await runtime.spawn(runtime.conversation(), []) == []


# --- errors


async def test_the_first_error_ends_the_others_and_is_raised_bare(autojump_clock: trio.testing.MockClock) -> None:
    service = Errands()
    async with Runtime.over(service) as runtime:
        parent = await parent_of(runtime)
        with pytest.raises(Overloaded):
            await runtime.spawn(parent, ["slow", "fail", "middle"])
        assert service.active == 0
    assert service.cancelled == 2


async def test_collected_errors_are_results(autojump_clock: trio.testing.MockClock) -> None:
    async with Runtime.over(Errands()) as runtime:
        parent = await parent_of(runtime)
        good, bad, other = await runtime.spawn(parent, ["slow", "fail", "fast"], on_error="collect")
    assert (good.result.text, other.result.text) == ("slow", "fast")
    assert isinstance(bad.error, Overloaded)
    with pytest.raises(Overloaded):
        _ = bad.result


async def test_an_error_of_the_callers_own_code_is_raised_as_it_is() -> None:
    async def broken(chat: Conversation, prompt: str) -> Answer:
        raise LookupError(prompt)

    async with Runtime.over(Errands()) as runtime:
        with pytest.raises(LookupError, match="one"):
            await runtime.spawn(runtime.conversation(), ["one"], run=broken)


# --- ends


async def test_leaving_the_block_ends_every_child(autojump_clock: trio.testing.MockClock) -> None:
    service = Errands()
    async with Runtime.over(service) as runtime:
        parent = await parent_of(runtime)
        async with runtime.spawn(parent, PROMPTS) as children:
            assert (await anext(children)).prompt == "fast"
            assert service.active == 2
        assert service.active == 0


async def test_a_cancelled_reader_ends_every_child(autojump_clock: trio.testing.MockClock) -> None:
    service = Errands()
    async with Runtime.over(service) as runtime:
        parent = await parent_of(runtime)
        with trio.move_on_after(1.5) as scope:
            await runtime.spawn(parent, PROMPTS)
        assert scope.cancelled_caught
        assert service.active == 0


async def test_closing_the_runtime_ends_children(autojump_clock: trio.testing.MockClock) -> None:
    service = Errands()
    caught: list[OnecopyError] = []

    async def read(runtime: Runtime, parent: Conversation) -> None:
        try:
            await runtime.spawn(parent, PROMPTS)
        except OnecopyError as error:
            caught.append(error)

    async with trio.open_nursery() as nursery, Runtime.over(service) as runtime:
        nursery.start_soon(read, runtime, await parent_of(runtime))
        await trio.sleep(0.5)
    assert [type(error) for error in caught] == [ActorStopped]
    assert service.active == 0


async def test_an_ended_child_sends_no_more() -> None:
    async with Runtime.over(ScriptedService(Say("na ", ends=False, between=trio.lowlevel.checkpoint))) as runtime:
        chat = runtime.conversation()
        sent = chat.send("hi")
        await anext(sent)
        chat.end()
        with pytest.raises(ActorStopped):
            await sent
        with pytest.raises(ActorStopped):
            await chat.send("hi")
        with pytest.raises(Conflict):
            _ = sent.whole
