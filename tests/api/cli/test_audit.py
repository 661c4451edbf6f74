"""`onecopy audit`: its verdict says what is not exact, and never promises what the engine does not."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from onecopy.api import cli
from onecopy.api.cli.audit import report
from onecopy.runtime.audit import Verdict
from rich.console import Console

from tests.support.system import write_tiny

FAST = "not exact: chosen by --fast"
SAME, OTHER = Verdict("batch of 2", 8, 0, 0), Verdict("forked at 1", 8, 3, 1)


def reported(stated: str, *found: Verdict) -> tuple[int, str]:
    """The exit status and the last line."""
    console = Console(file=io.StringIO(), width=300)
    status = report(console, "m", found, stated)
    return status, console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]


def test_what_is_equal_and_promised_is_exact() -> None:
    status, line = reported("exact", SAME)
    assert status == 0
    assert line.startswith("EXACT: the same request gives the same tokens")


@pytest.mark.parametrize("stated", ["exact", FAST])
def test_checks_that_differ_are_named(stated: str) -> None:
    assert reported(stated, SAME, OTHER) == (1, f"NOT EXACT: forked at 1. The engine says: {stated}.")


def test_nothing_is_called_exact_that_the_engine_does_not_promise() -> None:
    status, line = reported(FAST, SAME)
    assert status == 1
    assert line.startswith("NOT EXACT, though nothing differed here")
    assert line.endswith(f"The engine says: {FAST}.")


@pytest.mark.parametrize(("flags", "status"), [((), 0), (("--fast",), 1)])
def test_a_model_is_audited_in_the_arithmetic_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], status: int
) -> None:
    model = write_tiny(tmp_path / "tiny")
    assert cli.main(["audit", str(model), "--tokens", "8", *flags]) == status
    said = " ".join(capsys.readouterr().out.split())
    assert "resumed from disk" in said
    assert ("EXACT: the same request" in said) is (not flags)
    assert (f"The engine says: {FAST}" in said) is bool(flags)
