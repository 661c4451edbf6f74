"""`onecopy chat`: a conversation in the terminal, with a model opened here or a server elsewhere."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
    trio.run(talk, args)
    return 0


async def talk(args: argparse.Namespace) -> None:
    """Read lines and show replies until the input ends."""
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
        if service.card.exactness == "not exact":
            say(f"not exact: {'; '.join(service.card.features['exactness_reasons'])}")
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
    """One exchange. A reply that fails leaves the conversation as it was; one that is cut off keeps what was said."""
    asked = [*messages, {"role": "user", "content": line}]
    parts: list[str] = []
    failure: OnecopyError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_interrupt, nursery.cancel_scope)
        failure = await _listen(partner, asked, parts)
        nursery.cancel_scope.cancel()
    print()
    if failure:
        say(f"onecopy: {failure.message}")
    else:
        messages[:] = [*asked, {"role": "assistant", "content": "".join(parts)}]


async def _listen(partner: Partner, asked: list[Message], parts: list[str]) -> OnecopyError | None:
    """Show a reply and add its text to `parts`; its error, if it failed."""
    try:
        async with partner.reply(asked) as saying:
            async for said in saying:
                _show(said)
                parts += [said.text] if said.kind == "text" else []
    except OnecopyError as error:
        return error
    return None


async def _interrupt(scope: trio.CancelScope) -> None:
    """Ctrl-C ends the reply only."""
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


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
    """A server's events as what was said. An error is raised once the stream has been read to its end."""
    failure: str | None = None
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            failure = event["error"]["message"]
        for choice in event.get("choices", ()):
            if thought := choice["delta"].get("reasoning_content"):
                yield Said("note", thought)
            if text := choice["delta"].get("content"):
                yield Said("text", text)
    if failure is not None:
        raise OnecopyError(failure)


def _problem(body: bytes, status: int) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"The server answered {status}."
