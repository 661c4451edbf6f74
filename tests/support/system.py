"""A whole server over a tiny random model: the real engine on its device thread, the real actors, a real socket.

The model's layers are scaled up so that a greedy reply depends on its whole prompt, and replies are compared by token
ids and log probabilities: one wrong, stale or foreign row shows.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import mlx.core as mx
import trio
from onecopy.actors import system as root
from onecopy.actors.service import Options
from onecopy.actors.system import System
from onecopy.api.doors import Options as Doors
from onecopy.runtime.seams.disk import Disk
from tokenizers import pre_tokenizers

from tests.support.checkpoints import write_checkpoint
from tests.support.http import Running, events, running
from tests.support.tokens import CHATML

CHAT = "/v1/chat/completions"
SHARPNESS = 6.0
PATIENCE = 60.0
"""Seconds after which something that was to happen counts as never happening."""

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = {str(_ALPHABET.index(c)): 100.0 for c in "abcdefghijklmnopqrstuvwxyz"}
"""A logit bias under which replies are plain letters: their text turns into the same tokens again."""

_salts = count(1)
"""One salt for each cold run of this process, whatever is on disk."""


def write_tiny(path: Path, template: str = CHATML, **config: Any) -> Path:
    """A two-layer random llama that serves 65,536 positions, with a byte tokenizer and a template (ChatML)."""
    write_checkpoint(path, max_position_embeddings=65536, tied=False, **config)
    weights = mx.load(str(path / "model.safetensors"))
    plain = ("norm", "embed", "lm_head")
    sharp = {k: w if any(p in k for p in plain) else w * SHARPNESS for k, w in weights.items()}
    mx.eval(sharp)
    mx.save_safetensors(str(path / "model.safetensors"), sharp)
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system_text(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A greedy request for 16 tokens, shown with ids and log probabilities, that no end token cuts short."""
    shown = {"ignore_eos": True, "logprobs": True, "return_token_ids": True}
    return {"messages": list(messages), "temperature": 0, "max_tokens": 16, "logit_bias": LETTERS, **shown, **more}


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply. said: what must be equal however it was computed."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    text: str
    prompt: int
    cached: int
    onecopy: dict[str, Any]

    @property
    def said(self) -> tuple[Any, ...]:
        return self.tokens, self.logprobs, self.finish, self.onecopy["token_sha"]

    @classmethod
    def of(cls, found: Any) -> Reply:
        """From a whole body."""
        choice, usage = found["choices"][0], found["usage"]
        shown = choice["logprobs"]["content"] if choice["logprobs"] else []
        return cls(
            tuple(choice.get("token_ids", ())),
            tuple(item["logprob"] for item in shown),
            choice["finish_reason"],
            choice["message"]["content"],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            found["onecopy"],
        )

    @classmethod
    def of_stream(cls, raw: bytes) -> Reply:
        """From the bytes of a stream that asked for usage."""
        *chunks, done = events(raw)
        assert done == "[DONE]", raw[-400:]
        choices = [c for chunk in chunks for c in chunk["choices"]]
        shown = [item for c in choices if c["logprobs"] for item in c["logprobs"]["content"]]
        last = next(chunk for chunk in chunks if "onecopy" in chunk)
        usage = chunks[-1]["usage"]
        return cls(
            tuple(t for c in choices for t in c.get("token_ids", ())),
            tuple(item["logprob"] for item in shown),
            next(c["finish_reason"] for c in choices if c["finish_reason"]),
            "".join(c["delta"].get("content", "") for c in choices),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            last["onecopy"],
        )


class Whole:
    """A system, its server and an HTTP client at it, all in this process and on this trio loop."""

    def __init__(self, system: System, server: Running, http: httpx.AsyncClient) -> None:
        self.system = system
        self.server = server
        self.http = http

    async def post(self, wanted: dict[str, Any], path: str = CHAT) -> httpx.Response:
        return await self.http.post(path, json=wanted)

    async def ask(self, wanted: dict[str, Any]) -> Reply:
        answer = await self.post(wanted)
        assert answer.status_code == 200, answer.text
        return Reply.of(answer.json())

    async def streamed(self, wanted: dict[str, Any]) -> Reply:
        answer = await self.post({**wanted, "stream": True, "stream_options": {"include_usage": True}})
        assert answer.status_code == 200, answer.text
        return Reply.of_stream(answer.content)

    async def cold(self, wanted: dict[str, Any]) -> Reply:
        """The reply that nothing kept can influence: no other request carries its salt."""
        reply = await self.ask({**wanted, "cache_salt": f"cold {next(_salts)}"})
        assert reply.cached == 0
        return reply

    async def together(self, wanted: Sequence[dict[str, Any]], *, stream: Sequence[bool] = ()) -> list[Reply]:
        """The replies of requests that run side by side, in their order."""
        return await gather(
            [
                lambda w=w, s=s: (self.streamed if s else self.ask)(w)  # type: ignore[misc]
                for w, s in zip(wanted, stream or [False] * len(wanted), strict=True)
            ]
        )

    async def leave(self, wanted: dict[str, Any], after: int) -> None:
        """A streaming client that leaves after it has read so many times."""
        async with await self.connect({**wanted, "stream": True}) as client:
            for _ in range(after):
                if not await client.receive_some():
                    break

    async def connect(self, wanted: dict[str, Any]) -> trio.SocketStream:
        """A connection on which a chat request was sent and nothing read."""
        content = json.dumps(wanted).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
        client = await trio.open_tcp_stream("127.0.0.1", self.server.port)
        await client.send_all(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return client

    async def drop_all(self) -> None:
        """Forgets every conversation, of any salt, once nothing runs."""
        await self.at_rest()
        for found in await self.system.sessions():
            await self.system.drop(found.id)

    async def numbers(self) -> dict[str, Any]:
        return dict(await self.system.metrics())

    async def at_rest(self) -> dict[str, Any]:
        """The numbers once nothing runs and nothing waits."""

        async def rests() -> bool:
            found = await self.numbers()
            return found["bank"]["turns"] == found["bank"]["queued"] == found["lane"]["running"] == 0

        await eventually(rests)
        await self.system._device.run(int)  # orders for buffers have been carried out
        return await self.numbers()


@asynccontextmanager
async def serving(
    model: Path,
    *,
    rows: int = 1 << 30,
    limit: int = 512,
    disk: Disk | None = None,
    doors: Doors | None = None,
    **options: Any,
) -> AsyncIterator[Whole]:
    """Serves a checkpoint around the block. rows: bytes for rows. limit: connections of the client."""
    opened = Options(str(model), memory=rows + root.WORKSPACE, **{"context": 65536, "seed": 7, **options})
    with mock.patch.object(root, "LEAST_ROWS", 1):
        async with System.open(opened, machine=_Bare(), disk=disk) as system, running(system, doors) as server:
            bounds = httpx.Limits(max_connections=limit, max_keepalive_connections=limit)
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=bounds) as http:
                yield Whole(system, server, http)


class _Bare:
    """A machine on which all memory that was asked for goes to rows and workspace."""

    def total(self) -> int:
        return 1 << 40

    def footprint(self) -> int:
        return 0


async def gather(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Results of calls that run side by side, in their order."""
    results: list[Any] = [None] * len(calls)

    async def one(i: int) -> None:
        results[i] = await calls[i]()

    async with trio.open_nursery() as nursery:
        for i in range(len(calls)):
            nursery.start_soon(one, i)
    return results


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Returns once the condition holds; fails when it never does."""
    with trio.fail_after(PATIENCE):
        while not await condition():
            await trio.sleep(0.002)


def grown(messages: list[dict[str, Any]], reply: Reply, text: str) -> list[dict[str, Any]]:
    """The conversation after a reply, with the next question."""
    return [*messages, {"role": "assistant", "content": reply.text}, user(text)]


def differing(text: str, at: int) -> str:
    """The same text with another character at `at`."""
    return text[:at] + ("#" if text[at] != "#" else "$") + text[at + 1 :]


def without_logprobs(reply: Reply) -> Reply:
    return replace(reply, logprobs=())
