"""Cases B5, D3, D10, D11 and what a rows store promises inside a running server."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from onecopy.actors import keeping, stager
from onecopy.actors import system as root
from onecopy.actors.messages.stager import SaveReport
from onecopy.actors.stager import Permit
from onecopy.runtime.errors import StoreUnusable
from onecopy.runtime.rows.layout import Layout
from onecopy.runtime.store import cold_charge

from tests.support.faults import FaultyDisk
from tests.support.system import Reply, Whole, body, eventually, grown, serving, system_text, user

BLOCK = 256
ROW = 512
TEXT = "".join(random.Random(4).choices("abcdefghijklmnopqrstuvwxyz ,.", k=20 * BLOCK))


def about(blocks: float, seed: int = 0) -> list[dict[str, Any]]:
    """Messages of about so many blocks, other ones for each seed."""
    return [system_text(f"{seed} {TEXT[: int(blocks * BLOCK)]}"), user("go on")]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that failed is tried again at once, and the bank looks after its saves all the time."""
    monkeypatch.setattr(stager, "BACKOFF", (0.01, 0.02))
    monkeypatch.setattr(keeping, "RETRY", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


async def saved(whole: Whole) -> dict[str, Any]:
    """The stager's numbers once nothing is being saved."""
    await whole.at_rest()

    async def done() -> bool:
        return not (await whole.numbers())["stager"]["saving"]

    await eventually(done)
    return dict((await whole.numbers())["stager"])


async def health(whole: Whole) -> dict[str, Any]:
    return dict((await whole.http.get("/health")).json())


# --- kept over a restart


async def test_a_restart_goes_on_from_the_last_row_and_answers_as_a_cold_run(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store) as whole:
        first = await whole.ask(body(*about(4.5)))
    again = grown(about(4.5), first, "and then?")
    async with serving(tiny, store=store) as whole:
        reply = await whole.ask(body(*again))
        assert reply.said == (await whole.cold(body(*again))).said
    assert reply.onecopy["how"] == "restored"
    assert reply.cached >= first.prompt + len(first.tokens) - 1


async def test_the_same_prompt_again_after_a_restart_is_evaluated_by_one_block_at_most(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store) as whole:
        first = await whole.ask(body(*about(4.5)))
    async with serving(tiny, store=store) as whole:
        again = await whole.ask(body(*about(4.5)))
    assert again.said == first.said
    assert first.prompt - BLOCK <= again.cached < first.prompt


@pytest.mark.parametrize("permit", [4096, 6 * BLOCK * ROW - 1])
async def test_b5_a_conversation_larger_than_the_permit_is_kept_whole(
    tiny: Path, store: str, monkeypatch: pytest.MonkeyPatch, permit: int
) -> None:
    monkeypatch.setattr(root, "permit", lambda *_: permit)
    talk = about(4)
    async with serving(tiny, store=store) as whole:
        for turn in range(6):
            reply = await whole.ask(body(*talk))
            talk = grown(talk, reply, f"{turn} {TEXT[:BLOCK]}")
        assert (await saved(whole))["dirty"] == {}
    async with serving(tiny, store=store) as whole:
        last = await whole.ask(body(*talk))
        assert last.cached >= reply.prompt - BLOCK
        assert last.said == (await whole.cold(body(*talk))).said


async def test_thirty_turns_write_the_rows_of_the_final_state_once(tiny: Path, store: str) -> None:
    disk, talk = FaultyDisk(), about(1)
    async with serving(tiny, store=store, disk=disk) as whole:
        for turn in range(30):
            reply = await whole.ask(body(*talk, max_tokens=4))
            talk = grown(talk, reply, f"{turn} {TEXT[: BLOCK // 2]}")
            await saved(whole)
        rows = reply.prompt // BLOCK * BLOCK
        assert rows * ROW <= disk.written <= 1.05 * rows * ROW


async def test_a_receipt_says_what_was_written_since_the_turn_before(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store) as whole:
        first = await whole.ask(body(*about(3.5)))
        await saved(whole)
        second = await whole.ask(body(*grown(about(3.5), first, "and then?")))
        assert first.onecopy["bytes_written"] == 0
        assert 3 * BLOCK * ROW <= second.onecopy["bytes_written"] <= 1.05 * 3 * BLOCK * ROW
        assert "onecopy_bytes_written_total" in (await whole.http.get("/metrics")).text


# --- D3


def failing_rounds(whole: Whole, times: int) -> list[int]:
    """The next rounds raise; returns the list that counts them down."""
    left, run = [times], whole.system._engine.run

    def failing(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("these rows cannot be computed on")
        return run(*args)

    whole.system._engine.run = failing  # type: ignore[method-assign]
    return left


@pytest.mark.parametrize("stream", [False, True])
async def test_d3_rows_whose_first_round_fails_are_given_up_and_the_request_is_done_cold_in_the_same_call(
    tiny: Path, store: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tiny, store=store) as whole:
        first = await whole.ask(body(*about(3.5)))
    async with serving(tiny, store=store) as whole:
        left = failing_rounds(whole, 1)
        reply = await (whole.streamed if stream else whole.ask)(body(*about(3.5)))
        assert left == [0]
        assert reply.said == first.said
        assert reply.cached == reply.onecopy["rows_restored"] == 0
        assert "given up" in caplog.text
        again = await whole.ask(body(*about(3.5)))
        assert again.cached == again.prompt - 1
        await saved(whole)
    async with serving(tiny, store=store) as whole:
        later = await whole.ask(body(*about(3.5)))
        assert later.onecopy["rows_restored"] > 0
        assert later.said == first.said


async def test_d3_a_round_on_computed_rows_that_fails_is_an_error_that_says_retry(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store) as whole:
        failing_rounds(whole, 1)
        answer = await whole.post(body(*about(3.5)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "lane_crashed")
        assert (await whole.ask(body(*about(3.5)))).tokens


async def test_d3_a_history_whose_text_makes_other_tokens_is_judged_by_tokens(tiny: Path, store: str) -> None:
    plain: dict[str, Any] = {"logit_bias": None, "max_tokens": 24}
    talk = about(2.5)
    before: Reply | None = None
    for turn in range(5):
        async with serving(tiny, store=store) as whole:
            reply = await whole.ask(body(*talk, **plain))
            assert reply.said == (await whole.cold(body(*talk, **plain))).said
        if before is not None:
            assert reply.cached >= before.prompt // BLOCK * BLOCK
        talk, before = grown(talk, reply, f"turn {turn} {TEXT[:200]}"), reply


# --- D10


async def test_d10_a_slow_disk_slows_nobody_writes_each_row_once_and_loses_nothing(tiny: Path, store: str) -> None:
    disk, talk = FaultyDisk(speed=1 << 20), about(1)
    async with serving(tiny, store=store, disk=disk, drain=60.0) as whole:
        for turn in range(10):
            reply, other = await whole.together([body(*talk), body(*about(0.5, seed=turn + 1))])
            talk = grown(talk, reply, f"{turn} {TEXT[:BLOCK]}")
            staged = (await whole.numbers())["stager"]
            assert staged["staged_bytes"] <= staged["permit_bytes"]
            assert (await whole.numbers())["rows store"]["waiting"] < 32
    rows = reply.prompt + len(reply.tokens) + 10 * (other.prompt + len(other.tokens))
    assert disk.written <= 1.1 * rows * ROW + 12 * 4096
    async with serving(tiny, store=store) as whole:
        again = await whole.ask(body(*talk))
        assert again.cached >= reply.prompt
        assert again.said == (await whole.cold(body(*talk))).said


async def test_d10_answers_go_on_while_a_write_hangs_and_the_rows_are_written_when_it_ends(
    tiny: Path, store: str
) -> None:
    disk = FaultyDisk()
    async with serving(tiny, store=store, disk=disk) as whole:
        disk.open.clear()
        try:
            replies = [await whole.ask(body(*about(2.5, seed=i))) for i in range(6)]
            assert (await whole.numbers())["stager"]["saving"]
        finally:
            disk.open.set()
        assert (await saved(whole))["dirty"] == {}
    async with serving(tiny, store=store) as whole:
        for i, before in enumerate(replies):
            again = await whole.ask(body(*about(2.5, seed=i)))
            assert again.said == before.said
            assert again.cached >= 2 * BLOCK


# --- D11


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
async def test_d11_a_disk_that_takes_nothing_is_said_so_and_saving_resumes_when_it_does(
    tiny: Path, store: str, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    async with serving(tiny, store=store, disk=disk) as whole:
        kept = await whole.ask(body(*about(2.5, seed=1)))
        await saved(whole)
        disk.fail = error
        with caplog.at_level(logging.WARNING, "onecopy.store"):
            while_full = [await whole.ask(body(*about(2.5, seed=i))) for i in (2, 3)]
            numbers = await saved(whole)
        assert numbers["failures"] > 0
        assert caplog.text.count("not on disk yet") == 1
        found = await health(whole)
        assert (found["status"], found["details"]["persisting"]) == ("degraded", False)
        disk.fail = None

        async def persisting() -> bool:
            return (await health(whole))["status"] == "ok" and not (await whole.numbers())["stager"]["dirty"]

        await eventually(persisting)
    async with serving(tiny, store=store) as whole:
        for i, before in enumerate([kept, *while_full], 1):
            again = await whole.ask(body(*about(2.5, seed=i)))
            assert again.said == before.said
            assert again.cached >= 2 * BLOCK


async def another_second() -> None:
    begun = int(time.time())

    async def over() -> bool:
        return int(time.time()) > begun

    await eventually(over)


async def test_d11_a_full_quota_keeps_what_is_used_and_answers_go_on(tiny: Path, store: str) -> None:
    quota = 4 << 20
    async with serving(tiny, store=store, store_quota=quota) as whole:
        for i in range(20):
            if i == 19:
                await another_second()  # uses are known to the second, and those of one second go in any order
            await whole.ask(body(*about(3, seed=i), max_tokens=2))
            await saved(whole)
        numbers = (await whole.numbers())["rows store"]
        assert numbers["disk_bytes"] <= quota
        assert numbers["evicted"] > 0
        last = await whole.ask(body(*about(3, seed=19)))
    async with serving(tiny, store=store, store_quota=quota) as whole:
        again = await whole.ask(body(*about(3, seed=19)))
        assert again.said == last.said
        assert again.onecopy["rows_restored"] >= 3 * BLOCK
        first = await whole.ask(body(*about(3, seed=0)))
        assert first.said == (await whole.cold(body(*about(3, seed=0)))).said


async def test_d11_a_conversation_larger_than_the_quota_keeps_the_prefix_that_fits(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store, store_quota=1 << 20) as whole:
        first = await whole.ask(body(*about(12)))
        await saved(whole)
        assert (await health(whole))["status"] == "degraded"
    async with serving(tiny, store=store, store_quota=1 << 20) as whole:
        again = await whole.ask(body(*about(12)))
        assert again.said == first.said
        assert again.onecopy["rows_restored"] >= 4 * BLOCK


async def test_d11_a_directory_removed_while_running_is_made_anew(tiny: Path, store: str) -> None:
    async with serving(tiny, store=store) as whole:
        await whole.ask(body(*about(2.5, seed=1)))
        await saved(whole)
        shutil.rmtree(store)
        before = await whole.ask(body(*about(2.5, seed=2)))
        assert (await saved(whole))["dirty"] == {}
    async with serving(tiny, store=store) as whole:
        again = await whole.ask(body(*about(2.5, seed=2)))
        assert again.said == before.said
        assert again.onecopy["rows_restored"] >= 2 * BLOCK


async def test_d11_a_path_that_is_a_file_is_a_clear_error_at_the_start(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StoreUnusable, match=str(path)):
        async with serving(tiny, store=str(path)):
            raise AssertionError("must not start")
    assert path.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
async def test_d11_a_directory_nobody_may_write_is_a_clear_error_at_the_start(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "closed"
    path.mkdir(mode=0o500)
    with pytest.raises(StoreUnusable, match=str(path)):
        async with serving(tiny, store=str(path)):
            raise AssertionError("must not start")


# --- giving rows up


async def test_an_idle_conversation_is_saved_before_its_rows_are_given_up(tiny: Path, store: str) -> None:
    disk = FaultyDisk()
    async with serving(tiny, store=store, disk=disk, rows=14 * BLOCK * ROW) as whole:
        replies = [await whole.ask(body(*about(3.5, seed=i))) for i in range(6)]
        assert (await whole.numbers())["bank"]["dropped"] > 0
        for i in (0, 5, 3):
            again = await whole.ask(body(*about(3.5, seed=i)))
            assert again.said == replies[i].said
            assert again.cached >= 3 * BLOCK


async def test_no_answer_waits_for_a_disk_that_fails_when_memory_is_short(tiny: Path, store: str) -> None:
    disk = FaultyDisk()
    async with serving(tiny, store=store, disk=disk, rows=14 * BLOCK * ROW) as whole:
        disk.fail = errno.EIO
        for i in range(6):
            assert (await whole.ask(body(*about(3.5, seed=i)))).tokens
        assert (await whole.numbers())["bank"]["dropped"] > 0


async def test_a_save_that_hangs_is_left_behind_when_a_turn_needs_the_memory(
    tiny: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "PATIENCE", 0.05)
    disk = FaultyDisk()
    async with serving(tiny, store=store, disk=disk, rows=9 * BLOCK * ROW) as whole:
        disk.open.clear()
        try:
            with trio.fail_after(30):
                for i in range(4):
                    assert (await whole.ask(body(*about(3.5, seed=i)))).tokens
        finally:
            disk.open.set()


# --- the end of a process


async def test_rows_that_a_stop_has_no_time_for_are_named(
    tiny: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    async with serving(tiny, store=store, disk=disk, drain=0.2) as whole:
        reply = await whole.ask(body(*about(2.5)))
        await saved(whole)
        disk.open.clear()
        trio.lowlevel.spawn_system_task(_open_later, disk)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("stopping:")]
    assert len(lines) == 1
    assert reply.onecopy["session"] in lines[0]
    async with serving(tiny, store=store) as whole:
        again = await whole.ask(body(*about(2.5)))
        assert again.said == reply.said
        assert again.onecopy["rows_restored"] >= 2 * BLOCK


async def _open_later(disk: FaultyDisk) -> None:
    await trio.sleep(1.0)
    disk.open.set()


# --- the permit, over the layout of a served model


async def staged_save(
    tiny: Path, store: str, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> tuple[SaveReport, int, int, int]:
    """A cold save of a conversation under a permit (None: of its own cold charge): its report, the most bytes that were
    staged at once, its cold charge, and the charge of saving another turn."""
    layout: list[Layout] = []

    def sized(context: int, of: Layout, budget: int) -> int:
        layout.append(of)
        return size or cold_charge(6 * BLOCK + 60, of) or 0

    monkeypatch.setattr(root, "permit", sized)
    reports, most, take = list[SaveReport](), [0], Permit.take

    @asynccontextmanager
    async def watched(self: Permit, n: int) -> AsyncIterator[None]:
        async with take(self, n):
            most.append(self.used)
            yield

    monkeypatch.setattr(Permit, "take", watched)
    monkeypatch.setattr(stager, "_log_save", lambda owner, report: reports.append(report))
    async with serving(tiny, store=store) as whole:
        reply = await whole.ask(body(*about(6)))
        await saved(whole)
        first, cold = max(most), cold_charge(reply.prompt + len(reply.tokens), layout[0])
        most.clear()
        await whole.ask(body(*grown(about(6), reply, TEXT[: 2 * BLOCK])))
        await saved(whole)
        second = max(most)
    assert cold is not None
    return reports[0], first, cold, second


async def test_a_permit_for_a_state_stages_its_cold_save_whole_and_the_next_save_only_what_is_new(
    tiny: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, first, cold, second = await staged_save(tiny, store, monkeypatch, None)
    assert (report.complete, report.windows, report.blocks) == (True, 1, 6)
    assert report.written <= first <= cold
    assert second < first / 2


async def test_under_a_small_permit_the_same_save_is_written_in_windows(
    tiny: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, first, cold, _ = await staged_save(tiny, store, monkeypatch, 500_000)
    assert (report.complete, report.blocks) == (True, 6)
    assert report.windows > 1
    assert first <= 500_000 < cold
