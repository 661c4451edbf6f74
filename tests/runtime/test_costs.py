"""What drafting costs, measured on engines whose rounds take a known time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from onecopy.runtime.costs import WIDEST, WIDTHS, prices
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout

ATTENTION, RECURRENT = LayerLayout("attention"), LayerLayout("recurrent", anchor_bytes=8)


class Timed:
    """Rounds take 10 + width, a token proposed 3 and the first 2 more, a state computed again 7 and one a row."""

    def __init__(self, *layers: LayerLayout, deepest: int = 0, fixed: int = 0) -> None:
        self.fixed_rows, self.sizes = fixed, set[int]()
        self.layout = Layout(layers)
        self.pool = self
        self.now = 0.0
        self.segments = 0
        self.drafter = SimpleNamespace(deepest=deepest, name="some", mark="m") if deepest else None

    def apply(self, orders: tuple[Any, ...]) -> None:
        self.sizes |= {op.capacity for op in orders if hasattr(op, "capacity")}
        self.segments += sum({"Allocate": 1, "Drop": -1}[type(op).__name__] for op in orders)

    def run(self, strips: Any, wants: Any) -> None:
        (strip,) = strips
        assert self.segments == 1
        assert len(wants) == strip.wanted == len(strip.tokens)
        self.now += 10 + len(strip.tokens) + (2 + 3 * strip.draft if strip.draft else 0)

    def accept(self, kept: Any) -> None:
        self.now += 7 + sum(n for _, n in kept)

    def clock(self) -> float:
        return self.now


def test_costs_are_relative_to_a_round_of_one_row_and_leave_no_segment() -> None:
    engine = Timed(ATTENTION)
    found = prices(engine, engine.clock)
    assert found.widths == pytest.approx([(10 + w) / 11 for w in range(1, WIDTHS + 1)])
    assert (found.again, found.ahead, found.drafters) == (0.0, (), ("copies",))
    assert engine.segments == 0


def test_rounds_are_measured_at_the_size_at_which_they_are_compiled() -> None:
    for fixed, size in ((0, BLOCK), (1024, 1024)):
        engine = Timed(ATTENTION, fixed=fixed)
        prices(engine, engine.clock)
        assert engine.sizes == {size}


def test_a_rejection_costs_a_recurrent_model_the_computing_of_its_state() -> None:
    engine = Timed(RECURRENT)
    assert prices(engine, engine.clock).again == pytest.approx(9 / 11)


def test_what_the_device_proposes_is_priced_by_depth() -> None:
    engine = Timed(ATTENTION, deepest=4)
    found = prices(engine, engine.clock)
    assert found.ahead == pytest.approx([(2 + 3 * d) / 11 for d in range(1, 5)])
    assert found.drafters == ("copies", "some")
    assert found.mark == "m"


def test_a_drafter_of_long_blocks_may_have_wider_rounds() -> None:
    engine = Timed(ATTENTION, deepest=11)
    assert len(prices(engine, engine.clock).widths) == 12
    engine = Timed(ATTENTION, deepest=63)
    assert len(prices(engine, engine.clock).widths) == WIDEST
