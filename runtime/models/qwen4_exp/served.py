"""What a qwen4_exp model keeps, as a layout for the bank; and a check of the arithmetic that short prompts never reach.

Past the budget a query scores pooled keys and attends to gathered rows. The engine's own trial plays a few tokens, all
within the budget, so these two are tried here, on the shapes of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.models.layouts import PROBE_TOKENS, ModelRows
from onecopy.runtime.rows.indexed import KEYS, POOLED, RAW, VALUES
from onecopy.runtime.rows.layout import LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.states import Specs
from onecopy.runtime.rows.states import StateSpec as Spec

from .attention import cut, softmax_over
from .cache import StateSpec
from .config import INDEXED, Config
from .indexer import scores
from .memory import Conversation, MemoryIndexed, Round

if TYPE_CHECKING:
    from .model import Model

QUERIES = (1, 2, 3, 8)
"""Queries of one conversation run together in the check."""


def kept_rows(model: Model) -> ModelRows:
    """The layout, dtypes, states and own logits of `model`, by one forward of the probe's tokens."""
    logits, dtypes = _probe(model)
    layers = [
        _indexed(model.config, dtypes) if kind == INDEXED else _recurrent(specs)
        for kind, specs in zip(model.kinds, model.states(), strict=True)
    ]
    kept = {t: dtypes[t.name] for layer in layers for t in (*layer.rows, *layer.pooled)}
    states = tuple(_specs(specs) for specs in model.states())
    return ModelRows(Layout(tuple(layers)), tuple(range(len(layers))), kept, states, (), logits, reasons(model.config))


@dataclass(slots=True)
class _Watched(MemoryIndexed):
    """Notes the types of what is written."""

    seen: dict[str, mx.Dtype] = field(default_factory=dict)

    def write(self, keys: mx.array, values: mx.array, raw: mx.array) -> None:
        self.seen |= {KEYS: keys.dtype, VALUES: values.dtype, RAW: raw.dtype, POOLED: raw.dtype}
        MemoryIndexed.write(self, keys, values, raw)


def _probe(model: Model) -> tuple[mx.array, dict[str, mx.Dtype]]:
    round_ = Round([Conversation(model.config, model.states(), model.kinds)])
    watched = [_Watched(x.buffers, x.starts, x.config) if isinstance(x, MemoryIndexed) else x for x in round_.layers]
    logits = model([PROBE_TOKENS], watched)[0]
    mx.eval(logits)
    return logits, next((x.seen for x in watched if isinstance(x, _Watched)), {})


def _indexed(c: Config, dtypes: dict[str, mx.Dtype]) -> LayerLayout:
    keys, values = (RowTensor(n, c.kv_heads, c.head_dim, dtypes[n].size) for n in (KEYS, VALUES))
    raw, pooled = (RowTensor(n, 1, c.index_dim, dtypes[n].size) for n in (RAW, POOLED))
    return LayerLayout("qsa", (keys, values, raw), (pooled,), c.ratio)


def _recurrent(specs: tuple[StateSpec, ...]) -> LayerLayout:
    return LayerLayout("recurrent", anchor_bytes=sum(s.nbytes for s in _specs(specs) if s is not None))


def _specs(specs: tuple[StateSpec, ...]) -> Specs:
    return tuple(Spec(s.shape, s.dtype, s.fill, s.name) for s in specs)


# --- the check


def reasons(c: Config) -> tuple[str, ...]:
    """Sentences about what gives a query other bits in company; empty when nothing does."""
    checks: tuple[tuple[Callable[[Config], bool], str], ...] = (
        (_scores_are_exact, "scores of pooled keys depend on the queries beside them"),
        (_gathered_is_exact, "attention over selected rows depends on the queries beside them"),
    )
    return tuple(sentence for holds, sentence in checks if not holds(c))


def _scores_are_exact(c: Config) -> bool:
    """A query's scores are the same alone and beside others, and over one piece of keys or two."""
    keys = _values(3 * c.pool_tile - 5, c.index_dim)
    queries = _values(max(QUERIES) * c.index_heads, c.index_dim).reshape(-1, c.index_heads, c.index_dim)
    cut_at = c.pool_tile
    whole = _host(scores(queries, [keys], c))

    def alike(n: int, pieces: list[mx.array]) -> bool:
        return np.array_equal(_host(scores(queries[-n:], pieces, c)), whole[-n:])

    return all(alike(n, [keys]) and alike(n, [keys[:cut_at], keys[cut_at:]]) for n in QUERIES)


def _gathered_is_exact(c: Config) -> bool:
    """A query's output over its own rows is the same alone and beside others with rows of theirs."""
    most = max(QUERIES)
    slots = -(-(c.budget + c.ratio) // c.tile) * c.tile
    shape = (c.kv_heads, most, slots, c.head_dim)
    keys, values = (_values(most * c.kv_heads * slots, c.head_dim, i).reshape(shape) for i in range(2))
    group = c.heads // c.kv_heads
    queries = _values(most * c.heads, c.head_dim, 2).reshape(most, c.kv_heads, 1, group, c.head_dim)
    counts = tuple(c.budget + i % c.ratio for i in range(most))

    def run(n: int) -> NDArray[np.float32]:
        own = tuple(cut(x[:, -n:], c.tile).swapaxes(0, 1) for x in (keys, values))
        return _host(softmax_over(queries[-n:], [(own[0], own[1])], counts[-n:]))

    whole = run(most)
    return all(np.array_equal(run(n), whole[-n:]) for n in QUERIES)


def _values(rows: int, width: int, seed: int = 0) -> mx.array:
    """Fixed values [rows, width] with no pattern that a kernel's strides would repeat."""
    return mx.array(np.sin((np.arange(rows * width, dtype=np.float64) + seed) ** 2 % 65521).astype(np.float32)).reshape(
        rows, width
    )


def _host(array: mx.array) -> NDArray[np.float32]:
    return np.array(array.astype(mx.float32))
