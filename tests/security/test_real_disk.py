"""A disk that is really full, in a process of its own: what was acknowledged stays, and the rest is said to fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from onecopy.runtime.seams import RealDisk
from onecopy.runtime.store import RowsOnDisk

from tests.support.rows import DAY, PRINT, records_of, same, talk

resource = pytest.importorskip("resource")

WRITER = """
import resource, signal, sys
from onecopy.runtime.seams import RealDisk
from onecopy.runtime.store import RowsOnDisk
from tests.support.rows import PRINT, records_of, talk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = RowsOnDisk.open(RealDisk(), sys.argv[1], fingerprint=PRINT, wall=lambda: 1.7e9, floor=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
for seed in range(1000):
    try:
        store.put(records_of(talk(seed, 300)))
    except OSError as error:
        print("failed", error.errno, flush=True)
        break
    print(seed, flush=True)
store.read(records_of(talk(0, 300))[0].key).key
"""


@pytest.mark.parametrize("limit", [20_000, 61_003, 100_000])
def test_a_disk_that_takes_no_more_loses_nothing_it_took(tmp_path: Path, limit: int) -> None:
    path = str(tmp_path / "store")
    command = [sys.executable, "-c", WRITER, path, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)
    assert done.returncode == 0, done.stderr
    *acknowledged, last = done.stdout.split("\n")[:-1]
    assert acknowledged
    assert last.startswith("failed")
    store = RowsOnDisk.open(RealDisk(), path, fingerprint=PRINT, wall=lambda: DAY, floor=0)
    for seed in map(int, acknowledged):
        assert all(same(store, record) for record in records_of(talk(seed, 300)))
    assert store.verify().bad == 0
    store.put(records_of(talk(5000, 300)))
    store.close()
