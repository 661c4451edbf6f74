"""Keyed sampling: the token at a position is a pure function of (seed, position, logits row, counts, mask).

The pick is argmax(filtered logits / temperature + Gumbel noise), which draws from the softmax (Gumbel-max trick), and
the noise depends on seed and position alone. So a token does not depend on the batch beside it, on how many drafts were
verified with it, or on what ran before. Order: logit bias, penalties, mask, temperature, top_k, top_p, min_p. Each
filter is a threshold on the scaled logits: tokens equal to the last one kept are kept too.

All of it is lazy. `pick` builds one bundle per round; evaluate `arrays` once, then `resolve`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .edits import edited
from .keys import key_of
from .logprobs import Logprobs
from .want import Pick, Want

# Tokens sorted for top_k and top_p. Their threshold lies among these in all but flat distributions; a whole sort
# costs many times the partition that finds them, and `resolve` runs it when they do not suffice.
_NEAR = 1024
# Rows start at whole vector registers, so the noise of a row is computed the same way in every batch.
_LANES = 64


class Picked:
    """The picks of one round, not evaluated yet. Belongs to the device thread."""

    __slots__ = ("_logits", "_logprobs", "_settled", "_tokens", "_wants")

    def __init__(
        self,
        logits: mx.array,
        wants: Sequence[Want],
        tokens: mx.array,
        settled: mx.array | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        self._logits, self._wants = logits, wants
        self._tokens, self._settled, self._logprobs = tokens, settled, logprobs

    @property
    def arrays(self) -> list[mx.array]:
        """Everything `resolve` reads, for one `mx.eval`."""
        extra = self._logprobs.arrays if self._logprobs else []
        return [self._tokens, *([] if self._settled is None else [self._settled]), *extra]

    def resolve(self) -> list[Pick]:
        """One pick per row, in row order. Evaluates what is not yet evaluated."""
        tokens: list[int] = _host(self._tokens)
        picks = self._logprobs.of(tokens) if self._logprobs else [Pick(token) for token in tokens]
        if self._settled is not None:
            self._resort(picks, [row for row, settled in enumerate(_host(self._settled)) if not settled])
        return picks

    def _resort(self, picks: list[Pick], rows: list[int]) -> None:
        """Pick the unsettled `rows` again, over all tokens."""
        if not rows:
            return
        wants = [self._wants[row] for row in rows]
        again = _pick(self._logits[mx.array(rows)], wants, self._logits.shape[1]).resolve()
        for row, sure in zip(rows, again, strict=True):
            picks[row] = sure


def pick(logits: mx.array, wants: Sequence[Want]) -> Picked:
    """logits [R, V] f32, one want per row. Nothing is evaluated; `logits` is kept and not changed."""
    return _pick(logits, wants, _NEAR)


def _pick(logits: mx.array, wants: Sequence[Want], near: int) -> Picked:
    if all(want.plain for want in wants):
        return Picked(logits, wants, mx.argmax(logits, axis=-1))
    tokens, settled = _by_kind(edited(logits, wants), wants, near)
    asked = any(want.sampling.logprobs is not None for want in wants)
    return Picked(logits, wants, tokens, settled, Logprobs(logits, wants, tokens) if asked else None)


def _by_kind(logits: mx.array, wants: Sequence[Want], near: int) -> tuple[mx.array, mx.array | None]:
    """Tokens [R] and, when some row was sorted, whether each row is settled [R]."""
    kinds: dict[str, list[int]] = {}
    for row, want in enumerate(wants):
        kinds.setdefault(_kind(want), []).append(row)
    done = [_HOW[kind](_rows(logits, rows), [wants[row] for row in rows], near) for kind, rows in kinds.items()]
    back = mx.array(np.argsort(np.concatenate([np.array(rows) for rows in kinds.values()])))
    tokens = mx.concatenate([tokens.astype(mx.uint32) for tokens, _ in done])[back]
    if "narrow" not in kinds:
        return tokens, None
    return tokens, mx.concatenate([settled for _, settled in done])[back]


def _kind(want: Want) -> str:
    return "greedy" if want.greedy else "narrow" if want.narrow else "open"


def _rows(logits: mx.array, rows: list[int]) -> mx.array:
    return logits if len(rows) == logits.shape[0] else logits[mx.array(rows)]


def _greedy(logits: mx.array, wants: Sequence[Want], near: int) -> tuple[mx.array, mx.array]:
    """The best token, the lowest id of several."""
    return mx.argmax(logits, axis=-1), mx.ones(len(wants), mx.bool_)


def _open(logits: mx.array, wants: Sequence[Want], near: int) -> tuple[mx.array, mx.array]:
    """All tokens take part, or those within min_p of the best: no order is needed."""
    scaled = logits / _column(wants, "temperature")
    scores = scaled + _gumbel(_uniform(wants, logits.shape[1]))[:, : logits.shape[1]]
    if any(want.sampling.min_p > 0 for want in wants):
        floor = mx.max(scaled, axis=-1, keepdims=True) + _log_min_p(wants)
        scores = mx.where(scaled >= floor, scores, -mx.inf)
    return mx.argmax(scores, axis=-1), mx.ones(len(wants), mx.bool_)


def _narrow(logits: mx.array, wants: Sequence[Want], near: int) -> tuple[mx.array, mx.array]:
    """top_k, top_p, min_p over the `near` best tokens. A row whose threshold may lie further down is not settled."""
    vocab = logits.shape[1]
    scaled = logits / _column(wants, "temperature")
    noise = _uniform(wants, vocab)
    if near >= vocab:
        floor, _ = _floor(mx.sort(scaled, axis=-1)[:, ::-1], scaled, wants)
        scores = mx.where(scaled >= floor, scaled + _gumbel(noise)[:, :vocab], -mx.inf)
        return mx.argmax(scores, axis=-1), mx.ones(len(wants), mx.bool_)
    ids = mx.argpartition(scaled, vocab - near, axis=-1)[:, vocab - near :]
    best = mx.take_along_axis(scaled, ids, axis=-1)
    floor, last = _floor(mx.sort(best, axis=-1)[:, ::-1], scaled, wants)
    scores = mx.where(best >= floor, best + _gumbel(mx.take_along_axis(noise, ids, axis=-1)), -mx.inf)
    tokens = mx.take_along_axis(ids, mx.argmax(scores, axis=-1, keepdims=True), axis=-1)
    return tokens[:, 0], (floor > last)[:, 0]


_HOW: dict[str, Callable[..., tuple[mx.array, mx.array]]] = {"greedy": _greedy, "open": _open, "narrow": _narrow}


def _floor(falling: mx.array, scaled: mx.array, wants: Sequence[Want]) -> tuple[mx.array, mx.array]:
    """The smallest scaled logit each row keeps [R, 1], and the last one that was looked at [R, 1].

    falling [R, C]: the C best scaled logits, best first. top_p is taken over what top_k left, so its whole is the
    mass of the k best, or of all tokens when top_k is off.
    """
    best, rank = falling[:, :1], mx.arange(falling.shape[1])
    weight = mx.where(rank < _column(wants, "top_k", off=0, never=scaled.shape[1]), mx.exp(falling - best), 0.0)
    kept = weight > 0
    if any(want.sampling.top_p < 1.0 for want in wants):
        mass = mx.cumsum(weight, axis=-1)
        everything = mx.exp(mx.logsumexp(scaled, axis=-1, keepdims=True) - best)
        whole = mx.where(_column(wants, "top_k") > 0, mass[:, -1:], everything)
        top_p = _column(wants, "top_p", off=1.0, never=mx.inf)
        kept = kept & ((mass - weight < top_p * whole) | (rank == 0))
    floor = mx.min(mx.where(kept, falling, mx.inf), axis=-1, keepdims=True)
    return mx.maximum(floor, best + _log_min_p(wants)), falling[:, -1:]


def _column(wants: Sequence[Want], name: str, off: Any = None, never: float = 0.0) -> mx.array:
    """One field of each row's sampling as f32 [R, 1]; where it equals `off`, `never` stands in."""
    values = [getattr(want.sampling, name) for want in wants]
    return mx.array([[never if value == off else value] for value in values], mx.float32)


def _log_min_p(wants: Sequence[Want]) -> mx.array:
    floors = [want.sampling.min_p for want in wants]
    return mx.array([[float(np.log(floor)) if floor > 0 else -np.inf] for floor in floors], mx.float32)


def _uniform(wants: Sequence[Want], vocab: int) -> mx.array:
    """Noise in [0, 1) by (seed, position, token id): [R, vocab rounded up]. Small values keep all their bits."""
    keys = np.array([key_of(want.sampling.seed, want.position) for want in wants], np.uint32)
    width = -(-vocab // _LANES) * _LANES
    return mx.vmap(lambda key: mx.random.uniform(shape=(width,), key=key))(mx.array(keys))


def _gumbel(uniform: mx.array) -> mx.array:
    """Standard Gumbel noise as -log of an exponential, built from the small end of `uniform`.

    f32 is fine-grained near 0 and coarse near 1, and the small exponentials are the ones that win. The floor keeps a
    zero from beating every token whatever its probability.
    """
    return -mx.log(-mx.log1p(-mx.maximum(uniform, 2.0**-33)))


def _host(array: mx.array) -> Any:
    return array.tolist()
