"""Which tokens a turn has seen, kept for the penalties: O(1) a token, undone token by token, read as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.turn import Sampling

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Seen:
    """A snapshot: `ids` [n] are the distinct tokens of prompt and reply, `replies` [n] how often the reply has each."""

    ids: Int32s
    replies: Int32s


class TokenCounts:
    """Tokens of one turn. The prompt's tokens only mark an id as seen; the reply's are counted."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        ids = np.unique(np.asarray(prompt, dtype=np.int32))
        self._slot: dict[int, int] = {token: slot for slot, token in enumerate(ids.tolist())}
        self._ids = ids
        self._replies: Int32s = np.zeros(len(ids), np.int32)
        self._fixed = len(ids)
        self._reply: list[int] = []

    @classmethod
    def wanted(cls, sampling: Sampling, prompt: Sequence[int]) -> TokenCounts | None:
        """The counts `sampling` needs at the start of a reply: None when it has no penalty."""
        if not penalised(sampling):
            return None
        return cls(prompt if sampling.repetition_penalty != 1.0 else ())

    def __len__(self) -> int:
        """Tokens of the reply so far."""
        return len(self._reply)

    def push(self, token: int) -> None:
        """Append one reply token."""
        slot = self._slot.setdefault(token, len(self._slot))
        if slot >= len(self._ids):
            self._grow()
        self._ids[slot] = token
        self._replies[slot] += 1
        self._reply.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.push(token)

    def rewind(self, length: int) -> None:
        """Forget reply tokens past the first `length`; exactly the state before they were pushed."""
        while len(self._reply) > length:
            self._pop()

    def seen(self) -> Seen:
        """A snapshot that later pushes do not change."""
        used = len(self._slot)
        return Seen(self._ids[:used].copy(), self._replies[:used].copy())

    def _pop(self) -> None:
        token = self._reply.pop()
        slot = self._slot[token]
        self._replies[slot] -= 1
        # Undo runs backwards, so a slot that this token opened is the last one.
        if slot >= self._fixed and not self._replies[slot]:
            del self._slot[token]

    def _grow(self) -> None:
        room = np.zeros(max(64, len(self._ids)), np.int32)
        self._ids = np.concatenate([self._ids, room])
        self._replies = np.concatenate([self._replies, room])


def penalised(sampling: Sampling) -> bool:
    """Whether earlier tokens change this sampling's picks."""
    off: tuple[Any, ...] = (0.0, 0.0, 1.0)
    return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != off
