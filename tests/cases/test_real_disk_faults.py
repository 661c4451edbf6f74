"""Real disks that fail: a small tmpfs that fills up, and a directory that nobody may write any more.

The server runs in namespaces of its own, or without the right to pass over permissions. Its retries are hurried, and
the free-disk floor is taken away so that the disk itself says no.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.children import CLI, Child, child, stopped
from tests.support.system import PATIENCE, Reply, body, system_text, user

BLOCK = 256
TEXT = "".join(random.Random(8).choices("abcdefghijklmnopqrstuvwxyz ,.", k=20 * BLOCK))
HURRIED = f"""
from onecopy.actors import keeping, stager
from onecopy.runtime.store import RowsOnDisk
keeping.RETRY, stager.BACKOFF = 0.2, (0.05, 0.1)
RowsOnDisk.open.__func__.__kwdefaults__["floor"] = -1 << 40
{CLI}
"""
NAMESPACE = ("unshare", "-rmpf", "--kill-child")
ON_A_SMALL_DISK = """
dir=$1 flags=$2; shift 2
mount -t tmpfs -o size=4m tmpfs "$dir" || exit 77
"$@" & server=$!
while [ ! -e "$flags/grow" ]; do sleep 0.05; done
mount -o remount,size=64m "$dir"
while [ ! -e "$flags/stop" ]; do sleep 0.05; done
kill -TERM $server; wait $server; code=$?
cp -r "$dir/." "$flags/kept"
exit $code
"""
BOUND = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")

pytestmark = pytest.mark.slow


def works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def about(seed: int) -> list[dict[str, Any]]:
    """A conversation of two blocks and a half, another for each seed."""
    return [system_text(f"{seed} {TEXT[: int(2.5 * BLOCK)]}"), user("go on")]


async def status(server: Child) -> dict[str, Any]:
    return dict((await server.http.get("/health")).json())


async def until(server: Child, wanted: str) -> dict[str, Any]:
    """The health once its status is the one wanted."""
    with trio.fail_after(PATIENCE):
        while (found := await status(server))["status"] != wanted:
            await trio.sleep(0.05)
    return found


async def fill(server: Child) -> list[Reply]:
    """Replies of conversations until one cannot be kept. All of them are served."""
    replies: list[Reply] = []
    while (await status(server))["status"] == "ok":
        assert len(replies) < 60, "4 MiB take less"
        replies.append(await server.ask(body(*about(len(replies)))))
        await trio.sleep(0.05)
    return replies


@pytest.mark.skipif(not works(*NAMESPACE, "true"), reason="no user namespaces here")
async def test_a_disk_that_fills_up_loses_nothing_and_is_used_again_once_it_has_room(
    tiny: Path, tmp_path: Path
) -> None:
    disk, flags = tmp_path / "disk", tmp_path / "flags"
    (flags / "kept").mkdir(parents=True)
    disk.mkdir()
    before = (*NAMESPACE, "sh", "-c", ON_A_SMALL_DISK, "sh", str(disk), str(flags))
    async with child(tiny, f"{disk}/store", "--store-quota", "1GiB", before=before, cli=HURRIED) as server:
        replies = await fill(server)
        found = await until(server, "degraded")
        assert found["details"]["persisting"] is False
        assert any("No space left" in reason for reason in found["reasons"]), found
        replies += [await server.ask(body(*about(100 + i))) for i in range(3)]
        assert sum("not on disk yet" in line for line in server.log) == 1
        (flags / "grow").touch()
        await until(server, "ok")
        (flags / "stop").touch()
        assert await server.ended() == 0, server.log[-5:]
    seeds = [*range(len(replies) - 3), 100, 101, 102]
    async with child(tiny, f"{flags}/kept/store", cli=HURRIED) as server:
        for seed, first in zip(seeds, replies, strict=True):
            again = await server.ask(body(*about(seed)))
            assert again.said == first.said
            assert again.cached >= 2 * BLOCK
        await stopped(server)


@pytest.mark.skipif(not works(*BOUND, "true"), reason="capabilities cannot be given up here")
async def test_a_directory_that_may_not_be_written_any_more_costs_no_answer_and_is_used_again(
    tiny: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    async with child(tiny, str(store), before=BOUND, cli=HURRIED) as server:
        store.chmod(0o500)
        first = await server.ask(body(*about(1)))
        found = await until(server, "degraded")
        assert any("Permission denied" in reason for reason in found["reasons"]), found
        assert (await server.ask(body(*about(2)))).tokens
        store.chmod(0o700)
        await until(server, "ok")
        await stopped(server)
    async with child(tiny, str(store), before=BOUND, cli=HURRIED) as server:
        again = await server.ask(body(*about(1)))
        assert (again.said, again.cached >= 2 * BLOCK) == (first.said, True)
        await stopped(server)


@pytest.mark.skipif(not works(*BOUND, "true"), reason="capabilities cannot be given up here")
async def test_a_directory_that_may_not_be_written_at_the_start_is_one_clear_line(tiny: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o500)
    server = Child(tiny, "--store", str(store), before=BOUND)
    assert await server.ended() == 2
    assert str(store) in server.log[-1]
    assert "Traceback" not in "".join(server.log)
    assert server.process.stderr is not None
    server.process.stderr.close()
