"""Nothing but the seams touches time, randomness, threads, processes or files; imports run api, actors, runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.imports import imports, touches

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    path.relative_to(ROOT).as_posix() for top in ("runtime", "actors") for path in (ROOT / top).rglob("*.py")
)
EVERYTHING = {"time", "random", "threads", "processes", "files"}
ALLOWED = {
    "runtime/seams/": EVERYTHING,
    "runtime/device.py": EVERYTHING,
    "runtime/models/": {"files"},
    "runtime/blas/": {"files"},
}
MAY_IMPORT = {"runtime": {"runtime"}, "actors": {"runtime", "actors"}, "api": {"runtime", "actors", "api"}}


def forbidden(module: str, source: str) -> list[tuple[str, str]]:
    allowed = {kind for prefix, kinds in ALLOWED.items() if module.startswith(prefix) for kind in kinds}
    return [(kind, name) for kind, name in touches(source) if kind not in allowed]


def backward(module: str, source: str) -> set[str]:
    top = module.split("/")[0]
    package = "onecopy." + module.rsplit("/", 1)[0].replace("/", ".")
    return {
        name
        for name in imports(source, package)
        if name.startswith("onecopy.") and name.split(".")[1] not in MAY_IMPORT[top]
    }


def test_there_are_modules_to_guard() -> None:
    assert {"runtime/core/actor.py", "runtime/seams/clock.py", "actors/__init__.py"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_only_seams_touch_the_world(module: str) -> None:
    assert forbidden(module, (ROOT / module).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", MODULES)
def test_imports_never_run_back(module: str) -> None:
    assert backward(module, (ROOT / module).read_text(encoding="utf-8")) == set()


PLANTED = {
    "import time": "time",
    "import time as clock\nclock.monotonic()": "time",
    "from time import monotonic": "time",
    "def late():\n    import time": "time",
    "from datetime import datetime\ndatetime.now()": "time",
    "import datetime as d\nd.date.today()": "time",
    "import random": "random",
    "from secrets import token_hex": "random",
    "import uuid": "random",
    "import numpy as np\nnp.random.default_rng()": "random",
    "import numpy as np\nnp.random.rand(3)": "random",
    "from numpy import random\nrandom.seed(1)": "random",
    "import os\nos.urandom(8)": "random",
    "import threading": "threads",
    "from concurrent.futures import ThreadPoolExecutor": "threads",
    "import queue": "threads",
    "import trio\nasync def f():\n    await trio.to_thread.run_sync(print)": "threads",
    "from trio import to_thread": "threads",
    "import subprocess": "processes",
    "import trio\nasync def f():\n    await trio.run_process(['ls'])": "processes",
    "open('x')": "files",
    "import os\nos.remove('x')": "files",
    "from os import remove": "files",
    "import os\nos.path.exists('x')": "files",
    "from os.path import getsize": "files",
    "from pathlib import Path\nPath('x').unlink()": "files",
    "import pathlib\npathlib.Path('x').mkdir()": "files",
    "def f(path):\n    return path.read_text()": "files",
    "def f(path):\n    return path.open('rb')": "files",
    "import shutil": "files",
    "import tempfile": "files",
}


@pytest.mark.parametrize("source", PLANTED)
def test_a_planted_use_is_caught(source: str) -> None:
    assert PLANTED[source] in {kind for kind, _ in forbidden("actors/planted.py", source)}


CLEAN = [
    "import numpy as np\nnp.random.default_rng(7)",
    "import os\nos.fspath('x'), os.path.join('a', 'b')",
    "from pathlib import Path\ndef f(p: Path) -> Path:\n    return Path(p).parent / 'x'",
    "def f(disk, path):\n    return disk.open_read(path), disk.stat(path), disk.unlink(path)",
    "from datetime import datetime, timezone\ndatetime.fromtimestamp(0, timezone.utc)",
    "import trio\nasync def f():\n    await trio.sleep(1)",
    "def f(runtime, model):\n    return runtime.open(model)",
    "def f(time, random):\n    return time.now() + random.seed64()",
]


@pytest.mark.parametrize("source", CLEAN)
def test_pure_code_and_the_seams_own_calls_pass(source: str) -> None:
    assert forbidden("actors/clean.py", source) == []


def test_model_code_may_read_files_and_nothing_else() -> None:
    assert forbidden("runtime/models/m.py", "open('x')") == []
    assert forbidden("runtime/models/m.py", "import time") != []


BACKWARD = [
    ("runtime/core/m.py", "from onecopy.actors import bank"),
    ("runtime/core/m.py", "import onecopy.api.cli"),
    ("runtime/core/m.py", "from ...actors import bank"),
    ("runtime/m.py", "from .. import actors"),
    ("actors/m.py", "from onecopy.api import app"),
    ("actors/m.py", "def late():\n    from ..api import app"),
]


@pytest.mark.parametrize(("module", "source"), BACKWARD)
def test_a_planted_backward_import_is_caught(module: str, source: str) -> None:
    assert backward(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [("actors/m.py", "from onecopy.runtime.core import Actor"), ("runtime/core/m.py", "from ..errors import NotFound")],
)
def test_a_forward_import_passes(module: str, source: str) -> None:
    assert not backward(module, source)
