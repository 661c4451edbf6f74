"""One checkpoint for all cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.system import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose greedy replies depend on their whole prompt: 512 bytes a row."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))
