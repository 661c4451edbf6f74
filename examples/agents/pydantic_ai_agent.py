"""Pydantic AI over onecopy: a tool, and a typed answer.

    onecopy serve &
    python examples/agents/pydantic_ai_agent.py

Nothing of onecopy is imported: the framework's own OpenAI model class talks to the server. ONECOPY_URL and
ONECOPY_MODEL name another server or model.
"""

from __future__ import annotations

import asyncio
import os

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ.get("ONECOPY_URL", "http://127.0.0.1:8080")
MODEL = os.environ.get("ONECOPY_MODEL", "smollm2")


class Weather(BaseModel):
    """What the agent must answer with."""

    city: str
    degrees: int


def agent(client: AsyncOpenAI) -> Agent[None, Weather]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
    made = Agent(model, output_type=Weather, instructions="Look the temperature up, then answer.")

    @made.tool_plain
    def temperature(city: str) -> int:
        """The temperature in a city, in degrees Celsius."""
        return {"Paris": 21}.get(city, 15)

    return made


async def main() -> Weather:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        result = await agent(client).run("How warm is it in Paris?")
    print(f"{result.output.city}: {result.output.degrees} degrees")
    return result.output


if __name__ == "__main__":
    asyncio.run(main())
