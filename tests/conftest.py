"""Settings every test shares."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from onecopy.runtime import blas

# Side by side, test processes have a core each: products spread over all of them would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# How long an example takes says more about the machine than about the code.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")


def pytest_sessionstart() -> None:
    """What is found out about arithmetic is kept for the process, so every test has to run on the same one."""
    blas.install()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command line run inside a test sets levels and handlers; the next test must not see them."""
    ours, root = logging.getLogger("onecopy"), logging.getLogger()
    level, root_level, handlers = ours.level, root.level, list(root.handlers)
    yield
    ours.setLevel(level)
    root.setLevel(root_level)
    root.handlers[:] = handlers
