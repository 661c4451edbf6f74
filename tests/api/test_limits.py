"""Limits are the same condition everywhere: streamed or not, in either API, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from onecopy.api.doors import Options
from onecopy.runtime.errors import InsufficientMemory, Overloaded, Unavailable
from onecopy.runtime.turn import TurnSpec

from tests.support.http import Answer, Direct
from tests.support.scripted import Say, ScriptedService

CHAT = "/v1/chat/completions"


def prompt_of(service: ScriptedService, tokens: int) -> list[dict[str, Any]]:
    """Messages whose prompt has exactly this many tokens."""
    around = len(service.chat.tokens([{"role": "user", "content": ""}]))
    return [{"role": "user", "content": "x" * (tokens - around)}]


async def ask(service: ScriptedService, tokens: int, **fields: Any) -> Answer:
    return await Direct(service).post(CHAT, {"messages": prompt_of(service, tokens), **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [256, 300])
async def test_e4_a_prompt_past_the_context_is_a_400_with_both_counts(stream: bool, tokens: int) -> None:
    answer = await ask(ScriptedService(context=256), tokens, stream=stream)
    error = answer.json()["error"]
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert "256" in error["message"]
    assert str(tokens) in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_e4_a_prompt_past_the_context_has_anthropics_own_words(stream: bool) -> None:
    service = ScriptedService(context=256)
    body = {"max_tokens": 5, "messages": prompt_of(service, 300), "stream": stream}
    answer = await Direct(service).post("/v1/messages", body)
    message = "prompt is too long: 300 tokens > 256 maximum"
    assert answer.status == 400
    assert answer.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"max_tokens": 200}, {}])
async def test_e4_a_reply_that_cannot_fit_is_clamped_to_the_context(stream: bool, fields: dict[str, int]) -> None:
    service = ScriptedService(Say("x", ends=False), context=256)
    answer = await ask(service, 250, stream=stream, stream_options={"include_usage": True}, **fields)
    body = answer.events()[-2] if stream else answer.json()
    assert answer.status == 200
    assert body["usage"]["total_tokens"] == 256


async def test_e4_a_body_past_the_limit_is_a_413() -> None:
    service = ScriptedService(context=256)
    answer = await Direct(service, Options(body_limit=1 << 20)).post(CHAT, b"x" * (2 << 20))
    assert (answer.status, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_e5_a_reply_that_never_ends_stops_at_the_context_and_the_next_turn_is_told() -> None:
    service = ScriptedService(Say("x", ends=False), context=256)
    first = await ask(service, 230, max_tokens=512)
    assert first.json()["choices"][0]["finish_reason"] == "length"
    said = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
    messages = [*prompt_of(service, 230), said, {"role": "user", "content": "more"}]
    answer = await Direct(service).post(CHAT, {"messages": messages})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


REFUSALS = [
    (InsufficientMemory(needed=9, available=4, holders=2, largest_prompt=7), 503, "insufficient_memory"),
    (Overloaded("The queue is full.", retry_after=3), 429, "overloaded"),
    (Unavailable("The server is stopping."), 503, "unavailable"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), REFUSALS)
async def test_a_refusal_keeps_its_status_and_says_when_to_come_back(
    error: Any, status: int, code: str, stream: bool
) -> None:
    answer = await ask(ScriptedService(Say(refuse=error)), 50, stream=stream)
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("after", [0, 3, 6])
async def test_f15_a_failure_in_a_stream_is_one_error_event_and_no_end(path: str, after: int) -> None:
    def script(spec: TurnSpec) -> Say:
        return Say("Hello", fails_after=after) if len(service.specs) == 1 else Say("Hello")

    service = ScriptedService(script)
    body = {"messages": prompt_of(service, 50), "max_tokens": 50, "stream": True}
    answer = await Direct(service).post(path, body)
    *before, last = answer.events()
    assert answer.status == 200
    assert sum("error" in event for event in before) == 0
    assert last["error"]["message"]
    assert b"[DONE]" not in answer.body
    assert b'"finish_reason":"stop"' not in answer.body
    assert (b"event: error" in answer.body) == (path == "/v1/messages")
    assert (await Direct(service).post(path, body)).events()[-1] != last
    assert service.active == 0


async def test_f15_what_was_said_before_a_failure_is_delivered() -> None:
    answer = await ask(ScriptedService(Say("Hello", fails_after=3)), 50, stream=True)
    said = [choice["delta"].get("content") for event in answer.events()[:-1] for choice in event["choices"]]
    assert "".join(text or "" for text in said) == "Hel"


async def test_a_failure_without_a_stream_is_a_500_that_tells_nothing_about_the_inside() -> None:
    answer = await ask(ScriptedService(Say("Hello", fails_after=3)), 50)
    assert (answer.status, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "a bug" not in answer.body.decode()


async def test_a_bug_is_logged_by_its_place_and_never_by_its_text(caplog: pytest.LogCaptureFixture) -> None:
    await ask(ScriptedService(Say("Hello", fails_after=3, error=ValueError("the user's secret"))), 50)
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text
