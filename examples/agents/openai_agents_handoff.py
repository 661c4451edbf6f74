"""The OpenAI Agents SDK over onecopy: a triage agent hands over to a specialist with a tool.

    onecopy serve &
    python examples/agents/openai_agents_handoff.py

Nothing of onecopy is imported: the framework's own chat completions model talks to the server. Each turn resends the
whole conversation; the server finds its rows by their tokens. ONECOPY_URL and ONECOPY_MODEL name another server or
model.
"""

from __future__ import annotations

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL = os.environ.get("ONECOPY_URL", "http://127.0.0.1:8080")
MODEL = os.environ.get("ONECOPY_MODEL", "smollm2")


@function_tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


async def main() -> str:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        settings = ModelSettings(temperature=0.0)
        reckoner = Agent(
            name="reckoner", instructions="Use the tool.", model=model, tools=[multiply], model_settings=settings
        )
        triage = Agent(
            name="triage", instructions="Hand sums over.", model=model, handoffs=[reckoner], model_settings=settings
        )
        result = await Runner.run(triage, "What is 17 times 23?", max_turns=6)
    print(f"{result.last_agent.name}: {result.final_output}")
    return str(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
