"""Responses kept for retrieval and for previous_response_id: bounded, in memory, each visible to its own key only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from onecopy.runtime.errors import NotFound


@dataclass(frozen=True, slots=True)
class Stored:
    """One response. body: as it was sent. items: the request's own input. history: every message up to its end."""

    salt: bytes
    body: bytes
    items: tuple[Any, ...]
    history: tuple[dict[str, Any], ...]


@dataclass(slots=True)
class Kept:
    """The newest `limit` responses, at most `room` bytes of bodies. `put` forgets the oldest."""

    limit: int
    room: int = 64 << 20
    held: int = 0
    stored: OrderedDict[str, Stored] = field(default_factory=OrderedDict)

    def put(self, id: str, response: Stored) -> None:
        self.stored[id] = response
        self.held += len(response.body)
        while len(self.stored) > self.limit or self.held > self.room:
            self.held -= len(self.stored.popitem(last=False)[1].body)

    def get(self, id: str, salt: bytes, param: str | None = None) -> Stored:
        found = self.stored.get(id)
        if found is None or found.salt != salt:
            raise NotFound(f"There is no response {id!r} here.", param=param)
        return found

    def drop(self, id: str, salt: bytes) -> None:
        self.held -= len(self.get(id, salt).body)
        del self.stored[id]
