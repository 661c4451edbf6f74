"""The audit passes an engine that keeps the contract, and names what one that breaks it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from onecopy.runtime.audit import checks
from onecopy.runtime.engine import Engine
from onecopy.runtime.rows.fixed import FixedRound
from onecopy.runtime.rows.plan import Strip

from tests.support.elsewhere import compiler, elsewhere
from tests.support.engines import opened
from tests.support.tiny import tiny

WIDTHS = (2, 4)


def test_an_exact_engine_passes_every_check_and_leaves_no_segment_behind() -> None:
    engine = opened(tiny(), context=1024)
    found = list(checks(engine, 32, 12, WIDTHS))
    assert found
    assert all(v.exact and v.rows for v in found)
    assert not engine.pool.segments


@compiler
def test_compiled_rounds_are_compared_with_others_where_there_are_some() -> None:
    with elsewhere():
        engine = opened(tiny(scale=3.0), context=1024)
        found = list(checks(engine, 32, 12, WIDTHS))
        assert {"compiled rounds of 1", "compiled rounds of 4"} <= {v.name for v in found}
        assert all(v.exact for v in found)
        sees = FixedRound._last_seen
        with mock.patch.object(FixedRound, "_last_seen", lambda *a: sees(*a) - 1):
            assert engine._compiled is not None
            engine._compiled._graphs.clear()
            wrong = {v.name for v in checks(engine, 32, 12, WIDTHS) if not v.exact}
        assert {"compiled rounds of 1", "compiled rounds of 4"} <= wrong
        assert "verify width 2" not in wrong


class Careless:
    """An engine whose logits depend, in the last bit, on how many rows run together."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.pool = engine.pool
        self.layout = engine.layout
        self.fixed_rows = engine.fixed_rows

    def forward(self, strips: Sequence[Strip]) -> Any:
        rows = sum(len(s.tokens) for s in strips)
        return self._engine.forward(strips) * (1 + 1e-6 * (rows > 1))

    def settle(self, strips: Sequence[Strip], *outputs: Any) -> None:
        self._engine.settle(strips, *outputs)


def test_an_engine_whose_bits_depend_on_the_batch_is_found_out() -> None:
    found = list(checks(Careless(opened(tiny(), context=1024)), 32, 12, WIDTHS))
    named = {v.name for v in found if not v.exact}
    assert {"verify width 2", "batch of 2", "prefill in chunks of 256"} <= named
