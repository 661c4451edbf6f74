"""The plan of a round: which conversations decode and which prompt fills, decided from plain values alone.

A round is one forward of all replies (one row each, plus drafts), or one chunk of one prompt, or both side by side.

=============  =============  ==========================================================================
replies wait   prompts wait   the round carries
=============  =============  ==========================================================================
no             no             nothing
yes            no             the replies
no             yes            one chunk
yes            yes            a chunk when replies have had their share of time, the replies while owed any
=============  =============  ==========================================================================

Background conversations take part only in rounds that no normal one wants. Nothing here changes a token: plans move
work in time, and chunk boundaries come from absolute positions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from onecopy.runtime.turn import Priority

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a round.

    decode_share: part of the time replies get while prompts fill, between 0 and 1. chunk: rows of a prefill chunk, a
    multiple of 256. batch: conversations decoding in one forward. width: rows of one of them. rows: decode rows of
    one forward. passes: how often a prompt is passed over before it goes next.
    """

    decode_share: float = 0.25
    chunk: int = 2 * BLOCK
    batch: int = 16
    width: int = 8
    rows: int = 64
    passes: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.decode_share < 1:
            raise ValueError(f"decode_share must lie between 0 and 1, not {self.decode_share}")
        if self.chunk <= 0 or self.chunk % BLOCK:
            raise ValueError(f"chunk must be a multiple of {BLOCK}, not {self.chunk}")
        if min(self.batch, self.width, self.passes) < 1 or self.rows < self.batch:
            raise ValueError("batch, width and passes must be positive and rows at least batch")


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimated milliseconds of one forward of all replies and of one whole chunk."""

    decode_ms: float
    chunk_ms: float


@dataclass(frozen=True, slots=True)
class View:
    """A running conversation as the planner sees it.

    position: its next absolute position. left: prompt rows still to compute, 0 when it decodes. order: when it
    started, lower is earlier. passed: rounds in a row that passed it over. rounds: how many it has decoded.
    draft: tokens it proposes.
    """

    id: int
    position: int
    left: int
    order: int
    priority: Priority = "normal"
    passed: int = 0
    rounds: int = 0
    draft: int = 0


@dataclass(frozen=True, slots=True)
class Decode:
    """width rows of conversation `id`: the committed token and width - 1 drafts."""

    id: int
    width: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt rows [start, end) of conversation `id`. last: the prompt ends here and its first token can be picked."""

    id: int
    start: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Round:
    """One round. passed: who waited for the same thing and saw another served.

    owed: milliseconds replies have coming (negative: had too many), to hand to the next plan.
    """

    decode: tuple[Decode, ...] = ()
    chunk: Chunk | None = None
    passed: frozenset[int] = frozenset()
    owed: float = 0.0

    @property
    def idle(self) -> bool:
        return not self.decode and self.chunk is None

    @property
    def served(self) -> frozenset[int]:
        chunk = () if self.chunk is None else (self.chunk.id,)
        return frozenset((*(row.id for row in self.decode), *chunk))


def plan(views: Sequence[View], costs: Costs, limits: Limits, owed: float = 0.0) -> Round:
    """The next round for `views`: a pure function of its arguments, whatever order the views come in."""
    heard = [view for view in views if view.priority == "normal"] or views
    replies = [view for view in heard if not view.left]
    prompts = [view for view in heard if view.left]
    return _MAKE[bool(replies), bool(prompts)](_Scene(replies, prompts, costs, limits, owed))


def chunk_end(position: int, left: int, chunk: int) -> int:
    """Where the chunk that starts at `position` ends: the next multiple of `chunk`, or the end of the prompt."""
    return min((position // chunk + 1) * chunk, position + left)


class Passable(Protocol):
    """Who can be passed over: a view, or the turn behind it."""

    @property
    def id(self) -> int: ...

    @property
    def passed(self) -> int: ...


def passed_after(who: Passable, done: Round) -> int:
    """How often somebody was passed over in a row, once round `done` has run."""
    return 0 if who.id in done.served else who.passed + (who.id in done.passed)


class _Scene(NamedTuple):
    replies: list[View]
    prompts: list[View]
    costs: Costs
    limits: Limits
    owed: float


def _nothing(scene: _Scene) -> Round:
    return Round()


def _only_replies(scene: _Scene) -> Round:
    decode = _decode(scene)
    return Round(decode=decode, passed=_left_out(scene, decode))


def _only_prompts(scene: _Scene) -> Round:
    chunk = _chunk(scene)
    return Round(chunk=chunk, passed=_behind(scene, chunk))


def _shared(scene: _Scene) -> Round:
    """The time of a chunk earns replies their share; the time they decode pays it back."""
    chunk = None if scene.owed > 0 else _chunk(scene)
    owed = scene.owed + _earned(chunk, scene)
    decode = _decode(scene) if owed > 0 else ()
    spent = scene.costs.decode_ms if decode else 0.0
    return Round(decode, chunk, _left_out(scene, decode) | _behind(scene, chunk), owed - spent)


_MAKE: dict[tuple[bool, bool], Callable[[_Scene], Round]] = {
    (False, False): _nothing,
    (True, False): _only_replies,
    (False, True): _only_prompts,
    (True, True): _shared,
}


def _chunk(scene: _Scene) -> Chunk:
    view = _next_prompt(scene)
    end = chunk_end(view.position, view.left, scene.limits.chunk)
    return Chunk(view.id, view.position, end, last=end == view.position + view.left)


def _next_prompt(scene: _Scene) -> View:
    """Fewest rows left first, but the oldest of those passed over too often goes before that.

    So the oldest prompt gets every (passes + 1)th chunk at least, whatever arrives, and by induction everyone ends.
    """
    tired = [view for view in scene.prompts if view.passed >= scene.limits.passes]
    if tired:
        return min(tired, key=lambda view: (view.order, view.id))
    return min(scene.prompts, key=lambda view: (view.left, view.order, view.id))


def _behind(scene: _Scene, chunk: Chunk | None) -> frozenset[int]:
    """The prompts that wait behind this round's chunk."""
    return frozenset(view.id for view in scene.prompts if chunk and view.id != chunk.id)


def _earned(chunk: Chunk | None, scene: _Scene) -> float:
    """Milliseconds of decode that a chunk entitles the replies to."""
    if chunk is None:
        return 0.0
    share = scene.limits.decode_share
    return scene.costs.chunk_ms * (chunk.end - chunk.start) / scene.limits.chunk * share / (1 - share)


def _decode(scene: _Scene) -> tuple[Decode, ...]:
    """One row for each of the replies that waited longest, then drafts in the same order while rows are left."""
    limits = scene.limits
    taken = sorted(scene.replies, key=_patience)[: limits.batch]
    spare = limits.rows - len(taken)
    decode = []
    for view in taken:
        drafts = min(view.draft, limits.width - 1, spare)
        spare -= drafts
        decode.append(Decode(view.id, 1 + drafts))
    return tuple(decode)


def _patience(view: View) -> tuple[int, ...]:
    return -view.passed, view.rounds, view.order, view.id


def _left_out(scene: _Scene, decode: tuple[Decode, ...]) -> frozenset[int]:
    """The replies that did not fit in this round's batch."""
    taken = {row.id for row in decode}
    return frozenset(view.id for view in scene.replies if taken and view.id not in taken)
