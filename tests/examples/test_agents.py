"""The agent frameworks in `examples/agents`, run against a scripted model behind a real socket."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest
import trio
from onecopy.runtime.turn import TurnSpec

from tests.support.http import running
from tests.support.scripted import Say, ScriptedService
from tests.support.tokens import CHATML

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
pytestmark = pytest.mark.filterwarnings("ignore")  # what other people's packages deprecate is theirs


def call(name: str, arguments: str) -> Say:
    return Say(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')


async def example(name: str, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the example's `main` returns, run under asyncio in a worker thread."""
    async with running(service) as server:
        monkeypatch.setenv("ONECOPY_URL", server.url)
        monkeypatch.setenv("ONECOPY_MODEL", service.card.id)

        def run() -> Any:
            return asyncio.run(runpy.run_path(str(EXAMPLES / name))["main"]())

        return await trio.to_thread.run_sync(run)


async def test_pydantic_ai_calls_a_tool_and_reads_a_typed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(spec: TurnSpec) -> Say:
        if "21" not in service.tokenizer.decode(spec.tokens):
            return call("temperature", '{"city": "Paris"}')
        return call("final_result", '{"city": "Paris", "degrees": 21}')

    service = ScriptedService(script, template=CHATML)
    weather = await example("pydantic_ai_agent.py", service, monkeypatch)
    assert (weather.city, weather.degrees) == ("Paris", 21)
    first, second = service.specs
    assert {tool.name for tool in first.format.tools} == {"temperature", "final_result"}
    assert first.format.tool_choice == "required"
    assert second.tokens[: len(first.tokens)] == first.tokens


async def test_openai_agents_hand_over_and_call_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(spec: TurnSpec) -> Say:
        if spec.format.tools[0].name == "transfer_to_reckoner":
            return call("transfer_to_reckoner", "{}")
        if "391" not in service.tokenizer.decode(spec.tokens):
            return call("multiply", '{"a": 17, "b": 23}')
        return Say("It is 391.")

    service = ScriptedService(script, template=CHATML)
    assert await example("openai_agents_handoff.py", service, monkeypatch) == "It is 391."
    assert [spec.format.tools[0].name for spec in service.specs] == ["transfer_to_reckoner", "multiply", "multiply"]
    assert service.specs[2].tokens[: len(service.specs[1].tokens)] == service.specs[1].tokens
