"""Every benchmark runs to its end on a tiny model and leaves tables that the report can read. No figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.elsewhere import compiler
from tests.support.heads import write_block_drafter, write_with_mtp
from tests.support.system import write_tiny

ROOT = Path(__file__).parents[1]
CLI = "import sys; from onecopy.api.cli import main; sys.exit(main())"

pytestmark = pytest.mark.slow


def module(name: str, *arguments: str) -> str:
    """What `python -m benchmarks.NAME` prints. It must end well."""
    return program("-m", name, *arguments)


def program(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def smoke(name: str, out: Path, *arguments: str, result: str | None = None) -> dict[str, Any]:
    module(f"benchmarks.{name}", "--smoke", "--out", str(out), *arguments)
    found: dict[str, Any] = json.loads((out / f"{result or name}.json").read_text())
    assert found["hardware"]["versions"]["mlx"]
    for table in found["tables"]:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    return found


def column(table: dict[str, Any], name: str) -> list[Any]:
    return [row[table["columns"].index(name)] for row in table["rows"]]


def test_one_stream_is_measured_for_every_prompt_drafted_and_plain(tmp_path: Path) -> None:
    (table,) = smoke("openai", tmp_path)["tables"]
    sides = set(zip(column(table, "prompt"), column(table, "server"), strict=True))
    assert sides == {(p, s) for p in ("code", "chat", "json", "read") for s in ("onecopy", "onecopy, no drafts")}
    assert all(value > 0 for value in column(table, "first token ms"))


def test_many_streams_all_finish(tmp_path: Path) -> None:
    (table,) = smoke("concurrent", tmp_path)["tables"]
    assert set(column(table, "streams")) == {1, 3}
    assert set(column(table, "failed")) == {0}


def test_replies_side_by_side_equal_their_solo_and_undrafted_runs(tmp_path: Path) -> None:
    (table,) = smoke("concurrent", tmp_path, "--alone", "--serial", result="concurrent-equal")["tables"]
    assert set(column(table, "equal")) == {"yes"}
    assert column(table, "together") == column(table, "alone") == column(table, "serial")


def test_what_is_kept_is_reused_in_every_scenario(tmp_path: Path) -> None:
    times = smoke("cache", tmp_path)["tables"][0]
    assert len(times["rows"]) == 5
    assert set(column(times, "failed")) == {0}
    assert all(share > 0.4 for share in column(times, "reused"))


def test_short_requests_behind_a_long_prompt_are_answered(tmp_path: Path) -> None:
    waits, wire, _ = smoke("fairness", tmp_path)["tables"]
    assert column(waits, "failed") == [0]
    assert column(wire, "server") == ["onecopy"]


def test_no_request_of_a_session_with_subagents_fails(tmp_path: Path) -> None:
    found = smoke("agents", tmp_path)
    assert all(bar["holds"] for bar in found["bars"])
    assert {bar["what"] for bar in found["bars"]} == {"failed requests of ours", "refused after a burst"}


def test_rows_are_measured_beside_mlx_lms_prompt_cache(tmp_path: Path) -> None:
    found = smoke("rows", tmp_path)
    turns, sessions, forks = found["tables"][-3:]
    for table in (turns, sessions, forks):
        assert set(column(table, "side")) == {"onecopy", "mlx-lm"}
    assert {row[1] for row in forks["rows"] if row[0] == "onecopy"} == {1, 2}
    assert all(value > 0 for value in column(forks, "tokens/s together"))


def test_rows_come_back_from_disk_and_are_written_once(tmp_path: Path) -> None:
    restore, written, gaps, restart = smoke("store", tmp_path)["tables"]
    assert column(restore, "tokens") == [512, 512]
    assert column(restore, "read from") == ["disk", "page cache"]
    assert 0.5 < column(written, "written ÷ rows")[0] <= 1.05
    assert column(gaps, "rows are saved") == ["false", "true"]
    assert column(restart, "conversations on disk") == [0, 5]


@compiler
def test_compiled_rounds_are_measured_beside_eager_ones(tmp_path: Path) -> None:
    (table,) = smoke("compiled", tmp_path)["tables"]
    assert column(table, "round") == ["eager", "compiled"] * 2
    assert all(value > 0 for value in column(table, "computed, ms"))


def test_quantized_rows_are_measured_beside_those_that_are_not(tmp_path: Path) -> None:
    (table,) = smoke("quantized", tmp_path)["tables"]
    assert column(table, "rows") == ["as computed", "8 bits"]
    assert column(table, "bytes a row") == [2048, 576]
    assert all(value > 0 for name in table["columns"][2:] for value in column(table, name))


def test_the_parts_are_measured_one_by_one(tmp_path: Path) -> None:
    titles = [table["title"] for table in smoke("internals", tmp_path)["tables"]]
    assert len(titles) == len(set(titles)) == 7


def test_drafts_change_no_token_and_say_what_was_kept(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny")
    file = tmp_path / "drafts.json"
    said = program("-c", CLI, "bench", "drafts", str(tiny), "--quick", "--tokens", "24", "--json", str(file))
    table = json.loads(file.read_text())["tables"][0]
    assert "every drafted reply equals its plain one" in said
    assert column(table, "task") == ["rewriting", "chat", "json"]
    assert set(column(table, "equal")) == {"yes"}


def test_the_drafts_benchmark_uses_the_drafter_that_a_server_would(tmp_path: Path) -> None:
    beside = write_block_drafter(tmp_path / "beside", targets=(1, 3))
    model = write_with_mtp(tmp_path / "tiny")
    for flags, who in (((), "copies and mtp"), (("--drafter", str(beside)), "copies and block")):
        said = program("-c", CLI, "bench", "drafts", str(model), "--quick", "--tokens", "16", *flags)
        assert f"who drafts: {who}" in said
        assert "every drafted reply equals its plain one" in said


ONE_REPLY = """
import sys, trio
from benchmarks.client import stream
from benchmarks.prompts import fresh
from benchmarks.servers import KINDS, started

async def main(kind, model):
    async with started(kind, model) as server:
        reply = await stream(server.http, server.body(fresh("Say hello.", 1), 5))
        print(reply.error, reply.tokens, server.memory() > 0, server.kind in KINDS)

trio.run(main, *sys.argv[1:])
"""


@pytest.mark.parametrize("kind", ["mlx-lm", "mlx-lm + OpenBLAS"])
def test_peers_that_share_our_environment_start_and_answer(kind: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny")
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tiny / "tokenizer_config.json").write_text(json.dumps(settings))
    assert program("-c", ONE_REPLY, kind, str(tiny)).split() == ["5", "True", "True"]


def test_the_short_set_leaves_out_what_does_not_fit_in_its_time(tmp_path: Path) -> None:
    said = module("benchmarks", "--smoke", "--minutes", "0.05", "--only", "openai,store", "--out", str(tmp_path))
    assert said.count("left out: the time is up") == 2


def test_the_report_writes_results_between_the_markers_of_a_page(tmp_path: Path) -> None:
    bar = {"what": "speed", "value": 2.5, "better": "at least", "bar": 2, "holds": True}
    table = {"title": "Speed", "columns": ["server", "tokens/s"], "rows": [["a|b", 1234.5], ["c", None]], "note": "n"}
    (tmp_path / "openai.json").write_text(json.dumps({"benchmark": "openai", "tables": [table], "bars": [bar]}))
    (tmp_path / "other.json").write_text("[1]")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: begin -->\nOLD TABLES\n<!-- results: end -->\nafter\n")
    module("benchmarks.report", "--results", str(tmp_path), "--write", str(page))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "OLD TABLES" not in text
    assert "| a\\|b | 1,234 |\n| c | – |" in text
    assert "| openai | speed | 2.5 | at least 2 | holds |" in text
