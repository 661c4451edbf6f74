"""The official Python clients over a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest
import trio
from onecopy.api.doors import Options
from onecopy.runtime.turn import TurnSpec

from tests.support.http import running
from tests.support.scripted import Say, ScriptedService
from tests.support.tokens import THINKING

USER: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
Talk = Callable[[Callable[..., Any]], Any]


@asynccontextmanager
async def openai_client(
    service: ScriptedService, options: Options | None = None, key: str = "none"
) -> AsyncIterator[Talk]:
    """A function that runs `talk(client)` in a worker thread."""
    async with running(service, options) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=60)
        try:
            yield lambda talk: server.call(talk, client)
        finally:
            client.close()


@asynccontextmanager
async def anthropic_client(service: ScriptedService, options: Options | None = None) -> AsyncIterator[Talk]:
    async with running(service, options) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
        try:
            yield lambda talk: server.call(talk, client)
        finally:
            client.close()


async def test_openai_five_turns_streamed_each_reuse_the_turn_before() -> None:
    def talk(client: openai.OpenAI) -> list[tuple[int, int]]:
        messages, counts = list(USER), []
        for _ in range(5):
            chunks = list(
                client.chat.completions.create(
                    model="tiny-chat", messages=messages, stream=True, stream_options={"include_usage": True}
                )
            )
            said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            usage = chunks[-1].usage
            assert usage
            assert usage.prompt_tokens_details
            counts.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0))
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
        return counts

    async with openai_client(ScriptedService("Hello.")) as run:
        counts = await run(talk)
    for (before, _), (_, cached) in pairwise(counts):
        assert cached >= before


async def test_openai_a_tool_call_round_trip() -> None:
    def script(spec: TurnSpec) -> Say:
        return Say(f"hm</think>{CALL}" if len(service.specs) == 1 else "It rains.</think>Rain.")

    def talk(client: openai.OpenAI) -> Any:
        first = client.chat.completions.create(model="tiny-chat", messages=USER, tools=[WEATHER])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls
        [call] = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        second = client.chat.completions.create(
            model="tiny-chat", messages=[*USER, message.model_dump(), result], tools=[WEATHER]
        )
        return json.loads(call.function.arguments), second.choices[0].message.content  # type: ignore[union-attr]

    service = ScriptedService(script, template=THINKING)
    async with openai_client(service) as run:
        assert await run(talk) == ({"city": "Oslo"}, "Rain.")


async def test_openai_streams_survive_signs_of_life() -> None:
    async def slow() -> None:
        await trio.sleep(0.2)

    def talk(client: openai.OpenAI) -> str:
        stream = client.chat.completions.create(model="tiny-chat", messages=USER, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    service = ScriptedService(Say("Hello.", queued=1, prefill=[1, 2], before=slow))
    async with openai_client(service, Options(keepalive=0.01)) as run:
        assert await run(talk) == "Hello."


async def test_anthropic_streams_survive_signs_of_life() -> None:
    async def slow() -> None:
        await trio.sleep(0.2)

    def talk(client: anthropic.Anthropic) -> str:
        with client.messages.stream(model="tiny-chat", max_tokens=50, messages=USER) as stream:
            return stream.get_final_text()

    service = ScriptedService(Say("Hello.", queued=1, prefill=[1, 2], before=slow))
    async with anthropic_client(service, Options(keepalive=0.01)) as run:
        assert await run(talk) == "Hello."


@pytest.mark.parametrize("after", [0, 3])
async def test_f15_both_clients_see_a_failure_in_a_stream_as_an_error(after: int) -> None:
    def with_openai(client: openai.OpenAI) -> None:
        with pytest.raises(openai.APIError, match="went wrong"):
            list(client.chat.completions.create(model="tiny-chat", messages=USER, stream=True))

    def with_anthropic(client: anthropic.Anthropic) -> None:
        with (
            pytest.raises(anthropic.APIError, match="went wrong"),
            client.messages.stream(model="tiny-chat", max_tokens=50, messages=USER) as stream,
        ):
            stream.until_done()

    async with openai_client(ScriptedService(Say("Hello.", fails_after=after))) as run:
        await run(with_openai)
    async with anthropic_client(ScriptedService(Say("Hello.", fails_after=after))) as run:
        await run(with_anthropic)


async def test_openai_errors_have_their_own_classes() -> None:
    def talk(client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4o", messages=USER)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny-chat", messages=[{"role": "user", "content": "x" * 5000}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-no").models.list()

    async with openai_client(ScriptedService(), Options(keys=("sk-1",)), key="sk-1") as run:
        await run(talk)


async def test_openai_lists_models_logprobs_completions_and_structured_output() -> None:
    def talk(client: openai.OpenAI) -> None:
        [model] = client.models.list().data
        assert client.models.retrieve(model.id).id == model.id
        chat = client.chat.completions.create(model=model.id, messages=USER, logprobs=True, top_logprobs=2, n=2)
        assert [choice.index for choice in chat.choices] == [0, 1]
        assert chat.choices[0].logprobs
        assert chat.choices[0].logprobs.content
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
        text = client.completions.create(model=model.id, prompt="a", max_tokens=3, logprobs=1)
        assert text.choices[0].logprobs
        assert len(text.choices[0].logprobs.tokens or []) == 3

    async with openai_client(ScriptedService("Hello.")) as run:
        await run(talk)


async def test_openai_responses_streamed_continued_and_deleted() -> None:
    def talk(client: openai.OpenAI) -> None:
        with client.responses.stream(model="tiny-chat", input="hi") as stream:
            kinds = [event.type for event in stream]
            first = stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert first.output_text == "Hello."
        second = client.responses.create(model="tiny-chat", input="more", previous_response_id=first.id)
        assert second.usage
        assert second.usage.input_tokens_details.cached_tokens > 0
        assert client.responses.retrieve(first.id).output_text == "Hello."
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)

    async with openai_client(ScriptedService("Hello.")) as run:
        await run(talk)


async def test_anthropic_messages_tools_thinking_and_counting() -> None:
    tool: Any = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}

    def talk(client: anthropic.Anthropic) -> None:
        body: Any = {"model": "tiny-chat", "messages": USER, "tools": [tool], "system": "Be brief."}
        counted = client.messages.count_tokens(**body, thinking={"type": "enabled", "budget_tokens": 1024})
        with client.messages.stream(
            **body, max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024}
        ) as stream:
            message = stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"city": "Oslo"}  # type: ignore[union-attr]
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens == counted.input_tokens

    service = ScriptedService(f"hm</think>Look: {CALL}", template=THINKING)
    async with anthropic_client(service) as run:
        await run(talk)


async def test_anthropic_errors_have_their_own_classes() -> None:
    def talk(client: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude-x", max_tokens=5, messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(model="tiny-chat", max_tokens=5, messages=[{"role": "user", "content": "x" * 5000}])

    async with anthropic_client(ScriptedService()) as run:
        await run(talk)


async def test_f2_eight_streams_of_split_characters_side_by_side() -> None:
    text = "👨‍👩‍👧 漢字 🇳🇴 e\u0301"

    def talk(client: openai.OpenAI) -> str:
        stream = client.chat.completions.create(model="tiny-chat", messages=USER, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    said: list[str] = []
    async with openai_client(ScriptedService(text)) as run, trio.open_nursery() as nursery:

        async def one() -> None:
            said.append(await run(talk))

        for _ in range(8):
            nursery.start_soon(one)
    assert said == [text] * 8
