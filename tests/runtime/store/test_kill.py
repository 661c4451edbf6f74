"""A real process on a real directory, killed at moments of a seed's choosing."""

import random
import subprocess
import sys
import time
from pathlib import Path

from onecopy.runtime.seams import RealDisk
from onecopy.runtime.store import RowsOnDisk

from tests.support.rows import PRINT, records_of, same, talk

WRITER = """
import sys, time
from onecopy.runtime.seams import RealDisk
from onecopy.runtime.store import RowsOnDisk
from tests.support.rows import PRINT, records_of, talk
store = RowsOnDisk.open(RealDisk(), sys.argv[1], fingerprint=PRINT, wall=time.time, floor=0, quota=1 << 22)
for seed in range(int(sys.argv[2]), 1 << 30):
    store.put(records_of(talk(seed, 600), anchor=True))
    print(seed, flush=True)
    store.sweep_step(dead=0.05)
"""


def test_every_acknowledged_record_survives_a_kill_at_any_moment(tmp_path: Path) -> None:
    path, rng, seed = str(tmp_path / "store"), random.Random(4), 0
    for _ in range(8):
        first = seed
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        ) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randrange(1, 12)):
                seed = int(writer.stdout.readline()) + 1
            writer.kill()
            rest = writer.stdout.read().split("\n")[:-1]
        seed = max([seed, *(int(line) + 1 for line in rest)])
        store = RowsOnDisk.open(RealDisk(), path, fingerprint=PRINT, wall=time.time, floor=0, quota=1 << 22)
        assert not store.read_only
        for acknowledged in range(first, seed):
            assert all(same(store, record) for record in records_of(talk(acknowledged, 600), anchor=True))
        assert store.verify().bad == 0
        store.close()
