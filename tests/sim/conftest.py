"""Simulated runs put their own drafter into the lane; what follows in this process gets the real one back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from onecopy.actors import running


@pytest.fixture(autouse=True)
def _real_drafter_afterwards() -> Iterator[None]:
    real = running.drafter_for
    yield
    running.drafter_for = real  # type: ignore[misc]
