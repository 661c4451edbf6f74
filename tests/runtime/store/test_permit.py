from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.store.permit import FLOOR, GIB, RECORD_OVERHEAD, charge, cold_charge, permit


@dataclass(frozen=True)
class Priced:
    row: int | None
    state: int | None = 0

    @property
    def block_bytes(self) -> int | None:
        return None if self.row is None else 256 * self.row

    def anchor_bytes(self, at: int) -> int | None:
        return None if self.state is None or self.row is None else self.state + at % 256 * self.row


lengths = st.integers(0, 300_000)
layouts = st.builds(Priced, st.integers(1, 200_000), st.integers(0, 200_000_000))


@given(lengths, lengths, layouts)
def test_no_save_costs_more_than_the_cold_one(saved: int, at: int, layout: Priced) -> None:
    part, cold = charge(saved, at, layout), cold_charge(at, layout)
    assert part is not None
    assert cold is not None
    assert part <= cold


@given(lengths, layouts)
def test_a_cold_charge_counts_every_whole_block_and_the_state_itself(at: int, layout: Priced) -> None:
    rows = at * (layout.row or 0) + (layout.state or 0)
    assert cold_charge(at, layout) == rows + (at // 256 + 1) * RECORD_OVERHEAD


def test_a_warm_save_is_charged_its_new_bytes_only() -> None:
    layout = Priced(1000)
    assert charge(2560, 2560 + 256, layout, anchor=False) == 256_000 + RECORD_OVERHEAD
    assert charge(2560, 2560 + 255, layout, anchor=False) == 0


@given(lengths, layouts, st.integers(0, 100 * GIB))
def test_the_permit_is_the_cold_charge_between_floor_and_budget(longest: int, layout: Priced, budget: int) -> None:
    cold = cold_charge(longest, layout) or 0
    assert permit(longest, layout, budget) == max(GIB, min(cold, budget))


def test_a_permit_for_the_longest_state_holds_its_cold_save_whole() -> None:
    layout = Priced(65_536, 150_000_000)
    assert permit(131_072, layout, 64 * GIB) == cold_charge(131_072, layout)


@pytest.mark.parametrize("layout", [Priced(None), Priced(10, None), Priced(None, None)])
def test_a_layout_nobody_can_price_gets_exactly_the_floor(layout: Priced) -> None:
    assert charge(0, 9999, layout) is None
    assert permit(100_000, layout, 64 * GIB) == FLOOR == GIB


def test_no_longest_gets_exactly_the_floor() -> None:
    assert permit(0, Priced(10**6, 10**10), 64 * GIB) == GIB
