"""The examples in `examples/` that talk to a server, run against a scripted one."""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

import pytest
import trio
from onecopy.runtime.turn import TurnSpec

from tests.support.http import running
from tests.support.scripted import Say, ScriptedService
from tests.support.tokens import THINKING

EXAMPLES = Path(__file__).parents[2] / "examples"


async def example(name: str, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one Python example in a worker thread."""
    async with running(service) as server:
        monkeypatch.setenv("ONECOPY_URL", server.url)
        monkeypatch.setattr("sys.argv", [name])
        await trio.to_thread.run_sync(lambda: runpy.run_path(str(EXAMPLES / name), run_name="__main__"))


async def test_the_openai_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    await example("openai_chat.py", ScriptedService("Paris."), monkeypatch)
    assert capsys.readouterr().out.count("Paris.") == 3


async def test_the_anthropic_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    await example("anthropic_chat.py", ScriptedService("Paris."), monkeypatch)
    assert "Paris." in capsys.readouterr().out


async def test_the_agent_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def script(spec: TurnSpec) -> Say:
        prompt = service.tokenizer.decode(spec.tokens)
        if "391" not in prompt:
            return Say('</think><tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 23}}\n</tool_call>')
        if "false" not in prompt:
            return Say('</think><tool_call>\n{"name": "is_prime", "arguments": {"n": 391}}\n</tool_call>')
        return Say("</think>391, not prime.")

    service = ScriptedService(script, template=THINKING)
    await example("agent_loop.py", service, monkeypatch)
    assert capsys.readouterr().out.strip() == "391, not prime."
    assert len(service.specs) == 3


async def test_the_curl_example() -> None:
    async with running(ScriptedService("Paris.")) as server:
        environment = {**os.environ, "ONECOPY_URL": server.url}
        done = await trio.to_thread.run_sync(
            lambda: subprocess.run(
                ["sh", str(EXAMPLES / "curl.sh")], env=environment, capture_output=True, text=True, timeout=60
            )
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"content":"Paris."') == 3
    assert "data: [DONE]" in done.stdout
