"""`onecopy chat`: a conversation in the terminal, with a model opened here or a server elsewhere."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec
import trio
from onecopy.actors.service import Service
from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.turn import Prefilling, Queued, Reasoning, Sampling, Text

from ..order import Order, Talk, render, specs
from .flags import add_system_flags, system_options
from .serve import KEY_VARIABLE, open_system
from .terminal import busy, say

HELP = "/new starts over, /quit (or Ctrl-D) leaves, Ctrl-C ends a reply"
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Said:
    """A bit of a reply. kind "note" is for the person only: progress, thinking."""

    kind: str
    text: str


class Partner(Protocol):
    """Whoever answers."""

    def reply(self, messages: list[Message]) -> AbstractAsyncContextManager[AsyncIterator[Said]]: ...


def add_chat_command(subparsers: Any) -> None:
    parser = subparsers.add_parser("chat", help="talk to a model in the terminal")
    add_system_flags(parser)
    parser.add_argument("--url", help="talk to a server instead, e.g. http://127.0.0.1:8080")
    parser.add_argument("--api-key", default=os.environ.get(KEY_VARIABLE), help="key for --url")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    trio.run(_chat, args)
    return 0


async def _chat(args: argparse.Namespace) -> None:
    async with _partner(args) as partner:
        say(HELP)
        opening: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
        messages = list(opening)
        while (line := await _ask()) is not None and line != "/quit":
            if line == "/new":
                messages = list(opening)
            elif line:
                await _turn(partner, messages, line)


@asynccontextmanager
async def _partner(args: argparse.Namespace) -> AsyncIterator[Partner]:
    if args.url:
        headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        timeout = httpx.Timeout(10, read=None)
        async with httpx.AsyncClient(base_url=args.url, headers=headers, timeout=timeout) as client:
            yield Remote(client, args.temperature)
        return
    with busy(f"loading {args.model}"):
        system = open_system(system_options(args))
        service = await system.__aenter__()
    try:
        yield Local(service, args.temperature)
    finally:
        await system.__aexit__(None, None, None)


@dataclass(frozen=True, slots=True)
class Local:
    """A system in this process."""

    service: Service
    temperature: float

    @asynccontextmanager
    async def reply(self, messages: list[Message]) -> AsyncIterator[AsyncIterator[Said]]:
        order = Order(sampling=Sampling(seed=0, temperature=self.temperature))
        prompt = await render(self.service.card, Talk(messages), sum(len(m["content"]) for m in messages))
        [spec] = specs(self.service, order, prompt)
        async with self.service.turn(spec) as pieces:
            yield (said async for piece in pieces if (said := _said(piece)))


@dataclass(frozen=True, slots=True)
class Remote:
    """A server that speaks chat completions."""

    client: httpx.AsyncClient
    temperature: float

    @asynccontextmanager
    async def reply(self, messages: list[Message]) -> AsyncIterator[AsyncIterator[Said]]:
        body = {"messages": messages, "stream": True, "temperature": self.temperature}
        try:
            async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise OnecopyError(_problem(await response.aread(), response.status_code))
                yield _heard(response)
        except httpx.TransportError as error:
            raise OnecopyError(f"{self.client.base_url}: {error or type(error).__name__}.") from None


async def _turn(partner: Partner, messages: list[Message], line: str) -> None:
    """One exchange; a reply that fails or is cut off leaves the conversation as it was, or with what was said."""
    asked = [*messages, {"role": "user", "content": line}]
    parts: list[str] = []
    try:
        with trio.CancelScope() as scope, _interruptible(scope):
            await _listen(partner, asked, parts)
    except OnecopyError as error:
        say(f"onecopy: {error.message}")
        return
    print()
    messages[:] = [*asked, {"role": "assistant", "content": "".join(parts)}]


async def _listen(partner: Partner, asked: list[Message], parts: list[str]) -> None:
    """Show a reply and add its text to `parts`."""
    async with partner.reply(asked) as saying:
        async for said in saying:
            _show(said)
            if said.kind == "text":
                parts.append(said.text)


@contextmanager
def _interruptible(scope: trio.CancelScope) -> Iterator[None]:
    """Ctrl-C inside the block cancels `scope` only."""
    before = signal.signal(signal.SIGINT, lambda *_: scope.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def _ask() -> str | None:
    """The next line, or None at the end of input."""
    try:
        return (await trio.to_thread.run_sync(input, "> ", abandon_on_cancel=True)).strip()
    except EOFError:
        return None


def _show(said: Said) -> None:
    if said.kind == "text":
        print(said.text, end="", flush=True)
    elif sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m{said.text}\x1b[0m")
        sys.stderr.flush()


def _said(piece: object) -> Said | None:
    match piece:
        case Text(text=text) if text:
            return Said("text", text)
        case Reasoning(text=text) if text:
            return Said("note", text)
        case Prefilling():
            return Said("note", f"\rreading {piece.done}/{piece.total} ")
        case Queued():
            return Said("note", f"\rwaiting, position {piece.position} ")
    return None


async def _heard(response: httpx.Response) -> AsyncIterator[Said]:
    """A server's events as what was said."""
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            raise OnecopyError(event["error"]["message"])
        for choice in event["choices"]:
            if thought := choice["delta"].get("reasoning_content"):
                yield Said("note", thought)
            if text := choice["delta"].get("content"):
                yield Said("text", text)


def _problem(body: bytes, status: int) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"The server answered {status}."
