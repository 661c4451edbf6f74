"""docs/models.md names the architectures that the zoo covers, and those it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.zoo import REFUSED, SERVED

TEXT = (Path(__file__).parents[1] / "docs" / "models.md").read_text()


@pytest.mark.parametrize(("part", "kinds"), [("served", SERVED), ("refused", REFUSED)])
def test_the_lists_are_those_of_the_zoo(part: str, kinds: dict[str, object]) -> None:
    found = re.search(f"<!-- {part}: begin -->(.*?)<!-- {part}: end -->", TEXT, re.DOTALL)
    assert found is not None
    assert re.findall(r"`(\w+)`", found[1]) == list(kinds)
