"""Linear layers whose rows do not influence each other, and the head that computes only the rows wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from numpy.typing import NDArray
from onecopy.runtime.blas.gemm import ready

from .arrange import PLAIN, Cut, Way
from .exponential import seen

Array = Any
Host = NDArray[Any]


class RoundShape:
    """What the head of a model needs to know of the round in hand.

    wanted: the rows whose logits are wanted, None = all. taken: the head has chosen them; set by a `RowHead`.
    flat: every block takes `[rows, width]`, so tokens may come without an axis of one.
    """

    __slots__ = ("flat", "taken", "wanted")

    def __init__(self) -> None:
        self.flat = self.taken = False
        self.wanted: Array | None = None


def kept(weight: Array, how: Way, laid: Any) -> Array:
    """The weights `[m, k]` to keep beside what a way made of them: a view of that, where it is another copy."""
    return laid.whole.T if isinstance(how, Cut) else weight


def host_rows(how: Way, x: Host, weight: Array, laid: Any) -> Host:
    """`how.product` of rows that NumPy has, as a new array: by a direct call where there is one."""
    y = _called(how, x, weight, laid) if ready() else None
    if y is None:
        made = how.product(mx.array(x), weight, laid)
        mx.eval(made)
        y = seen(made)
    return y


def _called(how: Way, x: Host, weight: Array, laid: Any) -> Host | None:
    if isinstance(how, Cut):
        return how.rows(x, laid)
    w = seen(weight)
    return how.rows(x, w) if w.flags.c_contiguous else None


@dataclass(frozen=True, slots=True)
class Held:
    """A linear's arrays beside its module, which looks each of its own up in a dictionary.

    laid: the weights as their way wants them.
    """

    weight: Array
    laid: Any
    bias: Array | None


class RowLinear(nn.Module):  # type: ignore[misc]
    """`nn.Linear` over `[rows, 1, k]` (or any leading shape) with an exact arrangement. The weights are shared."""

    def __init__(self, weight: Array, bias: Array | None, how: Way) -> None:
        super().__init__()
        laid = how.hold(weight)
        weight = self.weight = kept(weight, how, laid)
        if bias is not None:
            self.bias = bias
        self._how = how
        self._held = Held(weight, laid, bias)

    @property
    def how(self) -> Way:
        return self._how

    def __call__(self, x: Array) -> Array:
        *lead, width = x.shape
        return self.flat(x.reshape(-1, width)).reshape(*lead, -1)

    def flat(self, x: Array) -> Array:
        """`x [rows, k]` to `[rows, m]`."""
        held = self._held
        y = self._how.product(x, held.weight, held.laid)
        return y if held.bias is None else y + held.bias

    def rows(self, x: Host) -> Host:
        """`flat` for few rows that NumPy has."""
        y = host_rows(self._how, x, self._held.weight, self._held.laid)
        if self._held.bias is not None:
            y += seen(self._held.bias)
        return y


class FusedLinear(nn.Module):  # type: ignore[misc]
    """Several linears of one input as one product; `part(i)` gives modules that stand in for the originals.

    The first part called with an input computes all parts, the others take their slice of that result.
    """

    def __init__(self, layers: list[nn.Linear], how: Way) -> None:
        super().__init__()
        bias = mx.concatenate([x.bias for x in layers]) if all("bias" in x for x in layers) else None
        self.joined = RowLinear(mx.concatenate([x.weight for x in layers]), bias, how)
        mx.eval(self.joined.parameters())
        ends = [0]
        for layer in layers:
            ends.append(ends[-1] + layer.weight.shape[0])
        self._ends = ends
        self._seen: Array | None = None
        self._out: Array | None = None

    def take(self, x: Array, part: int) -> Array:
        if self._seen is not x:
            self._seen, self._out = x, self.joined(x)
        out = self._out
        assert out is not None
        if part == len(self._ends) - 2:
            self._seen = self._out = None
        return out[..., self._ends[part] : self._ends[part + 1]]


class FusedPart(nn.Module):  # type: ignore[misc]
    """Output columns `part` of a `FusedLinear`."""

    def __init__(self, fused: FusedLinear, part: int) -> None:
        super().__init__()
        self._fused = [fused]  # a list hides the shared module from parameter traversal
        self._part = part

    @property
    def whole(self) -> RowLinear:
        """The product of which this is a part."""
        return self._fused[0].joined

    def __call__(self, x: Array) -> Array:
        return self._fused[0].take(x, self._part)


class RowHead(nn.Module):  # type: ignore[misc]
    """The output projection over the wanted rows only: `[rows, 1, k]` in, `[1, wanted, vocab]` out."""

    def __init__(self, weight: Array, bias: Array | None, shape: RoundShape, how: Way) -> None:
        super().__init__()
        self._held = how.hold(weight)
        self.weight = kept(weight, how, self._held)
        if bias is not None:
            self.bias = bias
        self._shape = shape
        self._how = how

    def __call__(self, x: Array) -> Array:
        flat = x.reshape(-1, x.shape[-1])
        if self._shape.wanted is not None:
            flat = flat[self._shape.wanted]
            self._shape.taken = True
        y = self._how.product(flat, self.weight, self._held)
        if "bias" in self:
            y = y + self.bias
        return y[None]


class TiedEmbedding(nn.Module):  # type: ignore[misc]
    """An embedding whose `as_linear` is a `RowHead`."""

    def __init__(self, weight: Array, shape: RoundShape, how: Way = PLAIN) -> None:
        super().__init__()
        self._head = RowHead(weight, None, shape, how)
        self.weight = self._head.weight

    def __call__(self, ids: Array) -> Array:
        return self.weight[ids]

    def as_linear(self, x: Array) -> Array:
        return self._head(x)
