"""The driver of a block drafter: its rows follow every round, and one forward of a block proposes all its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from onecopy.runtime.decode.sampling import pick
from onecopy.runtime.numerics.rope import RopeTable, TableRope, inverse_frequencies
from onecopy.runtime.rows.layout import LayerLayout, RowTensor

from .device import After
from .dflash import BlockConfig, BlockModel
from .rows import HeadRows, onward, room
from .taps import Taps
from .target import Target

Array = Any


class BlockDrafter:
    """Drafts with a small model beside the target, whose embedding and head it shares."""

    name = "block"

    def __init__(self, model: BlockModel, config: BlockConfig, target: Target, context: int, mark: str) -> None:
        """context: positions served at most. mark: a digest of the weights."""
        self.mark = mark
        self._model, self._c, self._target = model, config, target
        self._taps = Taps([target.layers[i] for i in config.targets])
        self._rope = _table(config, context + config.block)
        dtype = model.norm.weight.dtype
        kept = RowTensor("kv", 2 * config.kv_heads, config.head_dim, dtype.size)
        self.layers = tuple(LayerLayout("window" if w else "attention", (kept,), window=w) for w in config.windows)
        self.dtypes: Mapping[RowTensor, Any] = {kept: dtype}

    @property
    def deepest(self) -> int:
        return self._c.block - 1

    def features(self) -> Array:
        return mx.concatenate(self._taps.take(), axis=-1)

    def after(self, done: Sequence[After], rows: HeadRows) -> list[tuple[int, ...]]:
        for group in _alike(done, lambda one: len(one.strip.tokens)):
            features = mx.stack([done[i].features for i in group]).astype(self._model.norm.weight.dtype)
            with rows.over([done[i].strip for i in group]) as caches:
                self._model.keep(features, self._rope, caches)
        rows.settle(one.strip for one in done)
        out: list[tuple[int, ...]] = [()] * len(done)
        for group in _alike(done, _width):
            if _width(done[group[0]]) > 1:
                for i, guess in zip(group, self._propose([done[i] for i in group], rows), strict=True):
                    out[i] = tuple(guess)
        return out

    def _propose(self, asked: Sequence[After], rows: HeadRows) -> list[list[int]]:
        """Guesses for conversations that ask for blocks of one width. The block's rows lie past the frontier."""
        masks = (self._c.mask,) * (_width(asked[0]) - 1)
        strips = [onward(one.strip, one.end, (one.following[one.kept - 1], *masks)) for one in asked]
        embedded = self._target.embed([s.tokens for s in strips]) * self._c.embedding_scale
        with rows.over(strips, together=not self._c.causal[0]) as caches:
            hidden = self._model(embedded.astype(self._model.norm.weight.dtype), self._rope, caches)
        rows.settle(strips, hidden)
        return self._pick(asked, strips, hidden)

    def _pick(self, asked: Sequence[After], strips: Sequence[Any], hidden: Array) -> list[list[int]]:
        """What stands at each mask is a guess for that very place."""
        guesses: list[list[int]] = [[] for _ in asked]
        before = [s.tokens[0] for s in strips]
        for place in range(1, hidden.shape[1]):
            logits = self._logits(hidden[:, place])
            if "candidate_selector" in self._model:
                logits = self._model.candidate_selector(hidden[:, place], logits, before)
            picks = pick(logits, [one.wanted(place - 1) for one in asked]).resolve()
            before = [p.token for p in picks]
            for guess, token in zip(guesses, before, strict=True):
                guess.append(token)
        return guesses

    def _logits(self, hidden: Array) -> Array:
        logits = self._target.logits(hidden).astype(mx.float32) * self._c.scale
        return mx.tanh(logits / self._c.cap) * self._c.cap if self._c.cap else logits


def _width(one: After) -> int:
    """Rows of the block that is asked for: the newest token and masks, as far as the leaf reaches."""
    return min(1 + one.asked, room(one.strip, one.end)) if one.asked else 0


def _alike(done: Sequence[After], key: Any) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, one in enumerate(done):
        groups.setdefault(key(one), []).append(i)
    return list(groups.values())


def _table(c: BlockConfig, positions: int) -> nn.Module:
    """Rotary positions from a table, one position per row."""
    rope = nn.RoPE(c.head_dim, traditional=False, base=c.theta)
    found = inverse_frequencies(rope)
    assert found is not None
    inverse, scale, dims, traditional = found
    return TableRope(dims, traditional, RopeTable(inverse, scale, positions), rope)
