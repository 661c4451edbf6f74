"""The cache objects that mlx-lm models see: one per layer for the whole batch.

A round is a batch of rows. A model calls `update_and_fetch` and then attention for each layer, as it would for its own
cache; here the first writes every strip's rows into its leaf and the second reads every strip's chain. Device thread
only.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from onecopy.runtime.blas.gemm import address
from onecopy.runtime.numerics.exponential import seen

from .attention import Attending, Even, Tiles, attend, attend_all, attend_even, attend_sheet, view
from .fused import attend_whole
from .hosted import HostSheet, Kept, Widths
from .layout import BLOCK
from .plan import RoundRows, Strip, Unit
from .quantized import packed_tiles, stored

__all__ = ["RoundRows", "RowCache", "Strip", "install_attention"]

Array = Any
Host = NDArray[Any]

HERE = nullcontext()
"""The stream that is the default one already."""


class RowCache:
    """One layer's view of the round. Masks are the rows' own affair.

    offset: the position of each sequence's first row. positions: of every row."""

    def __init__(self, layer: int, window: int | None) -> None:
        self.layer = layer
        self.window = window
        self.round: RoundRows | None = None
        self.offset: Array = 0
        self.positions: Array = 0

    def astype(self, _: Any) -> RowCache:
        """Stands for keys or values that a model casts before attention; rows keep the type they are kept in."""
        return self

    @property
    def dtype(self) -> Any:
        """The type of the rows, to which some models cast what attention returns."""
        kept = list(self._arrays(self._now.writes[0].segment).values())
        return kept[0 if self._bits is None else 1].dtype

    @property
    def _now(self) -> RoundRows:
        if self.round is None:
            raise AssertionError("a row cache is used outside a round")
        return self.round

    def make_mask(self, *_: Any, window_size: int | None = None, **__: Any) -> None:
        if window_size is not None and window_size != self.window:
            raise ValueError(f"a layer attends within {window_size} rows but keeps a cache of another kind")

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Any, Any]:
        """Writes keys and values `[batch, kvh, length, d]` into the leaves; answers with itself, to be read."""
        k, v = (x.swapaxes(1, 2).flatten(0, 1).swapaxes(0, 1) for x in (keys, values))
        if "kv" in self._arrays(self._now.writes[0].segment):
            self.write("kv", mx.concatenate([k, v], axis=0))
        else:
            self.write("k", k)
            self.write("v", v)
        return self, self

    def write(self, name: str, rows: Array) -> None:
        """Writes `rows [heads, rows, d]` of the flat batch into the strips' leaves, in place once evaluated."""
        now = self._now
        if self.hosted:
            mx.eval(rows)
            self.put(name, seen(rows))
            return
        for kept, all_rows in stored(name, rows, self._bits):
            ends = [w.stop for w in now.writes[:-1]]
            for w, part in zip(now.writes, mx.split(all_rows, ends, axis=1) if ends else [all_rows], strict=True):
                now.put(now.pool.segments[w.segment].layers[self.layer], kept, w, part)

    @property
    def hosted(self) -> bool:
        """Whether this round's rows are written and read where they lie: they are float32, and NumPy sees them."""
        now = self._now
        return now.hosted and all(a.dtype == mx.float32 for a in self._arrays(now.writes[0].segment).values())

    def put(self, name: str, rows: Host) -> None:
        """`write` of rows that NumPy has; in a hosted round it is done when this returns."""
        if not self.hosted:
            self.write(name, mx.array(rows))
            return
        for w in self._now.writes:
            kept = seen(self._arrays(w.segment)[name])
            kept[:, w.at : w.at + w.stop - w.start] = rows[:, w.start : w.stop]

    def read(self, queries: Host, sinks: Host | None = None) -> Host:
        """`attend` for queries `[rows, heads, d]` that NumPy has: a new `[rows, heads * dv]`.

        sinks: `[heads]` or None.
        """
        if not self.hosted:
            made = self.attend(mx.array(queries), None if sinks is None else mx.array(sinks))
            mx.eval(made)
            return seen(made)
        rows, heads, width = queries.shape
        kvh = self._heads()
        group = heads // kvh
        q = queries.reshape(rows, kvh, group, width).swapaxes(0, 1).reshape(kvh, rows * group, width)
        extra = None if sinks is None else np.tile(sinks.reshape(kvh, group), (1, rows))
        kept = [self._kept(p.segment, kvh) for g in self._now.sheet(self.window, group, kvh).groups for p in g.products]
        arrays = self._arrays(self._now.writes[0].segment)
        widths = Widths(kvh, width, arrays["v" if "v" in arrays else "kv"].shape[2])
        out = self._laid(group, widths, kept).attend(q, kept, extra)
        return out.reshape(kvh, rows, -1).swapaxes(0, 1).reshape(rows, -1)

    def _kept(self, segment: int, kvh: int) -> Kept:
        arrays = {name: seen(array) for name, array in self._arrays(segment).items()}
        if "kv" not in arrays:
            return Kept(address(arrays["k"]), address(arrays["v"]), arrays["k"].shape[1])
        both = arrays["kv"]
        return Kept(address(both), address(both[kvh:]), both.shape[1])

    def _laid(self, group: int, widths: Widths, kept: list[Kept]) -> HostSheet:
        """The round's sheet for layers of this shape, laid out by the first of them."""
        now, key = self._now, (self.window, group, widths)
        found = now.laid.get(key)
        if found is None or not found.fits(kept):
            sheet, capacities = now.sheet(self.window, group, widths.heads), [k.capacity for k in kept]
            found = now.laid[key] = HostSheet(sheet, now.tile, widths, capacities)
        return found

    def attention(self, queries: Array, scale: float, sinks: Array | None) -> Array:
        """`queries [batch, heads, length, d]` to `[batch, heads, length, dv]`."""
        batch, heads, length, width = queries.shape
        q = (queries * scale).swapaxes(1, 2).reshape(batch * length, heads, width)
        out = self.attend(q, sinks).reshape(batch, length, heads, -1).swapaxes(1, 2)
        return out if out.dtype == queries.dtype else out.astype(queries.dtype)

    def attend(self, queries: Array, sinks: Array | None = None) -> Array:
        """`queries [rows, heads, d]`, scaled by the model's scale, to `[rows, heads * dv]` in f32."""
        now = self._now
        if self.hosted:
            mx.eval(queries, *(() if sinks is None else (sinks,)))
            return mx.array(self.read(seen(queries), None if sinks is None else seen(sinks)))
        rows, heads, width = queries.shape
        kvh = self._heads()
        group = heads // kvh
        if rows == 1:
            q = queries.reshape(kvh, 1, group, width)
        else:
            q = queries.reshape(rows, kvh, group, width).swapaxes(0, 1).reshape(kvh, 1, rows * group, width)
        extra = None if sinks is None else mx.tile(sinks.reshape(kvh, group), (1, rows))
        reading = now.reading(self.window, group, kvh)
        whole = [u for u in reading.units if u.whole is not None]
        begun = []
        for i, unit in enumerate(reading.units[len(whole) :]):
            where = mx.stream(now.lanes[i % len(now.lanes)]) if i else HERE
            begun.append((where, self._attend(unit, group, kvh, q, extra)))
        out = [*(self._at_once(u, kvh, queries, sinks) for u in whole), *attend_all(begun)]
        joined = out[0] if len(out) == 1 else mx.concatenate(out, axis=2)
        if rows == 1:
            return joined.reshape(1, -1)
        by_row = joined.reshape(kvh, rows, group, -1).swapaxes(0, 1)
        if reading.back is not None:
            by_row = mx.take(by_row, reading.back, axis=0)
        return by_row.reshape(rows, -1)

    def _attend(self, unit: Unit, group: int, kvh: int, queries: Array, sinks: Array | None) -> Attending:
        tile = self._now.tile
        taken = [slice(a * group, b * group) for a, b in unit.bounds]
        queries, sinks = _rows(queries, taken, 2), _rows(sinks, taken, 1)
        if unit.sheet is None:
            tiles = [self._tiles(s.segment, kvh, (s.first, s.last), BLOCK, s.bias) for s in unit.spans]
            return (yield from attend(queries, tiles, tile, sinks))
        by_group = [
            [self._tiles(p.segment, kvh, (p.first, p.last), p.n) for p in g.products] for g in unit.sheet.groups
        ]
        if isinstance(unit.sheet, Even):
            return (yield from attend_even(queries, by_group, unit.sheet, tile, sinks))
        return (yield from attend_sheet(queries.squeeze(1), by_group, unit.sheet, tile, sinks))[:, None]

    def _at_once(self, unit: Unit, kvh: int, queries: Array, sinks: Array | None) -> Array:
        """`[kvh, 1, rows * group, dv]` of a unit that one fused kernel computes."""
        assert unit.whole is not None
        (bound,), read = unit.bounds, slice(unit.whole.first, unit.whole.last)
        arrays = self._arrays(unit.whole.segment)
        both = arrays.get("kv")
        keys, values = (arrays["k"], arrays["v"]) if both is None else (both[:kvh], both[kvh:])
        return attend_whole(queries[slice(*bound)], keys[:, read], values[:, read], unit.whole.mask, sinks)

    def _arrays(self, segment: int) -> dict[str, Array]:
        return self._now.pool.segments[segment].layers[self.layer].arrays

    @property
    def _bits(self) -> int | None:
        return self._now.pool.layout.layers[self.layer].bits

    def _heads(self) -> int:
        arrays = self._arrays(self._now.writes[0].segment)
        return int(arrays["kv"].shape[0] // 2 if "kv" in arrays else arrays["k"].shape[0])

    def _tiles(self, segment: int, kvh: int, span: tuple[int, int], n: int, bias: Array | None = None) -> Tiles:
        arrays, bits = self._arrays(segment), self._bits
        if bits is not None:
            return Tiles(*packed_tiles(arrays, bits, kvh, span, n), bias)
        if "kv" in arrays:
            both = arrays["kv"]
            shape, flat = both.shape, both.reshape(-1)
            keys, values = view(flat, shape, 0, kvh, span, n, True), view(flat, shape, kvh, kvh, span, n, False)
        else:
            keys, values = (
                view(arrays[name].reshape(-1), arrays[name].shape, 0, kvh, span, n, name == "k") for name in "kv"
            )
        return Tiles(keys, values, bias)


def _rows(x: Array | None, taken: list[slice], axis: int) -> Array | None:
    """Some rows of `x`, joined in that order."""
    if x is None or _all_of_it(taken, x.shape[axis]):
        return x
    parts = [x[(slice(None),) * axis + (s,)] for s in taken]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _all_of_it(taken: list[slice], size: int) -> bool:
    ends = [0, *(s.stop for s in taken)]
    return ends[-1] == size and all(s.start == end for s, end in zip(taken, ends, strict=False))


def install_attention() -> None:
    """Puts a dispatching attention into every loaded mlx-lm model module: ours for `RowCache`, theirs otherwise."""
    from mlx_lm.models import base

    original = getattr(base.scaled_dot_product_attention, "_original", base.scaled_dot_product_attention)

    def attention(
        queries: Array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Array:
        rows = keys if isinstance(keys, RowCache) else cache
        if isinstance(rows, RowCache):
            if mask is not None and not isinstance(mask, str):
                raise ValueError("a layer adds a mask of its own to its scores")
            return rows.attention(queries, scale, sinks)
        seen = getattr(cache, "queries_seen", None)
        if seen is not None:
            seen.append(queries.shape[1])
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    attention._original = original  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention"):
            module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
