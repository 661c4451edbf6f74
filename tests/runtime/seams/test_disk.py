"""What the real disk and the simulated one both promise: one suite, run against each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from onecopy.runtime.seams import Disk, RealDisk, append_all, read_all, replace

from tests.sim.disk import SimDisk


@pytest.fixture(params=["real", "sim"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    if request.param == "real":
        return RealDisk()
    sim = SimDisk(clock=lambda: 1.0)
    sim.mkdir(tmp_path)
    return sim


def write(disk: Disk, path: Path, data: bytes) -> None:
    file = disk.open_append(path)
    append_all(file, data)
    file.close()


def test_appended_bytes_are_read_back_at_their_offsets(disk: Disk, tmp_path: Path) -> None:
    file = disk.open_append(tmp_path / "pack")
    append_all(file, b"hello ")
    append_all(file, bytearray(b"world"))
    assert (file.size(), file.pread(0, 5), file.pread(6, 100)) == (11, b"hello", b"world")


def test_a_read_past_the_end_is_short_and_never_an_error(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "pack", b"abc")
    file = disk.open_read(tmp_path / "pack")
    assert (file.pread(2, 10), file.pread(3, 10), file.pread(99, 1), file.pread(0, 0)) == (b"c", b"", b"", b"")


def test_pread_into_fills_a_buffer_in_place(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "pack", b"0123456789")
    file, buffer = disk.open_read(tmp_path / "pack"), bytearray(6)
    assert file.pread_into(2, memoryview(buffer)[:4]) == 4
    assert bytes(buffer) == b"2345\0\0"
    assert file.pread_into(8, buffer) == 2
    assert bytes(buffer) == b"8945\0\0"


def test_reopening_for_append_continues_at_the_end(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "log", b"one")
    write(disk, tmp_path / "log", b"two")
    assert read_all(disk, tmp_path / "log") == b"onetwo"


def test_an_append_after_a_truncate_lands_at_the_new_end(disk: Disk, tmp_path: Path) -> None:
    file = disk.open_append(tmp_path / "log")
    append_all(file, b"0123456789")
    file.truncate(4)
    append_all(file, b"x")
    assert read_all(disk, tmp_path / "log") == b"0123x"


def test_a_truncate_upwards_adds_zeros(disk: Disk, tmp_path: Path) -> None:
    file = disk.open_append(tmp_path / "log")
    append_all(file, b"ab")
    file.truncate(4)
    assert file.pread(0, 10) == b"ab\0\0"


def test_syncs_of_files_and_directories_succeed(disk: Disk, tmp_path: Path) -> None:
    file = disk.open_append(tmp_path / "log")
    append_all(file, b"ab")
    file.sync()
    file.datasync()
    disk.sync_dir(tmp_path)
    assert file.pread(0, 2) == b"ab"


def test_files_are_private_and_so_are_directories(disk: Disk, tmp_path: Path) -> None:
    disk.mkdir(tmp_path / "a" / "b")
    write(disk, tmp_path / "a" / "b" / "f", b"x")
    modes = [disk.stat(tmp_path / name).mode for name in ("a", "a/b", "a/b/f")]
    assert modes == [0o700, 0o700, 0o600]


def test_stat_tells_size_kind_and_a_write_time(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f", b"12345")
    found = disk.stat(tmp_path / "f")
    assert (found.size, found.is_dir, disk.stat(tmp_path).is_dir) == (5, False, True)
    assert found.mtime > 0


def test_making_a_directory_twice_is_fine_and_making_it_over_a_file_is_not(disk: Disk, tmp_path: Path) -> None:
    disk.mkdir(tmp_path / "d")
    disk.mkdir(tmp_path / "d")
    write(disk, tmp_path / "f", b"")
    with pytest.raises(NotADirectoryError):
        disk.mkdir(tmp_path / "f")


def test_a_listing_has_the_names_of_one_level_sorted(disk: Disk, tmp_path: Path) -> None:
    disk.mkdir(tmp_path / "b" / "inner")
    write(disk, tmp_path / "c", b"")
    write(disk, tmp_path / "a", b"")
    assert disk.listdir(tmp_path) == ["a", "b", "c"]
    assert disk.listdir(tmp_path / "b") == ["inner"]


def test_a_rename_replaces_its_target_and_open_files_follow(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "old", b"old")
    file = disk.open_append(tmp_path / "new")
    append_all(file, b"new")
    disk.rename(tmp_path / "new", tmp_path / "old")
    append_all(file, b"er")
    assert (disk.listdir(tmp_path), read_all(disk, tmp_path / "old")) == (["old"], b"newer")


def test_a_file_moves_between_directories(disk: Disk, tmp_path: Path) -> None:
    disk.mkdir(tmp_path / "quarantine")
    write(disk, tmp_path / "f", b"x")
    disk.rename(tmp_path / "f", tmp_path / "quarantine" / "f")
    assert (disk.exists(tmp_path / "f"), disk.exists(tmp_path / "quarantine" / "f")) == (False, True)


def test_an_unlinked_file_is_gone_by_name_and_readable_while_open(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "f", b"still here")
    file = disk.open_read(tmp_path / "f")
    disk.unlink(tmp_path / "f")
    assert not disk.exists(tmp_path / "f")
    assert file.pread(0, 5) == b"still"


Call = Callable[[Disk, Path], object]
MISSING: list[Call] = [
    lambda disk, path: disk.open_read(path),
    lambda disk, path: disk.open_append(path / "below"),
    lambda disk, path: disk.unlink(path),
    lambda disk, path: disk.rename(path, path),
    lambda disk, path: disk.stat(path),
    lambda disk, path: disk.listdir(path),
    lambda disk, path: disk.sync_dir(path),
    lambda disk, path: disk.free_bytes(path),
]


@pytest.mark.parametrize("call", MISSING)
def test_a_missing_name_is_a_file_not_found_error(disk: Disk, tmp_path: Path, call: Call) -> None:
    with pytest.raises(FileNotFoundError):
        call(disk, tmp_path / "missing")


def test_a_closed_file_refuses_and_closing_again_is_fine(disk: Disk, tmp_path: Path) -> None:
    file = disk.open_append(tmp_path / "f")
    file.close()
    file.close()
    for call in (lambda: file.append(b"x"), lambda: file.pread(0, 1), file.size, file.sync):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()


def test_free_bytes_is_a_positive_number(disk: Disk, tmp_path: Path) -> None:
    assert disk.free_bytes(tmp_path) > 0


def test_a_lock_is_exclusive_names_its_holder_and_can_be_taken_again(disk: Disk, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert disk.lock_owner(lock) is None
    assert disk.lock(lock)
    owner = disk.lock_owner(lock)
    assert owner is not None
    assert owner > 0
    assert not disk.lock(lock)
    disk.unlock(lock)
    assert disk.lock_owner(lock) is None
    assert disk.lock(lock)
    disk.unlock(lock)


def test_unlocking_what_is_not_held_does_nothing(disk: Disk, tmp_path: Path) -> None:
    disk.unlock(tmp_path / "lock")
    assert not disk.exists(tmp_path / "lock")


def test_replace_leaves_the_new_bytes_and_nothing_else(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "state.part", b"left over from a crash")
    replace(disk, tmp_path / "state", b"one")
    assert read_all(disk, tmp_path / "state") == b"one"
    replace(disk, tmp_path / "state", b"second")
    assert (disk.listdir(tmp_path), read_all(disk, tmp_path / "state")) == (["state"], b"second")


async def test_in_thread_returns_results_and_raises_errors(disk: Disk, tmp_path: Path) -> None:
    await disk.in_thread(write, disk, tmp_path / "f", b"abc")
    assert await disk.in_thread(read_all, disk, tmp_path / "f") == b"abc"
    with pytest.raises(FileNotFoundError):
        await disk.in_thread(disk.open_read, tmp_path / "missing")
