"""The artifact users install: a wheel built from this tree, in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("runtime", "actors", "api")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Runs a command to its end; its output, or a failure that shows it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_package_of_the_tree_is_part_of_the_distribution() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        "onecopy." + ".".join(init.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for init in (ROOT / room).rglob("__init__.py")
    }
    assert set(config["packages"]) == found


@pytest.mark.slow
def test_a_wheel_installs_and_runs_in_a_clean_environment(tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    run(uv, "build", "--out-dir", tmp_path / "dist")  # the wheel is built from the source archive, so both are proven
    (wheel,) = (tmp_path / "dist").glob("onecopy-*.whl")
    run(uv, "venv", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(uv, "pip", "install", "--python", python, wheel)
    assert "smollm2" in run(tmp_path / "env" / "bin" / "onecopy", "models", cwd=tmp_path)
    look = "import importlib.util as u; print([u.find_spec(n) for n in ('api', 'actors', 'runtime')])"
    assert run(python, "-c", look, cwd=tmp_path).strip() == "[None, None, None]"
    reply = run(python, "-c", REPLY, cwd=tmp_path)
    assert "Paris" in reply


REPLY = """
import trio
from onecopy.actors.service import Options
from onecopy.actors.system import System
from onecopy.runtime.turn import Sampling, Text, TurnSpec

async def main():
    async with System.open(Options(context=1024)) as system:
        prompt = tuple(system.card.tokenizer.encode("The capital of France is"))
        async with system.turn(TurnSpec(prompt, 8, Sampling(seed=1, temperature=0.0))) as pieces:
            async for piece in pieces:
                if isinstance(piece, Text):
                    print(piece.text, end="")

trio.run(main)
"""
