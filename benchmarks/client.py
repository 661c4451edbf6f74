"""A streaming client that notes when each byte and each piece of a reply arrived."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import trio

from .common import percentile

PATIENCE = 1800.0
"""Seconds without a byte before a request counts as failed: a slow peer computes long prompts in silence."""
Body = Mapping[str, Any]


@dataclass(slots=True)
class Timed:
    """One reply. Times in seconds on one clock; `pieces` are the arrivals of text, `bytes_at` of any bytes."""

    sent: float
    error: str = ""
    headers: float | None = None
    pieces: list[float] = field(default_factory=list)
    bytes_at: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    onecopy: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.pieces)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text."""
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def took(self) -> float | None:
        return self.pieces[-1] - self.sent if self.pieces else None

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or len(self.pieces))

    @property
    def prompt(self) -> int | None:
        return self.usage.get("prompt_tokens")

    @property
    def cached(self) -> int | None:
        details = self.usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens")

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first."""
        span = self.pieces[-1] - self.pieces[0] if self.pieces else 0.0
        return (self.tokens - 1) / span if span > 0 else None

    @property
    def prefill(self) -> float | None:
        """Prompt tokens computed a second, up to the first text."""
        if self.prompt is None or not self.ttft:
            return None
        return (self.prompt - (self.cached or 0)) / self.ttft

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.pieces)]

    @property
    def silence(self) -> float | None:
        """The longest time without any byte, from sending on."""
        at = [self.sent, *self.bytes_at]
        return max((b - a for a, b in pairwise(at)), default=None)


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http:
        yield http


async def stream(http: httpx.AsyncClient, body: Body, timed: Timed | None = None) -> Timed:
    """One streamed request. A failure is noted in `error`, never raised. timed: filled while the reply comes."""
    timed = timed or Timed(0.0)
    timed.sent = time.perf_counter()
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with http.stream("POST", "/v1/chat/completions", json=wanted) as answer:
            timed.headers = time.perf_counter() - timed.sent
            if answer.status_code != 200:
                timed.error = f"{answer.status_code} {(await answer.aread()).decode(errors='replace')[:200]}"
                return timed
            await _read(answer, timed)
    except httpx.HTTPError as error:
        timed.error = f"{type(error).__name__} {error}"
    if not timed.pieces and not timed.error:
        timed.error = "no text"
    return timed


async def _read(answer: httpx.Response, timed: Timed) -> None:
    rest = b""
    async for raw in answer.aiter_raw():
        now = time.perf_counter()
        timed.bytes_at.append(now)
        *whole, rest = (rest + raw).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            _take(event, now, timed)


def _take(event: bytes, now: float, timed: Timed) -> None:
    for line in event.split(b"\n"):
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            _chunk(json.loads(data), now, timed)


def _chunk(chunk: dict[str, Any], now: float, timed: Timed) -> None:
    if "error" in chunk:
        timed.error = str(chunk["error"])[:200]
    timed.usage = chunk.get("usage") or timed.usage
    timed.onecopy = chunk.get("onecopy") or timed.onecopy
    for choice in chunk.get("choices", ()):
        said = choice.get("text") or (choice.get("delta") or {}).get("content")
        timed.finish = choice.get("finish_reason") or timed.finish
        if said:
            timed.text.append(said)
            timed.pieces.append(now)


async def together(http: httpx.AsyncClient, bodies: Sequence[Body], *, apart: float = 0.0) -> list[Timed]:
    """The replies of requests that run side by side, in order. apart: seconds between their starts."""
    found: list[Timed | None] = [None] * len(bodies)

    async def one(i: int) -> None:
        await trio.sleep(i * apart)
        found[i] = await stream(http, bodies[i])

    async with trio.open_nursery() as nursery:
        for i in range(len(bodies)):
            nursery.start_soon(one, i)
    return [timed for timed in found if timed is not None]


def aggregate(replies: Iterable[Timed]) -> float | None:
    """Tokens of all replies per second, from the first request to the last piece."""
    done = [r for r in replies if r.ok]
    if not done:
        return None
    return sum(r.tokens for r in done) / (max(r.pieces[-1] for r in done) - min(r.sent for r in done))


def gap(replies: Iterable[Timed], q: float) -> float | None:
    return percentile([g for reply in replies for g in reply.gaps], q)


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Our server's metrics by name; those with labels are left out."""
    lines = (await http.get("/metrics")).text.splitlines()
    pairs = (line.split(" ", 1) for line in lines if line and not line.startswith("#") and "{" not in line)
    return {name: float(value) for name, value in pairs}
