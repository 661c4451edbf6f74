"""What is done to logits before they are sampled: logit bias, then penalties, then the grammar's mask.

Each step touches only the rows that ask for it and runs once for all of them. Every change of one logit is its own
additions, products and quotients, so no row's bits depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.turn import Sampling

from .counts import Seen
from .want import Want, unpacked

Floats = NDArray[np.float32]
Spot = tuple[NDArray[np.int64], tuple[Floats, ...]]


def edited(logits: mx.array, wants: Sequence[Want]) -> mx.array:
    """logits [R, V] f32 after bias, penalties and masks; `logits` itself when no row asks for any."""
    return _masked(_penalised(_biased(logits, wants), wants), wants)


def _biased(logits: mx.array, wants: Sequence[Want]) -> mx.array:
    spots = [_spot(row, logits.shape[1], *_bias(want.sampling.logit_bias)) for row, want in enumerate(wants)]
    return _at(logits, spots, lambda old, bias: old + bias)


def _penalised(logits: mx.array, wants: Sequence[Want]) -> mx.array:
    """Presence and frequency as in the OpenAI reference (reply tokens only), repetition as in Keskar et al. 2019.

    Repetition sees prompt and reply and comes first: a positive logit is divided by it, another one multiplied.
    """
    spots = [
        _spot(row, logits.shape[1], want.counts.ids, *_factors(want.sampling, want.counts))
        for row, want in enumerate(wants)
        if want.counts is not None and want.penalised
    ]
    return _at(logits, spots, lambda old, rep, minus: mx.where(old > 0, old / rep, old * rep) - minus)


def _masked(logits: mx.array, wants: Sequence[Want]) -> mx.array:
    vocab = logits.shape[1]
    masks = [(row, unpacked(want.mask, vocab)) for row, want in enumerate(wants) if want.mask is not None]
    if not masks:
        return logits
    rows = mx.array([row for row, _ in masks])
    allowed = mx.array(np.stack([mask for _, mask in masks]))
    changed = mx.array(logits)
    changed[rows] = mx.where(allowed, logits[rows], -mx.inf)
    return changed


@lru_cache(maxsize=64)
def _bias(pairs: tuple[tuple[int, float], ...]) -> tuple[NDArray[np.int64], Floats]:
    ids = np.array([token for token, _ in pairs], np.int64)
    return ids, np.array([bias for _, bias in pairs], np.float32)


def _factors(sampling: Sampling, seen: Seen) -> tuple[Floats, Floats]:
    repetition = np.full(len(seen.ids), sampling.repetition_penalty, np.float32)
    frequency = np.float32(sampling.frequency_penalty) * seen.replies.astype(np.float32)
    presence = np.float32(sampling.presence_penalty) * (seen.replies > 0).astype(np.float32)
    return repetition, frequency + presence


def _spot(row: int, vocab: int, ids: NDArray[Any], *values: Floats) -> Spot:
    """Flat places and values of one row's changes; ids the model has no logit for are left out."""
    known = (ids >= 0) & (ids < vocab)
    return row * vocab + ids[known].astype(np.int64), tuple(value[known] for value in values)


def _at(logits: mx.array, spots: list[Spot], change: Callable[..., mx.array]) -> mx.array:
    spots = [spot for spot in spots if len(spot[0])]
    if not spots:
        return logits
    places = mx.array(np.concatenate([places for places, _ in spots]))
    values = [mx.array(np.concatenate(column)) for column in zip(*(values for _, values in spots), strict=True)]
    flat = logits.reshape(-1)
    return mx.put_along_axis(flat, places, change(flat[places], *values), axis=0).reshape(logits.shape)
