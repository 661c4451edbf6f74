"""How much a client wants a model to think: what reaches the template, and whose word counts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.http import running
from tests.support.scripted import ScriptedService

TEMPLATE = (
    "{{ messages[0].content }}|effort={{ reasoning_effort | default('unsaid') }}"
    "|thinking={{ enable_thinking | default('unsaid') }}|"
)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "effort=unsaid|thinking=unsaid"),
        ({"reasoning_effort": "low"}, "effort=low|thinking=True"),
        ({"reasoning_effort": "none"}, "effort=none|thinking=False"),
        ({"reasoning_effort": None}, "effort=unsaid|thinking=unsaid"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "effort=high|thinking=False",
        ),
    ],
)
async def test_the_effort_reaches_the_template_and_the_clients_own_arguments_win(
    fields: dict[str, Any], shown: str
) -> None:
    service = ScriptedService("Yes.", template=TEMPLATE)
    async with running(service) as server, httpx.AsyncClient(base_url=server.url) as client:
        asked = {"model": service.card.id, "messages": [{"role": "user", "content": "Hi"}], **fields}
        answer = await client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert shown in service.tokenizer.decode(service.specs[0].tokens)
