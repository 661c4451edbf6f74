"""An agent: the model calls tools until it can answer. Each step sends the whole history; only its end is evaluated.

Start a server with a model that can call tools, e.g. `onecopy serve path/to/Qwen3-4B`, then:
python examples/agent_loop.py "What is 17 * 23, and is it prime?"
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import openai

STEPS = 8


def multiply(a: int, b: int) -> int:
    return a * b


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


TOOLS: dict[str, Callable[..., Any]] = {"multiply": multiply, "is_prime": is_prime}


def described(name: str, text: str, *numbers: str) -> dict[str, Any]:
    """A function tool whose arguments are all integers."""
    properties = {number: {"type": "integer"} for number in numbers}
    schema = {"type": "object", "properties": properties, "required": list(numbers)}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


DESCRIBED = [described("multiply", "a times b", "a", "b"), described("is_prime", "Whether n is prime", "n")]


def run(client: openai.OpenAI, question: str) -> str:
    """The model's answer, after as many tool calls as it wants (at most STEPS rounds)."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(STEPS):
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=DESCRIBED,  # type: ignore[arg-type]
            max_tokens=500,
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if reply.choices[0].finish_reason != "tool_calls":
            return message.content or ""
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result(call.function)})  # type: ignore[union-attr]
    return "I gave up."


def result(function: Any) -> str:
    """What a call returns, or why it could not: the model is told either way."""
    try:
        return json.dumps(TOOLS[function.name](**json.loads(function.arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def main() -> None:
    url = os.environ.get("ONECOPY_URL", "http://127.0.0.1:8080")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("ONECOPY_API_KEY", "none")) as client:
        print(run(client, " ".join(sys.argv[1:]) or "What is 17 * 23, and is it prime?"))


if __name__ == "__main__":
    main()
