"""What a delta net's state was after each row of a round, for mlx-lm's classes, which only say what it is at the end.

A gated delta net keeps two things: the last inputs of its convolution, and the matrix that its rule updates row by row.
Listening to both while a round runs is enough to come by either at any row: the inputs are a slice, and the rule alone,
run again over fewer rows, is a small part of a forward. So a rejected draft costs no forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from onecopy.runtime.rows.states import Trail

Array = Any

LAYERS = frozenset({"mlx_lm.models.qwen3_5.GatedDeltaNet", "mlx_lm.models.qwen3_next.Qwen3NextGatedDeltaNet"})
"""Classes whose two states, in slots 0 and 1, are known to come about in this way."""

RULE = "gated_delta_update"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The convolution's inputs `[batch, kept before + rows, width]`."""

    history: Array
    keep: int

    def after(self, conversation: int, kept: int) -> Array:
        return self.history[conversation, kept : kept + self.keep]


@dataclass(frozen=True, slots=True)
class Rule:
    """A call of the rule: rows `[batch, rows, …]` of five kinds, two constants, the state before."""

    run: Callable[..., tuple[Array, Array]]
    rows: tuple[Array, ...]
    constants: tuple[Array, ...]
    state: Array
    more: dict[str, Any]

    def after(self, conversation: int, kept: int) -> Array:
        rows = (part[conversation : conversation + 1, :kept] for part in self.rows)
        before = None if self.state is None else self.state[conversation : conversation + 1]
        return self.run(*rows, *self.constants, before, None, **self.more)[1][0]


@dataclass(slots=True)
class Tape:
    """What was heard in one call of a model. layers: how many recurrent layers it has."""

    layers: int
    inputs: list[Inputs] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[None]:
        global _tape
        self.inputs.clear()
        self.rules.clear()
        _tape = self
        try:
            yield
        finally:
            _tape = None

    def take(self) -> list[dict[int, Trail]]:
        """By recurrent layer, its slots' states after any number of rows. Forgotten here."""
        inputs, rules = list(self.inputs), list(self.rules)
        self.inputs.clear()
        self.rules.clear()
        if not len(inputs) == len(rules) == self.layers:
            raise AssertionError("a recurrent layer was not heard")
        return [{0: a, 1: b} for a, b in zip(inputs, rules, strict=True)]


_tape: Tape | None = None
"""The tape that listens now: models run on one thread, one call at a time."""


def tape_of(model: nn.Module, layers: int) -> Tape | None:
    """A tape for a model all of whose `layers` recurrent layers are of known classes, None for others."""
    nets = [m for _, m in model.named_modules() if f"{type(m).__module__}.{type(m).__qualname__}" in LAYERS]
    if not layers or len(nets) != layers:
        return None
    for net in nets:
        _hear_rule(sys.modules[type(net).__module__])
        _hear_inputs(net.conv1d, net.conv_kernel_size - 1)
    return Tape(layers)


def _hear_rule(module: Any) -> None:
    original = getattr(getattr(module, RULE), "_original", getattr(module, RULE))

    def heard(*args: Any, **more: Any) -> tuple[Array, Array]:
        if _tape is not None:
            _tape.rules.append(Rule(original, args[:5], args[5:7], args[7], more))
        answer: tuple[Array, Array] = original(*args, **more)
        return answer

    heard._original = original  # type: ignore[attr-defined]
    setattr(module, RULE, heard)


def _hear_inputs(conv: nn.Module, keep: int) -> None:
    kind = type(conv)
    if hasattr(kind, "_unheard"):
        return

    def heard(self: nn.Module, x: mx.array) -> Any:
        if _tape is not None:
            _tape.inputs.append(Inputs(x, keep))
        return kind.__call__(self, x)

    names = {"__call__": heard, "_unheard": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    conv.__class__ = type(kind.__name__, (kind,), names)
