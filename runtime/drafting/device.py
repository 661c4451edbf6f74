"""What an engine needs of a drafter that runs on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from onecopy.runtime.decode.want import Want
from onecopy.runtime.rows.layout import LayerLayout, RowTensor
from onecopy.runtime.rows.plan import Strip

from .rows import HeadRows

Array = Any


@dataclass(frozen=True, slots=True)
class After:
    """A strip whose round is picked and verified: of its rows the first `kept` stay.

    features: what the model showed at its rows, `[rows, …]`. following: the token behind each row; past the kept ones
    they mean nothing. want: how the token after the newest is picked, None where nothing is to be proposed.
    """

    strip: Strip
    features: Array
    following: tuple[int, ...]
    kept: int
    want: Want | None = None

    @property
    def end(self) -> int:
        """The position of the newest token, which is no row yet."""
        return self.strip.position + self.kept

    @property
    def asked(self) -> int:
        """How many tokens are to be proposed."""
        return 0 if self.want is None else self.strip.draft

    def wanted(self, depth: int) -> Want:
        """How the token `depth` places behind the newest is picked, as far as is known: with the same noise."""
        assert self.want is not None
        plain = replace(self.want.sampling, logprobs=None)
        return Want(plain, self.end + 1 + depth)


class DeviceDrafter(Protocol):
    """Proposes tokens at the end of rounds. Its layers are kept for every row of every conversation.

    name: what users call its kind. mark: what its rows depend on beside the model, "" for nothing. deepest: tokens it
    proposes at most. layers, dtypes: what it keeps per row.
    """

    @property
    def name(self) -> str: ...

    @property
    def mark(self) -> str: ...

    @property
    def deepest(self) -> int: ...

    @property
    def layers(self) -> tuple[LayerLayout, ...]: ...

    @property
    def dtypes(self) -> Mapping[RowTensor, Any]: ...

    def features(self) -> Array:
        """What the model's last call showed, `[batch, length, …]`. Lazy; to be taken once a call."""

    def after(self, done: Sequence[After], rows: HeadRows) -> list[tuple[int, ...]]:
        """Writes its rows for all strips and proposes, for each, at most as many tokens as it asked for.

        Leaves only evaluated buffers behind.
        """
