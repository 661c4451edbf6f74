"""The programmatic API under trio: conversations, pieces, answers, forks, settings, errors and ends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from onecopy.api import Runtime
from onecopy.runtime.errors import (
    ActorStopped,
    BadRequest,
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    InsufficientMemory,
    NotFound,
    OnecopyError,
    StartupError,
    Unsupported,
)
from onecopy.runtime.turn import Finished, Started, Text, Tool

from tests.support.scripted import Say, ScriptedService

LOOKUP = Tool("lookup", "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"word": "trio"}}\n</tool_call>'
ENDLESS = Say("na ", ends=False, between=trio.lowlevel.checkpoint)


def spoken(service: ScriptedService, number: int = -1) -> str:
    """The text of a prompt the service was sent."""
    return service.tokenizer.decode(service.specs[number].tokens, special=True)


async def settled(true: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not true():
            await trio.lowlevel.checkpoint()


async def test_pieces_are_typed_and_in_order() -> None:
    async with Runtime.over(ScriptedService("Hello.")) as runtime:
        pieces = [piece async for piece in runtime.conversation().send("hi")]
    assert isinstance(pieces[0], Started)
    assert isinstance(pieces[-1], Finished)
    assert "".join(p.text for p in pieces if isinstance(p, Text)) == "Hello."


async def test_an_awaited_send_is_the_whole_answer() -> None:
    async with Runtime.over(ScriptedService("Hello.")) as runtime:
        answer = await runtime.conversation().send("hi")
    assert (answer.text, answer.reason, answer.usage.completion) == ("Hello.", "stop", 7)
    assert len(answer.tokens) == 7
    assert answer.session


async def test_pieces_read_first_count_in_the_answer() -> None:
    async with Runtime.over(ScriptedService("Hello.")) as runtime:
        sent = runtime.conversation().send("hi")
        await anext(sent)
        assert (await sent).text == (await sent.answer()).text == "Hello."


async def test_a_conversation_goes_on() -> None:
    service = ScriptedService("Fine.")
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation("Be brief.")
        first = await chat.send("how are you?")
        second = await chat.send([{"role": "user", "content": "and now?"}])
    assert [m["content"] for m in chat.messages] == ["Be brief.", "how are you?", "Fine.", "and now?", "Fine."]
    assert spoken(service).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhow are you?")
    assert second.usage.cached >= first.usage.prompt + first.usage.completion - 1
    assert chat.receipt == second.receipt
    assert chat.tokens == service.specs[-1].tokens + second.tokens


async def test_messages_may_be_edited_between_turns() -> None:
    service = ScriptedService()
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        await chat.send("one")
        chat.messages[0]["content"] = "two"
        await chat.send("three")
    assert "<|im_start|>user\ntwo<|im_end|>" in spoken(service)


async def test_what_was_passed_is_neither_kept_nor_changed() -> None:
    said = [{"role": "user", "content": "hi", "private": 1}]
    async with Runtime.over(ScriptedService()) as runtime:
        chat = runtime.conversation(messages=said)
        await chat.send(said)
    assert said == [{"role": "user", "content": "hi", "private": 1}]
    assert chat.messages[0] is not said[0]
    assert "private" not in chat.messages[0]


async def test_tools_are_called_and_answered() -> None:
    replies = iter([CALL, "It is a library."])
    service = ScriptedService(lambda spec: Say(next(replies)))
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation(tools=[LOOKUP])
        answer = await chat.send("what is trio?")
        [call] = answer.calls
        assert (answer.reason, call.name, call.values) == ("tool_calls", "lookup", {"word": "trio"})
        last = await chat.send({"role": "tool", "tool_call_id": call.id, "content": "A library."})
    assert last.text == "It is a library."
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["id"] == call.id
    assert '"word": "trio"' in spoken(service)


async def test_tools_of_one_send_stand_for_those_of_the_conversation() -> None:
    service = ScriptedService()
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation(tools=[LOOKUP])
        await chat.send("hi", tools=[])
        await chat.send("hi", tools=[{"type": "function", "function": {"name": "other"}}])
    assert [[t.name for t in spec.format.tools] for spec in service.specs] == [[], ["other"]]


async def test_settings_reach_the_turn_and_override_defaults() -> None:
    service = ScriptedService()
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation(temperature=0.0, seed=7, max_tokens=5)
        await chat.send("hi", seed=8, stop="x", priority="background", draft=False)
    [spec] = service.specs
    assert (spec.sampling.temperature, spec.sampling.seed, spec.max_new) == (0.0, 8, 5)
    assert (spec.format.stop, spec.priority, spec.draft) == (("x",), "background", False)


async def test_a_reply_may_be_continued() -> None:
    service = ScriptedService(" world")
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation(messages=[{"role": "user", "content": "greet"}])
        await chat.send({"role": "assistant", "content": "Hello"}, continue_final_message=True)
    assert spoken(service).endswith("<|im_start|>assistant\nHello")
    assert chat.messages[-1] == {"role": "assistant", "content": "Hello world"}


@pytest.mark.parametrize(
    ("settings", "kind", "param"),
    [
        ({"temprature": 1.0}, BadRequest, "temprature"),
        ({"temperature": 3.0}, BadRequest, "temperature"),
        ({"tools": [{"type": "function"}]}, BadRequest, "tools[0].function"),
        ({"logprobs": True, "top_logprobs": 21}, BadRequest, "top_logprobs"),
        ({"tool_choice": "required"}, BadRequest, "tool_choice"),
    ],
)
async def test_a_wrong_setting_is_named_where_it_is_written(
    settings: dict[str, Any], kind: type[OnecopyError], param: str
) -> None:
    async with Runtime.over(ScriptedService()) as runtime:
        with pytest.raises(kind) as caught:
            runtime.conversation(**settings)
        assert caught.value.param == param
        chat = runtime.conversation()
        with pytest.raises(kind):
            await chat.send("hi", **settings)
        assert (await chat.send("hi")).text == "Hello."


async def test_a_prompt_past_the_context_is_refused_with_both_counts() -> None:
    async with Runtime.over(ScriptedService(context=64)) as runtime:
        with pytest.raises(ContextLengthExceeded) as caught:
            await runtime.conversation().send("x" * 100)
    assert caught.value.limit == 64 < caught.value.tokens


async def test_a_refused_turn_leaves_the_conversation_as_it_was() -> None:
    refusal = InsufficientMemory(needed=10, available=1, holders=1, largest_prompt=3)
    says = iter([Say(refuse=refusal), Say("Fine.")])
    async with Runtime.over(ScriptedService(lambda spec: next(says))) as runtime:
        chat = runtime.conversation()
        with pytest.raises(InsufficientMemory):
            await chat.send("hi")
        assert chat.messages == []
        assert (await chat.send("hi")).text == "Fine."


async def test_a_bug_in_a_turn_is_an_internal_error_with_its_cause() -> None:
    async with Runtime.over(ScriptedService(Say("Hello.", fails_after=2))) as runtime:
        with pytest.raises(OnecopyError) as caught:
            await runtime.conversation().send("hi")
    assert caught.value.code == "internal_error"
    assert isinstance(caught.value.__cause__, RuntimeError)


# --- ends


async def test_a_cancelled_wait_ends_the_turn_before_it_returns() -> None:
    service = ScriptedService(ENDLESS)
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        with trio.CancelScope() as scope:
            async for piece in chat.send("hi"):
                if isinstance(piece, Text):
                    scope.cancel()
        assert scope.cancelled_caught
        assert (service.active, service.cancelled) == (0, 1)
        assert chat.messages == []
        assert not chat.running


async def test_leaving_a_loop_ends_the_turn() -> None:
    service = ScriptedService(ENDLESS)
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        async for piece in chat.send("hi"):
            if isinstance(piece, Text):
                break
        await settled(lambda: service.active == 0)
        assert service.cancelled == 1
        assert not chat.running


async def test_a_block_ends_its_turn_at_its_end() -> None:
    service = ScriptedService(ENDLESS)
    async with Runtime.over(service) as runtime, runtime.conversation().send("hi") as sent:
        await anext(sent)
        await sent.close()
        assert service.active == 0
        assert await sent.next() == []
        with pytest.raises(Conflict):
            _ = sent.whole


async def test_a_send_waits_for_the_end_of_one_that_was_left() -> None:
    service = ScriptedService()
    service.script = lambda spec: Say("ok") if "second" in spoken(service) else ENDLESS
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        async for _ in chat.send("first"):
            break
        assert (await chat.send("second")).text == "ok"
    assert service.peak == 1


async def test_a_second_turn_at_once_is_a_conflict() -> None:
    async with Runtime.over(ScriptedService(ENDLESS)) as runtime:
        chat = runtime.conversation()
        async with chat.send("one") as sent:
            await anext(sent)
            assert chat.running
            with pytest.raises(Conflict):
                await chat.send("two")
            assert chat.running


async def test_a_timeout_is_a_deadline(autojump_clock: trio.testing.MockClock) -> None:
    service = ScriptedService(Say("na ", ends=False, between=lambda: trio.sleep(1)))
    async with Runtime.over(service) as runtime:
        with pytest.raises(DeadlineExceeded):
            await runtime.conversation().send("hi", timeout=5.5)
        assert service.active == 0
        with trio.move_on_after(5.5) as scope:
            await runtime.conversation().send("hi")
        assert scope.cancelled_caught
        assert service.active == 0


async def test_closing_the_runtime_ends_turns_with_an_error_for_their_readers() -> None:
    service = ScriptedService(ENDLESS)
    seen: list[type[BaseException]] = []

    async def read(runtime: Runtime, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async for _ in runtime.conversation().send("hi"):
                task_status.started() if not seen else None
                seen[:] = [object]
        except OnecopyError as error:
            seen[:] = [type(error)]

    async with trio.open_nursery() as nursery, Runtime.over(service) as runtime:
        await nursery.start(read, runtime)
    assert seen == [ActorStopped]
    with pytest.raises(ActorStopped):
        await runtime.conversation().send("hi")


async def test_errors_leave_the_block_as_they_are() -> None:
    with pytest.raises(Conflict):
        async with Runtime.over(ScriptedService()) as runtime:
            await runtime.conversation().pin()
    own = ExceptionGroup("mine", [ValueError()])
    with pytest.raises(ExceptionGroup) as caught:
        async with Runtime.over(ScriptedService()):
            raise own
    assert caught.value is own


async def test_a_send_that_is_never_read_runs_nothing() -> None:
    service = ScriptedService()
    async with Runtime.over(service) as runtime:
        runtime.conversation().send("hi")
        gc.collect()
        await trio.testing.wait_all_tasks_blocked()
    assert service.specs == []


# --- forks and sessions


async def test_a_fork_goes_its_own_way() -> None:
    service = ScriptedService(lambda spec: Say("yes" if "left" in spoken(service)[-60:] else "no"))
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation("Be brief.", temperature=0.5)
        await chat.send("hello")
        child = await chat.fork()
        assert (await child.send("left")).text == "yes"
        assert (await chat.send("right")).text == "no"
    assert child.messages[:3] == chat.messages[:3]
    assert [m["content"] for m in child.messages[3:]] == ["left", "yes"]
    assert child.receipt is not None
    assert child.receipt.rows_adopted >= len(service.specs[0].tokens)
    assert service.specs[1].sampling.temperature == 0.5


async def test_a_fork_at_rows_reserves_them_and_keeps_the_messages_within() -> None:
    service = ScriptedService("Fine.")
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation("Be brief.")
        await chat.send("one")
        first = len(chat.tokens)
        await chat.send("two")
        child = await chat.fork(at=first + 1)
        assert child.session in service.known
        assert service.known[child.session].parent == chat.session
        assert service.known[child.session].tokens == first + 1
        assert [m["content"] for m in child.messages] == ["Be brief.", "one", "Fine."]
        assert child.tokens == chat.tokens[: first + 1]


async def test_a_fork_past_the_rows_is_refused() -> None:
    async with Runtime.over(ScriptedService()) as runtime:
        chat = runtime.conversation()
        with pytest.raises(BadRequest):
            await chat.fork(at=3)
        await chat.send("hi")
        with pytest.raises(BadRequest) as caught:
            await chat.fork(at=len(chat.tokens) + 1)
        assert caught.value.param == "at"


async def test_sessions_are_pinned_parked_and_dropped() -> None:
    service = ScriptedService()
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        with pytest.raises(Conflict):
            await chat.pin()
        await chat.send("hi")
        assert (await chat.pin()).pinned
        assert not (await chat.pin(False)).pinned
        assert (await chat.park()).state == "parked"
        assert (await chat.info()).id == chat.session
        session = chat.session
        await chat.drop()
        assert (chat.session, chat.tokens) == (None, ())
        assert session not in service.known
        with pytest.raises(NotFound):
            await runtime.service.session(str(session))
        assert (await chat.send("again")).text == "Hello."


async def test_a_drop_ends_the_running_turn() -> None:
    service = ScriptedService(ENDLESS)
    async with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        sent = chat.send("hi")
        await anext(sent)
        await chat.drop()
        assert service.active == 0
        with pytest.raises(ActorStopped):
            await sent


async def test_status_tells_model_health_sessions_and_numbers() -> None:
    async with Runtime.over(ScriptedService()) as runtime:
        chat = runtime.conversation()
        await chat.send("hi")
        status = await runtime.status()
    assert (status.model, status.exactness, status.health.status) == ("acme/tiny-chat", "exact", "ok")
    assert [s.id for s in status.sessions] == [chat.session]
    assert status.metrics["bank"]["rows_held"] == 12


async def test_an_unknown_option_does_not_open() -> None:
    with pytest.raises(StartupError, match="memroy"):
        async with Runtime.open("smollm2", memroy=1):  # type: ignore[call-arg]
            pass


async def test_a_model_without_a_template_has_steps_only() -> None:
    service = ScriptedService("x")
    service.card = replace(service.card, chat=None)
    async with Runtime.over(service) as runtime:
        with pytest.raises(Unsupported):
            await runtime.conversation().send("hi")
        assert (await runtime.step("hi")).text == "x"
