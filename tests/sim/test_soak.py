"""The soak, for seconds instead of an hour: everything comes back to where it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from tests.sim.soak import Level, soak


@pytest.mark.slow
def test_nothing_is_left_of_clients_that_went() -> None:
    done, wrong = trio.run(soak, 6.0)
    assert wrong == []
    assert {"say", "stream", "leave"} <= set(done.did)


def test_what_stays_is_named() -> None:
    level = Level(100 << 20, 10, 20, 3, 0, 0)
    worse = replace(level, memory=300 << 20, handles=13, tasks=21, row_bytes=1)
    assert [s.split(" grew")[0] for s in worse.above(level)] == ["memory", "handles", "tasks", "row_bytes"]
    assert level.above(level) == []
