"""A streamed message through the official `anthropic` client, and what its prompt costs before it is sent.

Start a server with `make serve`, then: python examples/anthropic_chat.py
"""

from __future__ import annotations

import os

import anthropic


def main() -> None:
    url = os.environ.get("ONECOPY_URL", "http://127.0.0.1:8080")
    with anthropic.Anthropic(base_url=url, api_key=os.environ.get("ONECOPY_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        system = "You answer in one short sentence."
        question: anthropic.types.MessageParam = {"role": "user", "content": "What is the capital of France?"}
        counted = client.messages.count_tokens(model=model, system=system, messages=[question])
        print(f"[{counted.input_tokens} input tokens]")
        with client.messages.stream(
            model=model, max_tokens=60, system=system, messages=[question], extra_body={"temperature": 0}
        ) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            usage = stream.get_final_message().usage
        print(f"\n[{usage.cache_read_input_tokens} were kept, {usage.output_tokens} written]")


if __name__ == "__main__":
    main()
