"""Engines whose strips a fused kernel takes: near the same logits over prompts, steps, forks and windows."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from onecopy.runtime import engine as engines
from onecopy.runtime.rows.fused import ANY
from onecopy.runtime.rows.layout import BLOCK

from tests.runtime.test_engine_exact import MODELS
from tests.support.engines import Case, opened, together
from tests.support.tiny import tiny

LENGTH = BLOCK + 90
FUSED = {"grouped queries", "sliding window", "sinks and experts", "wide queries"}


@pytest.fixture(scope="module", params=sorted(FUSED))
def pair(request: pytest.FixtureRequest) -> Any:
    """The same model with the kernel and without."""
    kind, config = MODELS[request.param]
    with mock.patch.object(engines, "fused_rows", return_value=ANY):
        fused = Case(opened(tiny(kind, **config), fast=True), 128, LENGTH, exact=False)
    return fused, Case(opened(tiny(kind, **config)), 128, LENGTH)


def test_a_prompt_has_near_the_same_logits(pair: tuple[Case, Case]) -> None:
    fused, tiles = pair
    assert fused.tokens == tiles.tokens
    np.testing.assert_allclose(fused.whole, tiles.whole, atol=1e-3 * np.abs(tiles.whole).max())
    assert not np.array_equal(fused.whole, tiles.whole)


def test_steps_and_forks_have_near_the_same_logits(pair: tuple[Case, Case]) -> None:
    fused, tiles = pair
    cut = BLOCK + 17
    parent = fused.at(cut)
    talks = [parent.fork(), fused.at(cut), parent.fork()]
    rows = together([(talk, fused.tokens[cut : cut + 3]) for talk in talks])
    for found in rows:
        np.testing.assert_allclose(found, tiles.whole[cut : cut + 3], atol=1e-3 * np.abs(tiles.whole).max())
