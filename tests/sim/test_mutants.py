"""The harness sees what it is there to see: every planted fault breaks a promise under some seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, Mutant, caught


@pytest.mark.filterwarnings("ignore")  # a run that is ended by force leaves its coroutines behind
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_caught(mutant: Mutant) -> None:
    report = caught(mutant)
    assert report is not None, f"no seed shows: {mutant.what}"
    assert not any(
        slip in sentence for slip in ("AttributeError", "TypeError", "NameError") for sentence in report.broken
    )


def test_the_documentation_names_every_planted_fault() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert [m.name for m in MUTANTS if f"| {m.name} |" not in text] == []
