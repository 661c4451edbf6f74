"""The engine: a prepared model, its pool of rows, and rounds over strips of conversations. Device thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from .compiled import BUCKET, CompiledRounds, why_not
from .compiled_trial import tried
from .decode.drafts import verify
from .decode.sampling import pick
from .decode.want import Pick, Want
from .drafting.device import After, DeviceDrafter
from .drafting.rows import HeadRows
from .fidelity import Fidelity, check, sample
from .forward import Forward
from .models.layouts import ModelRows, model_rows
from .models.loaded import Loaded
from .models.quantizable import quantized_rows
from .numerics.blocks import install_blocks, install_swiglu
from .numerics.exponential import on_host
from .numerics.prepare import linear_shapes, prepare
from .numerics.probe import Numerics, plain, probe
from .rows.buffers import Pool
from .rows.caches import install_attention
from .rows.fused import fused_rows
from .rows.layout import Layout
from .rows.ops import SaveAnchor
from .rows.plan import Strip
from .rows.states import State
from .trial import Trial

Array = Any
Exactness = tuple[Literal["exact", "not exact"], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round found, for each strip in order: the picks of its wanted rows, and what the device proposes to follow
    the newest token that stays. compiled: a kept graph ran it."""

    picks: tuple[tuple[Pick, ...], ...]
    drafts: tuple[tuple[int, ...], ...] = ()
    compiled: bool = False


class Engine:
    """Runs rounds. `pool` is changed by the bank's orders; rounds write rows past the leaves' frontiers only."""

    def __init__(
        self, model: Any, rows: ModelRows, numerics: Numerics, context: int, drafter: DeviceDrafter | None = None
    ) -> None:
        self.model = model
        self.drafter = drafter
        more = () if drafter is None else drafter.layers
        dtypes = rows.dtypes | ({} if drafter is None else dict(drafter.dtypes))
        layout = Layout((*rows.layout.layers, *more))
        self.pool = Pool(layout, dtypes.__getitem__, (*rows.states, *((),) * len(more)))
        self._numerics = numerics
        shape = prepare(model, numerics.choose, context).shape
        tap = None if drafter is None else drafter.features
        self._forward = Forward(model, rows.layout, rows.tree, rows.states, shape, tap)
        self._rows = HeadRows(self.pool, numerics.tile, more, len(rows.layout.layers))
        self._compiled: CompiledRounds | None = None
        self._before: dict[int, list[State | None]] = {}
        self._reasons = numerics.reasons

    @classmethod
    def open(
        cls,
        loaded: Loaded,
        *,
        context: int,
        stopwatch: Callable[[], float],
        fast: bool = False,
        drafter: DeviceDrafter | None = None,
        kv_bits: int | None = None,
    ) -> Engine:
        """Prepares a loaded model in place and answers with its engine. Blocks for about a second.

        context: positions served at most. stopwatch: seconds of any monotonic clock; `opened_s` says how long it took.
        fast: skip the search for exact arithmetic. drafter: proposes at the end of rounds; made from the same model.
        kv_bits: bits of a value of quantized rows, 8 or 4; `fidelity` says what they do. None keeps rows as they are.
        ModelLoadError when the model cannot run on kept rows, or would answer otherwise than by itself, or when its
        rows cannot be quantized or its output on quantized rows no longer resembles its own.
        """
        begun = stopwatch()
        install_attention()
        install_swiglu()
        install_blocks()
        rows = model_rows(loaded.model, loaded.id)
        body, heads = linear_shapes(loaded.model)
        fused = fused_rows(rows.attention, rows.attended, any(layer.window for layer in rows.layout.layers))
        numerics = plain("chosen by --fast", fused) if fast else probe(body, heads, rows.attention, fused)
        kept = rows if kv_bits is None else quantized_rows(rows, kv_bits, loaded.id)
        engine = cls(loaded.model, kept, numerics, context, drafter)
        own = engine.pool if kv_bits is None else Pool(rows.layout, rows.dtype, rows.states)
        found = Trial(engine._forward, own, numerics.tile).run(loaded.id, rows.logits)
        if kv_bits is not None:
            found += engine._quantized(loaded, own, sample(loaded, rows.logits.shape[-1], context))
        engine._compile(rows)
        engine._reasons = (*numerics.reasons, *rows.reasons, *dict.fromkeys(found))
        engine.opened_s = stopwatch() - begun
        return engine

    def _quantized(self, loaded: Loaded, own: Pool, tokens: Sequence[int]) -> tuple[str, ...]:
        """Measures what quantized rows do, and answers with what is not exact on them. own: a pool as it is."""
        tile = self._numerics.tile
        self.fidelity = check(loaded.id, self._forward, own, self.pool, tile, tokens)
        return Trial(self._forward, self.pool, tile).exactness(loaded.id)

    def _compile(self, rows: ModelRows) -> None:
        """Compiles rounds from here on where a trial shows that it changes nothing. rows: the model's own."""
        self.eager = why_not(rows.layout, on_host())
        if self.eager is None:
            tile = self._numerics.tile
            made = CompiledRounds(self._forward, self.pool, tile, len(rows.layout.layers))
            self.eager = tried(made, self._forward, self.pool, tile, rows)
            if self.eager is None:
                self._compiled, self.fixed_rows = made, BUCKET

    opened_s: float = 0.0

    fidelity: Fidelity | None = None
    """What quantized rows do to the model's output; None where rows are as the model computes them."""

    fixed_rows: int = 0
    """Rows in multiples of which compiled rounds want the leaves that they write; 0 where every round runs eagerly."""

    eager: str | None = "not opened"
    """Why rounds are not compiled; None where they are, in leaves of whole `fixed_rows`."""

    @property
    def layout(self) -> Layout:
        return self.pool.layout

    @property
    def exactness(self) -> Exactness:
        """Whether a row's bits are independent of what runs beside it, and what is not."""
        return ("not exact" if self._reasons else "exact"), self._reasons

    @property
    def verdict(self) -> str:
        """`exactness` in one line: "exact", or "not exact: " and the reasons."""
        return f"not exact: {'; '.join(self._reasons)}" if self._reasons else "exact"

    @property
    def numerics_mode(self) -> str:
        """Names the arithmetic that rows are computed with: part of what makes kept rows usable."""
        mode = self._numerics.mode
        return mode if self.fidelity is None else f"{mode}; rows quantized to {self.fidelity.bits} bits, affine"

    def run(self, strips: Sequence[Strip], wants: Sequence[Want] = ()) -> RoundResult:
        """One round: evaluates every strip's tokens, writes their rows, picks at the wanted rows.

        wants: one per wanted row, strips in order and rows in order. The leaves' buffers are written in place and
        evaluated. AssertionError when rows do not fit a leaf: the bank reserved too few.
        """
        if sum(s.wanted for s in strips) != len(wants):
            raise AssertionError("one want for each wanted row")
        logits = self.forward(strips)
        if not wants:
            self._settle_round(strips)
            return self._drafted(RoundResult(((),) * len(strips)), strips, wants)
        picked = pick(logits.astype(mx.float32), wants)
        self._settle_round(strips, *picked.arrays)
        picks = iter(picked.resolve())
        found = tuple(tuple(next(picks) for _ in range(s.wanted)) for s in strips)
        compiled = self._compiled is not None and self._compiled.takes(strips)
        return self._drafted(RoundResult(found, (), compiled), strips, wants)

    def _drafted(self, found: RoundResult, strips: Sequence[Strip], wants: Sequence[Want]) -> RoundResult:
        """The round with what the device's drafter proposes, which follows every row of every strip."""
        if self.drafter is None:
            return found
        asked, done = iter(wants), []
        for strip, features, picks in zip(strips, self._forward.features(), found.picks, strict=True):
            own = [next(asked) for _ in picks]
            done.append(_after(strip, features, [p.token for p in picks], own[-1] if own and strip.draft else None))
        return replace(found, drafts=tuple(self.drafter.after(done, self._rows)))

    def accept(self, kept: Sequence[tuple[Strip, int]]) -> None:
        """Keeps of each strip of the last round its first so many tokens, at least one.

        Rows past them are rewritten by the next round. A recurrent state cannot be taken back: where the model does not
        tell what it was after each row, it is computed again from the one before the round, for all such strips
        together. Strips that are not named keep all their tokens.
        """
        for strip, n in kept:
            if not 0 < n <= len(strip.tokens):
                raise AssertionError(f"{n} of {len(strip.tokens)} tokens cannot be kept")
        short = [(s, n) for s, n in kept if n < len(s.tokens)]
        if not short or not self._forward.recurrent:
            return
        told = {s.chain.leaf for s, n in short if self._forward.take_back(s, n, self.pool)}
        self.settle([s for s, _ in short if s.chain.leaf in told])
        again = [Strip(s.chain, s.position, s.tokens[:n]) for s, n in short if s.chain.leaf not in told]
        if not again:
            return
        for strip in again:
            for layer, state in zip(self._leaf(strip).layers, self._before[strip.chain.leaf], strict=True):
                layer.state = state
        self._forward(again, self.pool, self._numerics.tile)
        self._forward.features()
        self.settle(again)

    def forward(self, strips: Sequence[Strip]) -> Array:
        """Lazy logits `[wanted rows, vocab]` of the strips' wanted rows in order; evaluate with `settle`."""
        if self._compiled is not None and self._compiled.takes(strips):
            return self._compiled(strips[0])
        if self._forward.recurrent:
            verified = [s for s in strips if s.wanted > 1]
            self._before = {s.chain.leaf: [layer.state for layer in self._leaf(s).layers] for s in verified}
        return self._forward(strips, self.pool, self._numerics.tile)

    def _settle_round(self, strips: Sequence[Strip], *outputs: Array) -> None:
        """Settles, and keeps the states that strips ask for."""
        self.settle(strips, *outputs)
        self.pool.apply(tuple(SaveAnchor(s.chain.leaf, s.keep) for s in strips if s.keep is not None))

    def settle(self, strips: Sequence[Strip], *outputs: Array) -> None:
        """Evaluates outputs and every buffer the strips wrote, so that no pending graph keeps a buffer shared."""
        mx.eval(*outputs, *(a for s in strips for a in self._leaf(s).flat()))

    def _leaf(self, strip: Strip) -> Any:
        return self.pool.segments[strip.chain.leaf]


def _after(strip: Strip, features: Array, picks: Sequence[int], want: Want | None) -> After:
    """A strip of one wanted row ends a prompt or is a token by itself; one of several is a token and its drafts."""
    unwanted = len(strip.tokens) - len(picks)
    inside = (*strip.tokens[1:], strip.then or 0)[:unwanted]
    kept = unwanted + verify(strip.tokens[unwanted + 1 :], picks).kept + 1 if picks else unwanted
    return After(strip, features, (*inside, *picks), kept, want)
