"""Attention by tiles against a softmax written out in full, over any segments, windows, sinks and company."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from onecopy.runtime.numerics.arrange import Arrangement
from onecopy.runtime.rows import plan, weights
from onecopy.runtime.rows.attention import Even, RowTile, Sheet, Tiles, attend, attended, view
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.caches import RowCache
from onecopy.runtime.rows.fused import ANY
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.ops import Allocate, Chain, Link
from onecopy.runtime.rows.plan import RoundRows, Strip, hidden_bias

Host = NDArray[np.float32]
KVH, GROUP, D = 2, 3, 8
TILE = RowTile(Arrangement(least=4, multiple=4, most=8), Arrangement(least=4, multiple=4, most=8), 64)
IN_GRAPHS = replace(TILE, hosted=False)
FUSED = replace(IN_GRAPHS, fused=ANY)
RNG = np.random.default_rng(6)


def softmax_attention(
    queries: Host, keys: Host, values: Host, positions: list[int], window: int | None, sinks: Host | None
) -> Host:
    """`queries [rows, heads, d]`, already scaled, over `keys, values [kvh, n, d]`: `[rows, heads * d]`."""
    out = np.zeros_like(queries, dtype=np.float64)
    for row, at in enumerate(positions):
        first = 0 if window is None else max(0, at - window + 1)
        for head in range(KVH * GROUP):
            seen = keys[head // GROUP, first : at + 1].astype(np.float64) @ queries[row, head]
            extra = [] if sinks is None else [sinks[head]]
            weights = np.exp(np.concatenate([seen, extra]) - max([*seen, *extra]))
            out[row, head] = weights[: len(seen)] @ values[head // GROUP, first : at + 1] / weights.sum()
    return out.reshape(len(positions), -1).astype(np.float32)


class Rows:
    """Segments full of random rows, and rounds over them."""

    def __init__(self, window: int | None = None, joint: bool = True) -> None:
        names = (RowTensor("kv", 2 * KVH, D),) if joint else (RowTensor("k", KVH, D), RowTensor("v", KVH, D))
        self.pool = Pool(Layout((LayerLayout("window" if window else "attention", names, window=window),)))
        self.cache = RowCache(0, window)
        self.window = window
        self.joint = joint

    def segment(self, number: int, start: int, blocks: int) -> Host:
        """Allocates and fills a segment; its rows as `[2 * kvh, rows, d]`."""
        self.pool.apply((Allocate(number, start, blocks * BLOCK),))
        rows = RNG.standard_normal((2 * KVH, blocks * BLOCK, D), dtype=np.float32)
        layer = self.pool.segments[number].layers[0]
        parts = {"kv": rows} if self.joint else {"k": rows[:KVH], "v": rows[KVH:]}
        for name, part in parts.items():
            layer.write(name, 0, mx.array(part))
        mx.eval(layer.flat())
        return rows

    def round(self, strips: list[Strip], tile: RowTile = TILE) -> RoundRows:
        return RoundRows(strips, self.pool, tile, (mx.default_stream(mx.default_device()),))

    def attend(self, strips: list[Strip], queries: Host, sinks: Host | None = None, tile: RowTile = TILE) -> Host:
        self.cache.round = self.round(strips, tile)
        return np.array(self.cache.attend(mx.array(queries), None if sinks is None else mx.array(sinks)))

    def in_graphs(self, strips: list[Strip], queries: Host, sinks: Host | None = None) -> Host:
        """As where rows are not hosted: MLX computes the products."""
        return self.attend(strips, queries, sinks, IN_GRAPHS)

    def off_the_host(self, strips: list[Strip], queries: Host, sinks: Host | None = None) -> Host:
        """As on a device whose memory NumPy does not see: MLX alone computes the weights, lazily."""
        with mock.patch.object(weights, "on_host", return_value=False):
            return self.in_graphs(strips, queries, sinks)


def queries(rows: int) -> Host:
    return RNG.standard_normal((rows, KVH * GROUP, D), dtype=np.float32)


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(("at", "rows"), [(0, 1), (63, 2), (255, 3), (500, 1), (200, 100)])
def test_a_strip_attends_as_a_softmax_written_out(window: int | None, joint: bool, at: int, rows: int) -> None:
    made = Rows(window, joint)
    kept = made.segment(1, 0, 3)
    q = queries(rows)
    sinks = RNG.standard_normal(KVH * GROUP, dtype=np.float32)
    strip = Strip(Chain((Link(1, 0, at),), 3 * BLOCK), at, (0,) * rows)
    for extra in (None, sinks):
        want = softmax_attention(q, kept[:KVH], kept[KVH:], list(range(at, at + rows)), window, extra)
        found = made.attend([strip], q, extra)
        np.testing.assert_allclose(found, want, atol=2e-5)
        assert np.array_equal(made.in_graphs([strip], q, extra), found)
        np.testing.assert_allclose(made.off_the_host([strip], q, extra), want, atol=2e-5)
        np.testing.assert_allclose(made.attend([strip], q, extra, FUSED), want, atol=2e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_strips_over_shared_and_own_segments_get_the_bits_they_get_alone(window: int | None) -> None:
    made = Rows(window)
    made.segment(1, 0, 2)
    ends = [2 * BLOCK, 2 * BLOCK, BLOCK, 2 * BLOCK]
    strips = []
    for i, (end, own, rows) in enumerate(zip(ends, (3, 90, 200, 255), (1, 4, 2, 1), strict=True)):
        made.segment(10 + i, end, 1)
        chain = Chain((Link(1, 0, end), Link(10 + i, end, end + own)), end + BLOCK)
        strips.append(Strip(chain, end + own, (0,) * rows))
    q, sinks = queries(8), RNG.standard_normal(KVH * GROUP, dtype=np.float32)
    for extra in (None, sinks):
        together = made.attend(strips, q, extra)
        assert np.array_equal(made.in_graphs(strips, q, extra), together)
        np.testing.assert_allclose(made.off_the_host(strips, q, extra), together, atol=2e-6)
        at = 0
        for s in strips:
            alone = made.attend([s], q[at : at + len(s.tokens)], extra)
            assert np.array_equal(alone, together[at : at + len(s.tokens)])
            at += len(s.tokens)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_strips_that_share_nothing_get_the_bits_they_get_alone(window: int | None, joint: bool, rows: int) -> None:
    made = Rows(window, joint)
    strips = []
    for i, at in enumerate([5, 600, 70, 300, 255, 256, 40, 700]):
        made.segment(i, 0, 3)
        strips.append(Strip(Chain((Link(i, 0, at),), 3 * BLOCK), at, (0,) * rows))
    (unit,) = made.round(strips, IN_GRAPHS).reading(window, GROUP, KVH).units
    assert isinstance(unit.sheet, Even)
    q, sinks = queries(rows * len(strips)), RNG.standard_normal(KVH * GROUP, dtype=np.float32)
    for extra in (None, sinks):
        together = made.attend(strips, q, extra)
        assert np.array_equal(made.in_graphs(strips, q, extra), together)
        np.testing.assert_allclose(made.off_the_host(strips, q, extra), together, atol=2e-6)
        for i, s in enumerate(strips):
            mine = slice(i * rows, (i + 1) * rows)
            assert np.array_equal(made.attend([s], q[mine], extra), together[mine])


def test_a_long_strip_goes_through_in_pieces_with_the_bits_it_has_whole() -> None:
    made = Rows()
    made.segment(1, 0, 3)
    strips, q = [Strip(Chain((Link(1, 0, 500),), 3 * BLOCK), 500, (0,) * 200)], queries(200)

    def pieces() -> int:
        return len(made.round(strips).reading(None, GROUP, KVH).units)

    whole = made.attend(strips, q)
    with mock.patch.object(plan, "SCORE_BYTES", 1 << 18):
        assert pieces() > 9
        assert np.array_equal(made.attend(strips, q), whole)
        with mock.patch.object(plan, "on_host", return_value=False):
            assert pieces() == 1


def test_forks_read_their_ancestors_tiles_in_one_product() -> None:
    made = Rows()
    made.segment(1, 0, 2)
    strips = []
    for i in range(5):
        made.segment(10 + i, 2 * BLOCK, 1)
        chain = Chain((Link(1, 0, 2 * BLOCK), Link(10 + i, 2 * BLOCK, 2 * BLOCK + i)), 3 * BLOCK)
        strips.append(Strip(chain, 2 * BLOCK + i, (0,)))
    (unit,) = made.round(strips).reading(None, GROUP, KVH).units
    assert isinstance(unit.sheet, Sheet)
    segments = [p.segment for group in unit.sheet.groups for p in group.products]
    assert sorted(segments) == [1, 10, 11, 12, 13, 14]
    shared = next(g for g in unit.sheet.groups if g.products[0].segment == 1)
    assert sorted(set(np.array(shared.gather)[0].tolist())) == list(range(5 * GROUP))


def test_rows_are_put_where_a_graph_would_write_them() -> None:
    made = Rows()
    strips = []
    for i, at in enumerate([0, 300, 255]):
        made.segment(i, 0, 3)
        strips.append(Strip(Chain((Link(i, 0, at),), 3 * BLOCK), at, (0,) * (i + 1)))
    rows = RNG.standard_normal((2 * KVH, 6, D), dtype=np.float32)
    kept = []
    for tile in (TILE, IN_GRAPHS):
        for i in range(3):
            made.pool.segments[i].layers[0].write("kv", 0, mx.zeros((2 * KVH, 3 * BLOCK, D)))
        made.cache.round = made.round(strips, tile)
        assert made.cache.hosted == tile.hosted
        made.cache.write("kv", mx.array(rows))
        kept.append(np.stack([np.array(made.pool.segments[i].layers[0].arrays["kv"]) for i in range(3)]))
    assert np.array_equal(*kept)
    assert np.array_equal(kept[0][1, :, 300:302], rows[:, 1:3])


@pytest.mark.parametrize("tile", [TILE, IN_GRAPHS], ids=["hosted", "in graphs"])
def test_rows_that_numpy_has_are_put_and_read_as_those_that_mlx_has(tile: RowTile) -> None:
    made = Rows()
    made.segment(1, 0, 1)
    strip, q = Strip(Chain((Link(1, 0, 90),), BLOCK), 90, (0, 0)), queries(2)
    rows, sinks = RNG.standard_normal((2 * KVH, 2, D), dtype=np.float32), RNG.standard_normal(KVH * GROUP).astype("f4")
    made.cache.round = made.round([strip], tile)
    made.cache.put("kv", rows)
    assert np.array_equal(np.array(made.pool.segments[1].layers[0].arrays["kv"])[:, 90:92], rows)
    for extra in (None, sinks):
        assert np.array_equal(made.cache.read(q, extra), made.attend([strip], q, extra))


def test_half_precision_rows_and_long_strips_are_not_hosted() -> None:
    made = Rows()
    made.segment(1, 0, 1)
    chain = Chain((Link(1, 0, 100),), BLOCK)
    made.cache.round = made.round([Strip(chain, 100, (0,) * plan.SHORT)])
    assert made.cache.hosted
    made.pool.segments[1].layers[0].arrays["kv"] = mx.zeros((2 * KVH, BLOCK, D), mx.bfloat16)
    assert not made.cache.hosted
    assert not made.round([Strip(chain, 100, (0,) * (plan.SHORT + 1))]).hosted


def test_a_sheet_is_laid_out_again_for_a_layer_whose_buffers_have_another_size() -> None:
    made = Rows()
    made.segment(1, 0, 1)
    strip, q = Strip(Chain((Link(1, 0, 90),), BLOCK), 90, (0,)), queries(1)
    found = made.attend([strip], q)
    rows = np.array(made.pool.segments[1].layers[0].arrays["kv"])
    made.pool.segments[1].layers[0].arrays["kv"] = mx.array(np.concatenate([rows, np.full_like(rows, 9.0)], axis=1))
    assert np.array_equal(np.array(made.cache.attend(mx.array(q))), found)


def test_a_view_is_the_buffers_memory_in_the_shape_asked_for() -> None:
    buffer = mx.array(RNG.standard_normal((4, 2 * BLOCK, D), dtype=np.float32))
    values = np.array(buffer).reshape(4, 2, BLOCK, D)
    assert np.array_equal(
        np.array(view(buffer.reshape(-1), buffer.shape, 1, 2, (1, 2), 64, False)), values[1:3, 1:2, :64]
    )
    assert np.array_equal(
        np.array(view(buffer.reshape(-1), buffer.shape, 2, 2, (0, 2), BLOCK, True)), values[2:].swapaxes(-1, -2)
    )


def test_half_precision_rows_are_scored_in_f32() -> None:
    shape = (KVH, 1, 64, D)
    keys, values = (mx.array(RNG.standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16) for _ in range(2))
    q = mx.array(RNG.standard_normal((KVH, 4, D), dtype=np.float32)).astype(mx.bfloat16)
    turned = keys.swapaxes(-1, -2)
    out = attended(attend(q, [Tiles(turned, values)], RowTile(), None))
    wide = Tiles(turned.astype(mx.float32), values.astype(mx.float32))
    want = attended(attend(q.astype(mx.float32), [wide], RowTile(), None))
    assert out.dtype == mx.float32
    np.testing.assert_allclose(np.array(out), np.array(want), atol=3e-2)


def test_what_is_hidden_is_later_keys_and_those_before_the_window() -> None:
    assert hidden_bias(0, 1, np.array([300, 301]), None) is None
    assert hidden_bias(1, 2, np.array([BLOCK + 255]), None) is None
    bias = hidden_bias(0, 2, np.array([BLOCK + 3]), 10)
    assert bias is not None
    visible = np.flatnonzero(bias.reshape(-1) == 0)
    assert (visible[0], visible[-1]) == (BLOCK - 6, BLOCK + 3)
