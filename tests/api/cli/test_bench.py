"""`onecopy bench drafts`: it runs in the arithmetic asked for, and says which."""

from __future__ import annotations

from pathlib import Path

import pytest
from onecopy.api import cli

from tests.support.system import write_tiny


@pytest.mark.parametrize(
    ("flags", "arithmetic"), [((), "arithmetic: exact"), (("--fast",), "arithmetic: not exact: chosen by --fast")]
)
def test_drafts_are_measured_in_the_arithmetic_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], arithmetic: str
) -> None:
    model = write_tiny(tmp_path / "tiny")
    cli.main(["bench", "drafts", str(model), "--quick", "--tokens", "8", *flags])
    assert arithmetic in " ".join(capsys.readouterr().out.split())
