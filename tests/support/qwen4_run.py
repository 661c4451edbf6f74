"""Driving qwen4_exp in tests: feed conversations, see what indexed layers selected, compute linears by row tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from numpy.typing import NDArray
from onecopy.runtime.models.qwen4_exp import Conversation, Model, Round
from onecopy.runtime.models.qwen4_exp.indexer import Indexer, Selection

F32 = NDArray[np.float32]


def fresh(model: Model) -> Conversation:
    return Conversation(model.config, model.states(), model.kinds)


def feed(model: Model, conversation: Conversation, ids: Sequence[int]) -> F32:
    """Appends `ids` in one forward -> their logits [W, vocab]."""
    return feed_together(model, [conversation], [ids])[0]


def feed_together(model: Model, conversations: Sequence[Conversation], ids: Sequence[Sequence[int]]) -> F32:
    """One forward of equally wide rows of several conversations -> [B, W, vocab]."""
    round_ = Round(conversations)
    logits = np.array(model([list(map(int, row)) for row in ids], round_.layers), np.float32)
    round_.commit([len(row) for row in ids])
    return logits


def in_steps(model: Model, conversation: Conversation, ids: Sequence[int], widths: Sequence[int]) -> F32:
    """Appends `ids` in forwards of the given widths -> all logits."""
    cuts = np.cumsum([0, *widths])
    assert cuts[-1] == len(ids)
    return np.concatenate([feed(model, conversation, ids[a:b]) for a, b in pairwise(cuts)])


class Selections:
    """Every selection of a model's indexed layers while patched in; `mask(layer, size)` is bool [size, size]."""

    def __init__(self, model: Model, patch: pytest.MonkeyPatch) -> None:
        self.ratio = model.config.ratio
        self.seen: dict[int, list[Selection]] = {}
        layer_of = {id(layer.self_attn.indexer): i for i, layer in enumerate(model.layers) if "self_attn" in layer}
        select: Callable[..., Selection] = Indexer.select

        def watched(indexer: Indexer, *args: Any) -> Selection:
            selection = select(indexer, *args)
            self.seen.setdefault(layer_of[id(indexer)], []).append(selection)
            return selection

        patch.setattr(Indexer, "select", watched)

    def mask(self, layer: int, size: int) -> NDArray[np.bool_]:
        mask = np.zeros((size, size), bool)
        for selection in self.seen[layer]:
            for i in range(len(selection.counts)):
                self._mark(mask, selection, i)
        return mask

    def _mark(self, mask: NDArray[np.bool_], selection: Selection, i: int) -> None:
        t, r = selection.start + i, self.ratio
        mask[t, 0 if selection.blocks is None else (t + 1) // r * r : t + 1] = True
        for block in [] if selection.blocks is None else np.array(selection.blocks[i]).tolist():
            mask[t, block * r : (block + 1) * r] = True


def row_tiled_linears(patch: pytest.MonkeyPatch) -> None:
    """Every linear layer in tiles of eight rows, as a server computes them so that a row's bits are its own."""

    def tiled(self: nn.Linear, x: mx.array) -> mx.array:
        weight = self["weight"].T
        rows = x.reshape(-1, x.shape[-1])
        rows = mx.pad(rows, [(0, -rows.shape[0] % 8), (0, 0)]).reshape(-1, 8, x.shape[-1])
        out = rows @ mx.broadcast_to(weight[None], (rows.shape[0], *weight.shape))
        flat = out.reshape(-1, weight.shape[1])[: x.size // x.shape[-1]]
        return flat.reshape(*x.shape[:-1], -1) + self.get("bias", 0.0)

    patch.setattr(nn.Linear, "__call__", tiled)
