"""Exponentials by NumPy in MLX's memory: right, the same wherever a number stands, and never behind anybody's back."""

from __future__ import annotations

import warnings
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from onecopy.runtime.numerics import exponential
from onecopy.runtime.numerics.exponential import exp

HERE = np.random.default_rng(3).standard_normal((3, 5, 700), dtype=np.float32) * 20


def test_it_is_the_exponential_to_a_few_units_in_the_last_place() -> None:
    got = np.array(exp(mx.array(HERE) + 0)).astype(np.float64)
    want = np.exp(HERE.astype(np.float64))
    assert np.max(np.abs(got - want) / want) < 4e-7


@pytest.mark.parametrize(("start", "length"), [(0, 1), (1, 3), (5, 16), (7, 17), (63, 64), (100, 600)])
def test_a_number_has_the_same_bits_wherever_it_stands(start: int, length: int) -> None:
    whole = np.array(exp(mx.array(HERE) + 0))
    part = mx.array(HERE)[:, :, start : start + length] + 0
    assert np.array_equal(np.array(exp(part)), whole[:, :, start : start + length])


def test_edges_are_exact_and_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = np.array(exp(mx.array([0.0, -np.inf, np.inf, -1000.0, 1000.0]) + 0))
    assert got.tolist() == [1.0, 0.0, np.inf, 0.0, np.inf]


@pytest.mark.parametrize("turned", [False, True])
def test_what_it_was_made_from_stays(turned: bool) -> None:
    x = mx.array(HERE)
    x = x.T if turned else x
    made = exp(-x)
    assert np.array_equal(np.array(x), HERE.T if turned else HERE)
    np.testing.assert_allclose(np.array(made), np.exp(-np.array(x)), rtol=1e-6)


def test_the_result_is_computed_on_like_any_array() -> None:
    a, b = exp(mx.array(HERE) - 1), exp(mx.array(HERE[0]) - 2)
    total = a.sum() + b.sum() + (a * 2).max()
    want = np.exp(HERE - 1.0).sum(dtype=np.float64) + np.exp(HERE[0] - 2.0).sum() + 2 * np.exp(HERE - 1.0).max()
    np.testing.assert_allclose(float(total), want, rtol=1e-5)


def test_other_types_and_other_devices_are_left_to_mlx_and_stay_lazy() -> None:
    half = mx.array(HERE).astype(mx.bfloat16)
    assert exp(half).dtype == mx.bfloat16
    elsewhere = mock.Mock(type=mx.DeviceType.gpu)
    with (
        mock.patch.object(exponential.mx, "default_device", return_value=elsewhere),
        mock.patch.object(exponential.mx, "eval", side_effect=AssertionError("evaluated")),
    ):
        lazy = exp(mx.array([1.0]) + 0)
    assert abs(float(lazy[0]) - np.e) < 1e-6
