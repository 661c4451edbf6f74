"""Every snippet of docs/embedding.md runs: on a script in place of the model, and the first one on the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from onecopy.api import Runtime
from starlette.applications import Starlette

from tests.support.asgi_app import scripted
from tests.support.scripted import ScriptedService

GUIDE = Path(__file__).parents[2] / "docs" / "embedding.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
FUNCTIONS = [re.findall(r"^async def (\w+)\(runtime\)", snippet, re.MULTILINE) for snippet in SNIPPETS]
WITH_RUNTIME = [(snippet, names[0]) for snippet, names in zip(SNIPPETS, FUNCTIONS, strict=True) if names]
ALONE = [snippet for snippet, names in zip(SNIPPETS, FUNCTIONS, strict=True) if not names]


def run(snippet: str) -> dict[str, Any]:
    """The names a snippet leaves. `trio` is what the page's first snippet imported."""
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile("import trio\n" + snippet, str(GUIDE), "exec"), names)
    return names


def test_the_page_has_its_snippets() -> None:
    assert (len(WITH_RUNTIME), len(ALONE)) == (5, 4)


@pytest.mark.parametrize(("snippet", "name"), WITH_RUNTIME, ids=[name for _, name in WITH_RUNTIME])
async def test_snippets_that_get_the_runtime(snippet: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    service = ScriptedService("Fine.")
    async with Runtime.over(service) as runtime:
        await run(snippet)[name](runtime)
    assert service.specs
    assert capsys.readouterr().out


@pytest.mark.parametrize("snippet", ALONE[:3], ids=["trio", "asyncio", "sync"])
def test_snippets_that_open_a_runtime(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    service = ScriptedService("Fine.")
    with scripted(service):
        run(snippet)
    assert len(service.specs) == 2
    assert "Fine." in capsys.readouterr().out


def test_the_snippet_of_the_web_application() -> None:
    assert isinstance(run(ALONE[3])["doors"], Starlette)


@pytest.mark.model
def test_the_first_snippet_runs_on_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    run(ALONE[0])
    out = capsys.readouterr().out
    assert "Usage(prompt=" in out
    assert "adopted" in out or "extended" in out
