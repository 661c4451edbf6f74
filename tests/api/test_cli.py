"""The command line: what it offers, how it fails, and that serve and chat do what they say."""

from __future__ import annotations

import argparse
import io
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from onecopy.actors.service import Options
from onecopy.api import cli
from onecopy.api.app import create_app
from onecopy.api.cli import chat, flags, serve
from onecopy.api.server import listen, url_of
from onecopy.runtime.errors import ModelLoadError, Unavailable
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.http import running
from tests.support.scripted import Say, ScriptedService
from tests.support.system import write_tiny


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Systems are scripted; the options they were opened with."""
    seen: list[Options] = []

    @asynccontextmanager
    async def open_system(options: Options) -> AsyncIterator[ScriptedService]:
        seen.append(options)
        if options.model == "broken":
            raise ModelLoadError("broken: not a model.")
        yield ScriptedService("Hello.")

    monkeypatch.setattr(serve, "open_system", open_system)
    monkeypatch.setattr(chat, "open_system", open_system)
    return seen


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What a person will type; then the end of input."""
    left: Iterator[str] = iter(lines)

    def answer(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    chat.add_chat_command(parser.add_subparsers())
    return parser.parse_args(words)


def test_help_lists_the_commands_that_are_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.offered())
    assert {"serve", "chat", "models", "inspect"} <= set(cli.offered())


def test_a_command_without_its_module_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "fly", cli.Command("no_such_module", "add", "fly"))
    assert "fly" not in cli.offered()


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_a_start_that_fails_is_one_line_and_code_2(opened: list[Options], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "broken", "--port", "0"]) == 2
    assert capsys.readouterr().err == "onecopy: broken: not a model.\n"


def test_a_taken_port_fails_before_anything_is_loaded(
    opened: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", 0) as taken:
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "Cannot listen" in capsys.readouterr().err
    assert opened == []


def test_a_missing_model_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "no-such-model"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_models_and_inspect_are_plain_lines_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out.startswith("smollm2\tgguf\t")
    assert cli.main(["inspect"]) == 0
    assert "name\tsmollm2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "found"),
    [("17", 17), ("1k", 1024), ("512MiB", 512 << 20), ("8GB", 8 * 10**9), ("8g", 8 << 30), ("1.5 GiB", 3 << 29)],
)
def test_sizes_are_read_as_people_write_them(text: str, found: int) -> None:
    assert flags.size(text) == found


@pytest.mark.parametrize(
    ("read", "text"), [(flags.size, "much"), (flags.size, "-1"), (flags.share, "1"), (flags.count, "0")]
)
def test_values_that_make_no_sense_are_wrong_usage(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


def test_flags_reach_the_system(opened: list[Options]) -> None:
    given = "broken --name x --memory 1GiB --context 512 --parallel 3 --no-store --decode-share 0.5 --no-draft --fast"
    cli.main(["serve", "--port", "0", *given.split()])
    wanted = Options(
        "broken",
        name="x",
        memory=1 << 30,
        context=512,
        parallel=3,
        fast=True,
        store="",
        decode_share=0.5,
        draft=False,
    )
    assert opened == [wanted]


def test_keys_come_from_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECOPY_API_KEY", "sk-env")
    parser = argparse.ArgumentParser()
    serve.add_serve_command(parser.add_subparsers())
    options = serve.door_options(parser.parse_args(["serve", "--api-key", "a:sk-a", "--host", "0.0.0.0"]))
    assert options.keys == ("a:sk-a", "sk-env")
    assert not options.loopback


def test_serve_answers_until_it_is_told_to_stop(
    opened: list[Options], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def ready(text: str) -> None:
        url = text.split()[-1]

        def visit() -> None:
            seen.append(httpx.get(url + "/health").status_code)
            os.kill(os.getpid(), signal.SIGTERM)

        trio.lowlevel.spawn_system_task(trio.to_thread.run_sync, visit)

    monkeypatch.setattr(serve, "say", ready)
    assert cli.main(["serve", "--port", "0", "--log-level", "error"]) == 0
    assert seen == [200]


async def test_a_reply_that_the_stop_ends_tells_its_client_however_long_the_system_drains() -> None:
    stop, doors, stopped = trio.Event(), serve.Doors(), trio.Event()

    async def until_stopped() -> None:
        await stopped.wait()
        raise Unavailable("The server is stopping.")

    service = ScriptedService(Say("x", before=until_stopped))
    said: list[str] = []

    async def listen_to(url: str) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with httpx.AsyncClient(timeout=60) as client:
            said.append((await client.post(url + "/v1/chat/completions", json=body)).text)

    with listen("127.0.0.1", 0) as listener:
        async with trio.open_nursery() as nursery:
            await nursery.start(doors.run, create_app(service), listener, stop)
            nursery.start_soon(listen_to, url_of(listener))
            while not service.active:
                await trio.sleep(0.01)
            stop.set()
            await wait_all_tasks_blocked()
            assert not doors.closed.is_set()
            stopped.set()
            await doors.close()
    assert '"code":"unavailable"' in said[0]
    assert "[DONE]" not in said[0]


async def test_a_client_that_takes_nothing_cannot_hold_the_process(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(serve, "_leave", codes.append)
    await serve.Doors().close()
    assert codes == [0]


def test_a_chat_prints_replies_and_remembers_them(
    opened: list[Options], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "hi", "", "again", "/new", "fresh", "/quit", "never")
    assert cli.main(["chat", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "Hello.\n" * 3


def test_a_chat_says_first_that_answers_may_differ_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def open_system(options: Options) -> AsyncIterator[ScriptedService]:
        service = ScriptedService("Hello.")
        service.card = replace(service.card, exactness="not exact", features={"exactness_reasons": ["chosen", "both"]})
        yield service

    monkeypatch.setattr(chat, "open_system", open_system)
    typed(monkeypatch)
    assert cli.main(["chat", "--fast"]) == 0
    assert "not exact: chosen; both" in capsys.readouterr().err


async def test_a_chat_with_a_server_streams_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "hi", "more")
    service = ScriptedService("Hello.")
    async with running(service) as server:
        await chat.talk(parsed("chat", "--url", server.url))
    assert capsys.readouterr().out == "Hello.\nHello.\n"
    assert service.tokenizer.decode(service.specs[1].tokens).count("Hello.") == 1


@pytest.mark.parametrize("after", [None, 2])
async def test_a_failed_reply_is_told_and_forgotten(
    after: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "hi")
    service = ScriptedService(Say("Hello.", fails_after=after), context=4096 if after else 8)
    async with running(service) as server:
        await chat.talk(parsed("chat", "--url", server.url))
    assert "onecopy: " in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "hi")
    with listen("127.0.0.1", 0) as gone:
        port = gone.getsockname()[1]
    assert cli.main(["chat", "--url", f"http://127.0.0.1:{port}"]) == 0
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(os, "dup2", lambda *_: 0)
    monkeypatch.setattr("sys.stdout", type("Out", (io.StringIO,), {"fileno": lambda self: 1, "write": broken})())
    assert cli.main(["models"]) == 1


@pytest.mark.parametrize(("given", "bits"), [((), None), (("--kv-bits", "8"), 8), (("--kv-bits", "4"), 4)])
def test_rows_are_quantized_only_where_asked_for(given: tuple[str, ...], bits: int | None) -> None:
    assert flags.system_options(parsed("chat", *given)).kv_bits == bits


@pytest.mark.parametrize(("given", "fast"), [((), False), (("--fast",), True)])
def test_arithmetic_is_fast_only_where_asked_for(given: tuple[str, ...], fast: bool) -> None:
    assert flags.system_options(parsed("chat", *given)).fast is fast


def test_bits_that_are_not_offered_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "smollm2", "--kv-bits", "6"])
    assert end.value.code == 2
    assert "argument --kv-bits: invalid choice: 6" in capsys.readouterr().err


def test_a_model_whose_rows_cannot_be_quantized_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(write_tiny(tmp_path / "narrow")), "--kv-bits", "8"]) == 2
    told = capsys.readouterr().err.strip()
    assert "no layer can keep quantized rows: attention layers of a head width of 16" in told
    assert "\n" not in told
