"""What the doors need from a running system, as one protocol: no door knows an actor.

`Service` is implemented by the real system and by a scripted one in tests. Methods that ask actors are async and
raise errors of `onecopy.runtime.errors`; a stopped system raises `ActorStopped`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from onecopy.runtime.seams.clock import Clock
    from onecopy.runtime.text.chat import ChatFormat
    from onecopy.runtime.text.tokenizer import Tokenizer
    from onecopy.runtime.turn import Piece, TurnSpec

SessionState = Literal["running", "queued", "idle", "parked"]
HealthStatus = Literal["starting", "ok", "degraded", "stopping", "failed"]


@dataclass(frozen=True, slots=True)
class Options:
    """How a system is opened. Sizes in bytes, times in seconds; None means "decide from the machine or the model".

    model: a bundled name, a directory or a GGUF file. name: the id clients see. context: tokens at most in one
    conversation. parallel: conversations in one round. store: where rows are kept on disk; "" keeps none.
    kv_bits: bits of a value of quantized rows, 8 or 4; None keeps rows as the model computes them.
    fast: skip the search for exact arithmetic; then batches, forks, restores and drafts may change a token.
    decode_share: share of time replies get while prompts fill. draft: whether replies may be drafted at all. drafter: a
    directory with a block drafter for the model. drain: how long a stop may take to flush.
    """

    model: str = "smollm2"
    name: str | None = None
    memory: int | None = None
    context: int | None = None
    parallel: int = 8
    dtype: str | None = None
    kv_bits: int | None = None
    fast: bool = False
    store: str | None = None
    store_quota: int | None = None
    decode_share: float = 0.25
    draft: bool = True
    drafter: str | None = None
    drain: float = 10.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model. created: unix seconds. context: tokens. exactness: the self-check's verdict in a word.

    tokenizer and chat are None for a model without text. features: free facts for `/v1/models` and `/health`.
    """

    id: str
    created: int
    context: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    chat: ChatFormat | None
    exactness: str = "unknown"
    features: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One conversation at this moment. tokens: rows it has. held: bytes that only it keeps. last_used: unix seconds.

    salt: the key it belongs to (never shown). parent: the session it was forked from.
    """

    id: str
    state: SessionState
    tokens: int
    held: int
    last_used: float
    pinned: bool = False
    parent: str | None = None
    hint: str | None = None
    salt: bytes = b""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Health:
    """status "ok" and "degraded" serve requests; the others answer 503. reasons: sentences, empty when ok."""

    status: HealthStatus
    reasons: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


class Service(Protocol):
    """The running system as the doors see it."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def clock(self) -> Clock: ...

    def turn(self, spec: TurnSpec) -> AbstractAsyncContextManager[AsyncIterator[Piece]]:
        """Run one turn. Leaving the block cancels it within one round.

        A refusal raises from entering or from the first iteration. The pieces end in `Finished`, or raise.
        """

    async def sessions(self) -> Sequence[SessionInfo]: ...

    async def session(self, id: str) -> SessionInfo:
        """One session, or `NotFound`."""

    async def pin(self, id: str, on: bool = True) -> SessionInfo:
        """Keep (or stop keeping) a session in memory."""

    async def park(self, id: str) -> SessionInfo:
        """Write a session's rows to disk and free their memory. A running session is a `Conflict`."""

    async def fork(self, id: str, at: int | None = None) -> SessionInfo:
        """A new session that shares the first `at` rows (all of them by default)."""

    async def export(self, id: str) -> bytes:
        """The session as one safetensors image that `import_` of the same model reads."""

    async def import_(self, data: bytes, salt: bytes = b"") -> SessionInfo: ...

    async def drop(self, id: str) -> None:
        """Forget a session: its turn is cancelled, rows that only it holds are freed, in memory and on disk."""

    async def cancel(self, id: str) -> bool:
        """End a session's running turn. False when none ran."""

    async def health(self) -> Health: ...

    async def metrics(self) -> Mapping[str, Any]:
        """Numbers, nested by owner. A name that ends in `_total` is a counter, any other number a gauge."""

    def seed64(self) -> int:
        """A fresh 64-bit seed."""

    def new_id(self, prefix: str) -> str:
        """`prefix` followed by fresh hex digits."""
