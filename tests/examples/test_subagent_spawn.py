"""The subagent harness without a model: scripted replies over the bank's real books."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from onecopy.api import Conversation, Requested, Runtime
from rich.console import Console

from examples.subagent_spawn.__main__ import main, parsed
from examples.subagent_spawn.agents import ERRANDS
from examples.subagent_spawn.sandbox import Sandbox
from examples.subagent_spawn.scenario import Plan, Scenario
from examples.subagent_spawn.scripted import LedgerService


def console() -> Console:
    return Console(file=io.StringIO(), width=120)


async def test_the_whole_run_compares_three_ways() -> None:
    out = console()
    forks, alone, http = await main(parsed(["--scripted"]), out)
    assert (forks.name, alone.name) == ("forks of one parent", "independent sessions")
    assert 6 * forks.prefilled < alone.prefilled
    assert 4 * forks.kept < alone.kept
    assert alone.copied == 0 < forks.copied
    assert http.prefilled < alone.prefilled
    assert http.sent > 4 * 2 * 4000
    assert forks.tokens == alone.tokens == http.tokens
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "I looked, and it is in order" in text
    assert "the same errands, three ways" in text


async def test_a_fork_copies_less_than_a_block_and_shares_the_rest() -> None:
    service = LedgerService()
    async with Runtime.over(service) as runtime:
        scenario = Scenario(runtime, Plan(Path(__file__).parents[2], context=3000, max_tokens=100), console())
        parent = await scenario.grow()
        children = await runtime.spawn(parent, [f"child {i}" for i in range(8)], max_tokens=20)
        rows = service.card.features["row_bytes"]
        for child in children:
            receipt = child.result.receipt
            assert receipt.rows_forked + receipt.rows_adopted >= len(parent.tokens) - 1
            assert receipt.bytes_copied < 256 * rows
        assert service.ledger.audit() == []
        assert service.ledger.used < 2 * len(parent.tokens) * rows + 8 * 2 * 256 * rows


async def test_books_balance_when_children_are_cancelled() -> None:
    service = LedgerService()
    async with Runtime.over(service) as runtime:
        parent = runtime.conversation("Be brief.")
        await parent.send("hello " * 200)

        async def breaks(chat: Conversation, prompt: int) -> None:
            async for _ in chat.send("go on"):
                if prompt == 2:
                    raise LookupError

        with pytest.raises(LookupError):
            await runtime.spawn(parent, range(4), run=breaks)
        assert service.ledger.turns == {}
        assert service.ledger.audit() == []


# --- the sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    (tmp_path / "secret").write_text("outside")
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "a.py").write_text("class A:\n    pass\n")
    (root / "inner" / "b.py").write_text("x = 1\n")
    (root / ".hidden").write_text("hidden")
    (root / "link").symlink_to(tmp_path / "secret")
    return Sandbox(root)


def call(name: str, arguments: str) -> Requested:
    return Requested("call_1", name, arguments)


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        (call("list_dir", '{"path": "."}'), "a.py\ninner/\nlink"),
        (call("list_dir", '{"path": "inner"}'), "b.py"),
        (call("read_file", '{"path": "a.py"}'), "class A:\n    pass\n"),
        (call("grep", '{"text": "class "}'), "a.py:1: class A:"),
        (call("grep", '{"text": "no such text"}'), "(nothing)"),
    ],
)
def test_tools_read_the_folder(sandbox: Sandbox, request_: Requested, result: str) -> None:
    assert sandbox.call(request_) == result


@pytest.mark.parametrize(
    "request_",
    [
        call("read_file", '{"path": "../secret"}'),
        call("read_file", '{"path": "/etc/passwd"}'),
        call("read_file", '{"path": "link"}'),
        call("read_file", '{"path": "./.hidden"}'),
        call("read_file", '{"path": ".hidden"}'),
        call("list_dir", '{"path": ".."}'),
    ],
)
def test_nothing_outside_the_folder_is_read(sandbox: Sandbox, request_: Requested) -> None:
    assert sandbox.call(request_).startswith("That did not work")


@pytest.mark.parametrize(
    "request_",
    [
        call("read_file", "not json"),
        call("read_file", '{"file": "a.py"}'),
        call("read_file", '{"path": "none.py"}'),
        call("delete", '{"path": "a.py"}'),
    ],
)
def test_a_model_s_mistakes_are_results(sandbox: Sandbox, request_: Requested) -> None:
    assert sandbox.call(request_)


def test_every_errand_begins_with_a_tool_there_is() -> None:
    assert {task.tool for task in ERRANDS} <= {"list_dir", "read_file", "grep"}
