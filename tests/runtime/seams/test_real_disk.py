"""What only the real disk can show: other processes, file descriptors, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from onecopy.runtime.seams import RealDisk, append_all

HOLD = """
import sys
from onecopy.runtime.seams import RealDisk
print(RealDisk().lock(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_another_process_cannot_take_a_held_lock_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    lock, disk = tmp_path / "lock", RealDisk()
    with holder(lock) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "True\n"
        assert not disk.lock(lock)
        assert disk.lock_owner(lock) == first.pid
        first.kill()
    assert disk.lock(lock)
    assert disk.lock_owner(lock) == os.getpid()
    disk.unlock(lock)


def test_a_refused_lock_leaks_no_descriptor(tmp_path: Path) -> None:
    one, other = RealDisk(), RealDisk()
    assert one.lock(tmp_path / "lock")
    before = len(os.listdir("/dev/fd"))
    assert not any(other.lock(tmp_path / "lock") for _ in range(5))
    assert len(os.listdir("/dev/fd")) == before
    one.unlock(tmp_path / "lock")


def test_a_lock_in_a_directory_without_permission_is_an_error_and_not_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        RealDisk().lock(tmp_path / "missing" / "lock")


def test_modes_do_not_depend_on_a_wide_umask(tmp_path: Path) -> None:
    disk, before = RealDisk(), os.umask(0)
    try:
        disk.mkdir(tmp_path / "d")
        disk.open_append(tmp_path / "d" / "f").close()
    finally:
        os.umask(before)
    assert [disk.stat(tmp_path / name).mode for name in ("d", "d/f")] == [0o700, 0o600]


def test_a_write_larger_than_one_call_takes_is_appended_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onecopy.runtime.seams.real_disk._MOST", 1000)
    file, data = RealDisk().open_append(tmp_path / "f"), os.urandom(4500)
    assert file.append(data) == 1000
    append_all(file, data[1000:])
    assert file.pread(0, 4500) == data
    file.close()


def test_reads_that_take_less_than_was_asked_go_on_in_the_middle_of_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv

    def little(fd: int, buffers: list[memoryview], offset: int) -> int:
        return whole(fd, [buffers[0][:300]], offset)

    monkeypatch.setattr("onecopy.runtime.seams.real_disk._MOST", 1000)
    file, data = RealDisk().open_append(tmp_path / "f"), os.urandom(4500)
    for start in range(0, 4500, 1000):
        append_all(file, data[start : start + 1000])
    for read in (whole, little):
        monkeypatch.setattr(os, "preadv", read)
        buffers = [bytearray(n) for n in (7, 1500, 0, 1, 800, 2500)]
        assert file.pread_into_all(100, [memoryview(b) for b in buffers]) == 4400
        assert b"".join(buffers)[:4400] == data[100:]
    file.close()


async def test_in_thread_leaves_the_event_loop(tmp_path: Path) -> None:
    assert await RealDisk().in_thread(threading.get_ident) != threading.get_ident()
