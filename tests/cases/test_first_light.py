"""A real chat through the official client, eight of them at once, and sensible English from the bundled model."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.system import LETTERS, Whole, body, gather, serving, system_text, user

BLOCK = 256
S = system_text("".join(random.Random(5).choices("abcdefghijklmnopqrstuvwxyz ,.", k=1500)))


@pytest.fixture
async def whole(tiny: Path) -> AsyncIterator[Whole]:
    async with serving(tiny) as made:
        yield made


async def test_a_five_turn_chat_streamed_by_the_official_client_reuses_each_turn_before(whole: Whole) -> None:
    counts = await official(whole, lambda client: five_turns(client, "the first question"))
    assert len(counts) == 5
    for (prompt, _), (_, cached) in pairwise(counts):
        assert cached >= prompt - BLOCK


async def test_eight_official_clients_at_once_hear_what_each_would_hear_alone(whole: Whole, tiny: Path) -> None:
    def ask(client: openai.OpenAI, i: int) -> str:
        chunks = client.chat.completions.create(
            model="tiny", messages=[S, user(f"client {i}")], stream=True, max_tokens=60, temperature=0.7, seed=i,
            logit_bias=LETTERS, extra_body={"ignore_eos": True},
        )  # fmt: skip
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    async with serving(tiny, name="tiny") as together:
        heard = await gather([lambda i=i: official(together, lambda c: ask(c, i)) for i in range(8)])  # type: ignore[misc]
    async with serving(tiny, name="tiny") as alone:
        solo = [await official(alone, lambda c, i=i: ask(c, i)) for i in range(8)]  # type: ignore[misc]
    assert heard == solo
    assert [len(text) for text in heard] == [60] * 8


async def test_eight_chats_at_once_are_as_tokens_what_each_is_alone(whole: Whole) -> None:
    asked = [body(S, user(f"client {i}"), max_tokens=48) for i in range(8)]
    solo = [await whole.cold(wanted) for wanted in asked]
    assert [r.said for r in await whole.together(asked, stream=[True] * 8)] == [r.said for r in solo]


@pytest.mark.model
async def test_the_bundled_model_knows_the_capital_of_france() -> None:
    async with serving(Path("smollm2"), context=2048) as whole:
        wanted = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        text = (await whole.post(wanted, "/v1/completions")).json()["choices"][0]["text"]
        chat = {"messages": [user("What is the capital of France?")], "max_tokens": 24, "temperature": 0}
        reply = (await whole.post(chat)).json()["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert "Paris" in reply


async def official(whole: Whole, talk: Any) -> Any:
    """`talk(client)` with the official client, in a thread of its own."""
    client = openai.OpenAI(base_url=whole.server.url + "/v1", api_key="none", max_retries=0, timeout=60)
    try:
        return await whole.server.call(talk, client)
    finally:
        client.close()


def five_turns(client: openai.OpenAI, first: str) -> list[tuple[int, int]]:
    """(prompt tokens, cached tokens) of each turn of a streamed chat."""
    messages: list[Any] = [S, user(first)]
    counts = []
    model = client.models.list().data[0].id
    for turn in range(5):
        chunks = list(
            client.chat.completions.create(
                model=model, messages=messages, stream=True, max_tokens=40, stream_options={"include_usage": True}
            )
        )
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        counts.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0))
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        messages += [{"role": "assistant", "content": said}, user(f"question {turn}")]
    return counts
