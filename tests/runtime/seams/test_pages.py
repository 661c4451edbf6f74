"""Facts of asking for large pages."""

from __future__ import annotations

import subprocess
import sys

import pytest
from onecopy.runtime.seams.pages import ARENAS, HUGE, TUNABLES, wanted

GLIBC = ("glibc", "2.36")
MADVISE = "always [madvise] never"


def test_large_pages_are_asked_for_beside_what_else_is_set() -> None:
    assert wanted({"A": "b"}, GLIBC, MADVISE) == {"A": "b", TUNABLES: f"{HUGE}=1:{ARENAS}=1"}
    found = wanted({TUNABLES: "glibc.malloc.tcache_count=0"}, GLIBC, MADVISE)
    assert found == {TUNABLES: f"glibc.malloc.tcache_count=0:{HUGE}=1:{ARENAS}=1"}


def test_a_user_who_chose_how_many_heaps_there_are_keeps_them() -> None:
    assert wanted({TUNABLES: f"{ARENAS}=4"}, GLIBC, MADVISE) == {TUNABLES: f"{ARENAS}=4:{HUGE}=1"}


@pytest.mark.parametrize("libc", [("glibc", "2.34"), ("musl", "1.2"), ("", "")])
def test_another_c_library_is_not_asked(libc: tuple[str, str]) -> None:
    assert wanted({}, libc, MADVISE) is None


@pytest.mark.parametrize("switch", ["[always] madvise never", "always madvise [never]", ""])
def test_a_kernel_that_gives_them_always_or_never_is_not_asked(switch: str) -> None:
    assert wanted({}, GLIBC, switch) is None


def test_a_user_who_decided_is_left_alone() -> None:
    assert wanted({TUNABLES: f"{HUGE}=0"}, GLIBC, MADVISE) is None


def test_the_command_line_keeps_its_arguments_and_its_exit_code() -> None:
    code = "from onecopy.api.cli import entry; entry()"
    done = subprocess.run([sys.executable, "-c", code, "serve", "--port", "no"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--port" in done.stderr
