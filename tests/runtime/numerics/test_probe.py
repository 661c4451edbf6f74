"""The self-check finds ways that are exact here, takes the first, and says so when there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.blas.gemm import ready
from onecopy.runtime.numerics import probe as checks
from onecopy.runtime.numerics.arrange import CUTS, PLAIN, Arrangement
from onecopy.runtime.numerics.probe import exact_linear, exact_tile, linear_is_exact, plain, probe
from onecopy.runtime.rows import caches
from onecopy.runtime.rows.fused import ANY
from onecopy.runtime.rows.plan import RoundRows

SHAPES = [(96, 64), (960, 576), (3072, 576)]


@pytest.fixture(autouse=True)
def _forget() -> None:
    exact_linear.cache_clear()
    exact_tile.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_way_found_gives_rows_bits_of_their_own_at_heights_the_check_did_not_try(shape: tuple[int, int]) -> None:
    how = exact_linear(*shape, False)
    assert how is not None
    draw = np.random.default_rng(8)
    w = mx.array(draw.standard_normal(shape, dtype=np.float32))
    x = mx.array(draw.standard_normal((256, shape[1]), dtype=np.float32))
    whole = np.array(how.product(x, w))
    for n in (1, 10, 11, 15, 19, 27, 40, 77, 130, 255):
        assert np.array_equal(np.array(how.product(x[:n], w)), whole[:n])
        assert np.array_equal(np.array(how.product(x[256 - n :], w)), whole[256 - n :])


def test_the_same_machine_finds_the_same_ways() -> None:
    first = probe([(96, 64)], [(320, 64)], [(2, 2, 16, 16)])
    _forget_all()
    assert probe([(96, 64)], [(320, 64)], [(2, 2, 16, 16)]) == first
    assert first.exact
    assert "96x64: " in first.mode


def _forget_all() -> None:
    exact_linear.cache_clear()
    exact_tile.cache_clear()


class Leaky(Arrangement):
    """A way on a machine where a row's bits change with the rows beside it."""

    def product(self, x: Any, w: Any, held: Any = None) -> Any:
        return super().product(x, w, held) * (1.0 + 1e-7 * (x.shape[0] % 7))


def test_a_row_whose_bits_change_with_the_height_is_seen() -> None:
    x, w = mx.ones((64, 16)), mx.ones((32, 16))
    assert linear_is_exact(x, w, Arrangement(most=1), (1, 2, 9, 64))
    assert not linear_is_exact(x, w, Leaky(), (1, 2, 9, 64))


def test_a_machine_without_an_exact_way_is_reported_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "BODY", (Leaky(),))
    found = probe([(96, 64)], [], [])
    assert not found.exact
    assert found.reasons == ("linear 96x64: no arrangement is exact",)
    assert found.choose(96, 64, False) == PLAIN


def test_without_the_check_nothing_is_promised() -> None:
    found = plain("chosen by --fast")
    assert (found.exact, found.reasons) == (False, ("chosen by --fast",))
    assert found.choose(5, 5, True) == (CUTS[0] if ready() else PLAIN)
    assert str(found.choose(5, 5, True)) in found.mode


def test_a_fused_kernel_with_other_bits_is_not_taken_and_costs_no_exactness() -> None:
    found = probe([], [], [(2, 2, 16, 16)], ANY)
    assert found.exact
    assert found.tile.fused == 0


def test_a_fused_kernel_with_the_bits_of_tiles_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches.RowCache, "_at_once", _by_tiles)
    found = probe([], [], [(2, 2, 16, 16)], ANY)
    assert found.exact
    assert found.tile.fused == ANY


def _by_tiles(self: Any, unit: Any, kvh: int, queries: Any, sinks: Any) -> Any:
    """A kernel that computes one strip as tiles do."""
    now = self.round
    strip = next(s for s, bound in zip(now.strips, now.bounds, strict=True) if bound == unit.bounds[0])
    self.round = RoundRows([strip], now.pool, replace(now.tile, fused=0), now.lanes)
    try:
        out = self.attend(queries[slice(*unit.bounds[0])])
    finally:
        self.round = now
    rows = len(strip.tokens)
    return (
        out.reshape(rows, kvh, queries.shape[1] // kvh, -1)
        .swapaxes(0, 1)
        .reshape(kvh, 1, -1, out.shape[1] // queries.shape[1])
    )


def test_without_the_check_a_fused_kernel_is_taken_as_it_is() -> None:
    assert plain("chosen by --fast", 8).tile.fused == 8
    assert "fused=8" in plain("chosen by --fast", 8).mode


@pytest.mark.parametrize("body", [[], [(96, 64)]])
def test_fast_and_a_search_that_found_nothing_are_two_modes(
    monkeypatch: pytest.MonkeyPatch, body: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(checks, "ready", lambda: False)
    monkeypatch.setattr(checks, "exact_linear", lambda outputs, inputs, head: None)
    monkeypatch.setattr(checks, "exact_tile", lambda shapes: None)
    fast, fallen = plain("chosen by --fast"), probe(body, [], [(2, 2, 16, 16)])
    assert (fast.choose(96, 64, False), fast.tile) == (fallen.choose(96, 64, False), fallen.tile)
    assert fast.mode != fallen.mode
