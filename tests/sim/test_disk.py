"""What SimDisk loses and what it keeps. A simulated disk that forgives would prove nothing about a store."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest
import trio
from onecopy.runtime.seams import append_all, read_all, replace
from trio.testing import MockClock

from tests.sim.disk import Faults, PowerCut, SimDisk, SimFile

SEEDS = range(200)


@pytest.fixture
def mock_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


def made(data: bytes, *, sync: bool = False, name: bool = True) -> tuple[SimDisk, SimFile]:
    disk = SimDisk()
    file = disk.open_append("/f")
    append_all(file, data)
    if sync:
        file.sync()
    if name:
        disk.sync_dir("/")
    return disk, file


def after_cut(disk: SimDisk, seed: int, path: str = "/f") -> bytes | None:
    disk.cut(random.Random(seed))
    return read_all(disk, path) if disk.exists(path) else None


def outcomes(run: Callable[[int], bytes | None]) -> set[bytes | None]:
    return {run(seed) for seed in SEEDS}


def test_synced_bytes_under_a_synced_name_survive_every_cut() -> None:
    assert outcomes(lambda seed: after_cut(made(b"x" * 2000, sync=True)[0], seed)) == {b"x" * 2000}


def test_unsynced_bytes_are_applied_dropped_torn_or_zeros() -> None:
    seen = outcomes(lambda seed: after_cut(made(b"x" * 1500)[0], seed))
    assert seen == {b"x" * 1500, b"", b"x" * 512, b"x" * 1024, bytes(1500)}


def test_a_dropped_write_below_one_that_was_applied_is_a_hole_of_zeros() -> None:
    def run(seed: int) -> bytes | None:
        disk, file = made(b"aa")
        append_all(file, b"bb")
        return after_cut(disk, seed)

    assert b"\0\0bb" in outcomes(run)


def test_tearing_follows_sectors_of_the_file_and_not_of_the_write() -> None:
    def run(seed: int) -> bytes | None:
        disk, file = made(b"s" * 100, sync=True)
        append_all(file, b"x" * 600)
        return after_cut(disk, seed)

    assert {len(found or b"") for found in outcomes(run)} == {100, 512, 700}


def test_a_name_that_was_not_synced_may_be_lost_with_all_its_synced_bytes() -> None:
    assert outcomes(lambda seed: after_cut(made(b"x", sync=True, name=False)[0], seed)) == {b"x", None}


def test_a_rename_that_was_not_synced_is_kept_or_lost_as_one() -> None:
    def run(seed: int) -> bytes | None:
        disk, _ = made(b"old", sync=True)
        file = disk.open_append("/g")
        append_all(file, b"new")
        file.sync()
        disk.sync_dir("/")
        disk.rename("/g", "/f")
        found = after_cut(disk, seed)
        assert disk.exists("/g") == (found == b"old")
        return found

    assert outcomes(run) == {b"old", b"new"}


def test_an_unlink_that_was_not_synced_may_come_back() -> None:
    def run(seed: int) -> bytes | None:
        disk, _ = made(b"x", sync=True)
        disk.unlink("/f")
        return after_cut(disk, seed)

    assert outcomes(run) == {b"x", None}


def test_a_file_is_lost_with_a_directory_that_was_not_synced() -> None:
    def run(seed: int) -> bytes | None:
        disk = SimDisk()
        disk.mkdir("/a/b")
        file = disk.open_append("/a/b/f")
        append_all(file, b"x")
        file.sync()
        disk.sync_dir("/a/b")
        return after_cut(disk, seed, "/a/b/f")

    assert outcomes(run) == {b"x", None}


def test_syncing_the_directory_a_file_moved_into_settles_where_it_came_from_too() -> None:
    def run(seed: int) -> bytes | None:
        disk = SimDisk()
        disk.mkdir("/q")
        disk.sync_dir("/")
        file = disk.open_append("/f")
        append_all(file, b"x")
        file.sync()
        disk.rename("/f", "/q/f")
        disk.sync_dir("/q")
        assert after_cut(disk, seed) is None
        return read_all(disk, "/q/f")

    assert outcomes(run) == {b"x"}


def test_replace_is_all_or_nothing_at_every_step_of_a_cut() -> None:
    seen = set()
    for cut_after in range(20):
        for seed in range(20):
            disk = SimDisk()
            replace(disk, "/f", b"old" * 400)
            disk.faults.cut_after = disk.medium.calls + cut_after
            try:
                replace(disk, "/f", b"new" * 400)
                done = True
            except PowerCut:
                done = False
            found = after_cut(disk, seed)
            assert found == b"new" * 400 or (found == b"old" * 400 and not done)
            seen.add(found)
    assert len(seen) == 2


def test_a_replace_without_the_file_sync_is_caught() -> None:
    def run(seed: int) -> bytes | None:
        disk, _ = made(b"old", sync=True)
        append_all(disk.open_append("/g"), b"new")
        disk.rename("/g", "/f")
        disk.sync_dir("/")
        return after_cut(disk, seed)

    assert outcomes(run) - {b"old", b"new"}


def test_a_truncate_that_was_not_synced_may_come_back() -> None:
    def run(seed: int) -> bytes | None:
        disk, file = made(b"abcdef", sync=True)
        file.truncate(2)
        return after_cut(disk, seed)

    assert outcomes(run) == {b"abcdef", b"ab"}


def test_bytes_whose_sync_failed_read_well_and_are_never_durable() -> None:
    disk, file = made(b"keep", sync=True)
    append_all(file, b"lost")
    disk.faults.eio = 1.0
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    disk.faults.eio = 0.0
    append_all(file, b"more")
    file.sync()
    assert read_all(disk, "/f") == b"keeplostmore"
    assert after_cut(disk, 1) == b"keep\0\0\0\0more"


def test_one_seed_gives_one_outcome() -> None:
    for seed in range(20):
        assert after_cut(made(b"x" * 1500)[0], seed) == after_cut(made(b"x" * 1500)[0], seed)


def test_after_the_power_went_every_call_fails_until_it_is_back() -> None:
    disk, file = made(b"x", sync=True)
    disk.faults.cut_after = disk.medium.calls + 1
    assert file.pread(0, 1) == b"x"
    for call in (file.sync, file.size, lambda: disk.exists("/f"), lambda: disk.open_append("/g")):
        with pytest.raises(PowerCut):
            call()
    assert after_cut(disk, 1) == b"x"


def test_a_cut_closes_files_and_frees_locks_of_all_processes() -> None:
    disk, file = made(b"x", sync=True)
    other = disk.beside(pid=2)
    assert other.lock("/lock")
    disk.cut(random.Random(1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.pread(0, 1)
    assert disk.lock("/lock")


def test_a_restarted_process_loses_its_files_and_locks_and_no_bytes() -> None:
    disk, file = made(b"x")
    other = disk.beside(pid=2)
    assert disk.lock("/lock")
    kept = other.open_read("/f")
    disk.restart()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.pread(0, 1)
    assert other.lock("/lock")
    assert (kept.pread(0, 1), read_all(disk, "/f")) == (b"x", b"x")


def test_two_processes_see_one_disk_and_one_lock() -> None:
    disk, _ = made(b"x")
    other = disk.beside(pid=2)
    assert (disk.lock("/lock"), other.lock("/lock"), other.lock_owner("/lock")) == (True, False, 1)
    other.unlock("/lock")
    assert not other.lock("/lock")


def test_a_full_disk_takes_what_fits_and_then_nothing() -> None:
    disk = SimDisk(capacity=10)
    file = disk.open_append("/f")
    assert (file.append(b"x" * 8), file.append(b"y" * 8), disk.free_bytes("/")) == (8, 2, 0)
    with pytest.raises(OSError) as caught:
        file.append(b"z")
    assert caught.value.errno == errno.ENOSPC
    file.truncate(4)
    assert (disk.free_bytes("/"), file.append(b"z")) == (6, 1)


def test_a_read_only_disk_reads_and_refuses_every_change() -> None:
    disk, file = made(b"x", sync=True)
    disk.faults.readonly = True
    changes: list[Callable[[], object]] = [
        lambda: file.append(b"y"),
        lambda: file.truncate(0),
        lambda: disk.open_append("/g"),
        lambda: disk.mkdir("/d"),
        lambda: disk.unlink("/f"),
        lambda: disk.rename("/f", "/g"),
    ]
    for change in changes:
        with pytest.raises(OSError, match="Read-only"):
            change()
    assert read_all(disk, "/f") == b"x"


def test_injected_faults_come_at_their_rate_and_short_writes_lose_nothing() -> None:
    disk = SimDisk(Faults(random.Random(3), enospc=0.2, eio=0.2, short=0.5))
    file, codes, written = disk.open_append("/f"), set[int | None](), b""
    for i in range(200):
        data = bytes([i]) * 10
        try:
            written += data[: file.append(data)]
        except OSError as error:
            codes.add(error.errno)
    disk.faults.eio = 0.0
    assert codes == {errno.EIO, errno.ENOSPC}
    assert len(written) % 10 != 0
    assert read_all(disk, "/f") == written


def test_append_all_finishes_over_short_writes() -> None:
    disk = SimDisk(Faults(random.Random(5), short=0.9))
    append_all(disk.open_append("/f"), bytes(range(256)) * 4)
    assert read_all(disk, "/f") == bytes(range(256)) * 4


def test_corruption_is_seen_at_once_and_after_a_cut() -> None:
    disk, _ = made(b"abcdef", sync=True)
    disk.corrupt("/f", 4, b"XYZ")
    assert read_all(disk, "/f") == after_cut(disk, 1) == b"abcdXY"


async def test_a_slow_disk_takes_virtual_time_for_the_bytes_it_moves(mock_clock: MockClock) -> None:
    disk = SimDisk(rate=100.0)
    start = trio.current_time()
    await disk.in_thread(append_all, disk.open_append("/f"), b"x" * 250)
    assert trio.current_time() - start == pytest.approx(2.5)
