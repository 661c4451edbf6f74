"""Server-sent events, as bytes. Comments carry text and no blank line: some clients take a blank line for an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .codec import encode

HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    """One event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """One named event."""
    return b"event: " + name.encode() + b"\n" + data(value)


def comment(text: str) -> bytes:
    """A line every client skips. `text` must be one non-empty line."""
    return b": " + text.encode() + b"\n"
