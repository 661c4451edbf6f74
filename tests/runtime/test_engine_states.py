"""A recurrent state follows its conversation from one segment to the next."""

from __future__ import annotations

import numpy as np
from onecopy.runtime.rows.layout import BLOCK

from tests.support.engines import Talk, opened
from tests.support.tiny import tiny
from tests.support.zoo import DELTA


def test_a_new_leaf_goes_on_from_the_state_of_the_one_before_it() -> None:
    engine = opened(tiny("qwen3_5", **DELTA), context=1024)
    tokens = [int(t) for t in np.random.default_rng(5).integers(0, 32, BLOCK + 9)]
    whole = Talk(engine, 2 * BLOCK).feed(tokens, BLOCK, 1)
    cut = Talk(engine, BLOCK)
    first = cut.feed(tokens[:BLOCK])
    cut.extend(BLOCK)
    assert np.array_equal(np.concatenate([first, cut.feed(tokens[BLOCK:], 1)]), whole)
