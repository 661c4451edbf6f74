"""Recurrent state: fixed-size arrays of a layer, per conversation, that stand for everything up to the frontier.

A round reads a state and leaves a new one; nothing is written in place. So an anchor is a reference, not a copy, and a
state can be put back as it was. Device thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

Array = Any
State = tuple[Array | None, ...]
"""One layer's arrays by slot; None where the model uses no slot."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One fixed-size array of a recurrent layer, per conversation; a fresh one is full of `fill`.

    name: what a model of our own calls it.
    """

    shape: tuple[int, ...]
    dtype: Any
    fill: int = 0
    name: str = ""

    @property
    def nbytes(self) -> int:
        size = int(self.dtype.size)
        for n in self.shape:
            size *= n
        return size


Specs = tuple[StateSpec | None, ...]


def fresh(specs: Specs) -> State:
    """The state before the first token."""
    return tuple(None if s is None else mx.full(s.shape, s.fill, s.dtype) for s in specs)


class StateCache:
    """One recurrent layer's view of a round: slots `[batch, …]`. length: rows of each conversation."""

    lengths = None
    left_padding = None

    trail = False
    """The states after every row of the round are wanted, where a layer can tell them."""

    def __init__(self, layer: int, specs: Specs) -> None:
        self.layer = layer
        self.specs = specs
        self.offset: Array = 0
        self.length = 0
        self._slots: list[Array | None] = []

    def load(self, states: Sequence[State]) -> None:
        """Takes the states of a round's conversations, in order."""
        self._slots = [None] * len(self.specs)
        for i, spec in enumerate(self.specs):
            if spec is not None:
                self._slots[i] = mx.stack([state[i] for state in states])  # type: ignore[misc]

    def unload(self) -> list[State]:
        """The new state of each conversation. Lazy copies: a slice would keep the whole batch alive."""
        batch = next(slot.shape[0] for slot in self._slots if slot is not None)
        states = [tuple(None if slot is None else slot[b] * 1 for slot in self._slots) for b in range(batch)]
        self._slots = []
        return states

    def __getitem__(self, slot: int) -> Array | None:
        return self._slots[slot]

    def __setitem__(self, slot: int, value: Array) -> None:
        self._slots[slot] = value

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def advance(self, rows: int) -> None:
        """Lengths are the bank's affair."""

    def empty(self) -> bool:
        return False


class Trail(Protocol):
    """A state after any number of a round's rows."""

    def after(self, conversation: int, kept: int) -> Array:
        """The state of one conversation once `kept` of its new rows are written. Shape: the spec's."""
        ...


@dataclass(frozen=True, slots=True)
class History:
    """One layer's state after any number of a round's rows, for one conversation. trails: by slot."""

    trails: Mapping[int, Trail]
    slots: int
    conversation: int

    def after(self, kept: int) -> State:
        """Lazy copies: a slice would keep all that the trail holds alive."""
        found = (self.trails.get(i) for i in range(self.slots))
        return tuple(None if trail is None else trail.after(self.conversation, kept) * 1 for trail in found)


class NamedStates(StateCache):
    """The same for a model of our own: slots have names, and a layer says what its state is after each row."""

    def __init__(self, layer: int, specs: Specs) -> None:
        super().__init__(layer, specs)
        self._numbers = {spec.name: i for i, spec in enumerate(specs) if spec is not None}
        self._trails: dict[int, Trail] = {}

    def get(self, name: str) -> Array:
        """The state before the first new row, `[batch, *shape]`."""
        return self._slots[self._numbers[name]]

    def put(self, name: str, trail: Trail) -> None:
        self._trails[self._numbers[name]] = trail

    def unload(self) -> list[State]:
        return [history.after(self.length) for history in self.histories()]

    def histories(self) -> list[History]:
        """Of each conversation of the round; forgotten here."""
        trails, batch = self._trails, len(next(slot for slot in self._slots if slot is not None))
        self._slots, self._trails = [], {}
        return [History(trails, len(self.specs), b) for b in range(batch)]


def state_cache(layer: int, specs: Specs) -> StateCache:
    """A `StateCache` that model code takes for mlx-lm's `ArraysCache`: some write only to an instance of that.

    Specs with names are those of a model of our own.
    """
    if any(spec is not None and spec.name for spec in specs):
        return NamedStates(layer, specs)
    from mlx_lm.models.cache import ArraysCache

    return type("StateArrays", (StateCache, ArraysCache), {})(layer, specs)  # type: ignore[no-any-return]
