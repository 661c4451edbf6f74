"""A chat of several turns through the official `openai` client: each turn evaluates its new tokens only.

Start a server with `make serve`, then: python examples/openai_chat.py
"""

from __future__ import annotations

import os

import openai

QUESTIONS = ("What is the capital of France?", "What is it known for?", "Say that in five words.")


def main() -> None:
    url = os.environ.get("ONECOPY_URL", "http://127.0.0.1:8080")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("ONECOPY_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        messages: list[dict[str, str]] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer(client, model, messages)})


def answer(client: openai.OpenAI, model: str, messages: list[dict[str, str]]) -> str:
    """One streamed turn, printed as it comes."""
    said = ""
    stream = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        max_tokens=60,
    )
    for chunk in stream:
        for choice in chunk.choices:
            said += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage and chunk.usage.prompt_tokens_details:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n  [{cached} of {chunk.usage.prompt_tokens} prompt tokens were kept]\n")
    return said


if __name__ == "__main__":
    main()
