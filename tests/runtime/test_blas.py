"""OpenBLAS under MLX. Each case runs in a fresh process: the import table of a process is patched once."""

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from onecopy.runtime import blas
from onecopy.runtime.blas import slots

ON_LINUX_CPU = (
    sys.platform == "linux"
    and mx.default_device().type == mx.DeviceType.cpu
    and platform.machine() in slots.RELOCATIONS
)
linux_cpu = pytest.mark.skipif(not ON_LINUX_CPU, reason="MLX has its own fast BLAS here")

PREAMBLE = """
import json, logging, sys
from pathlib import Path
import mlx.core as mx
import numpy as np
from onecopy.runtime import blas
from onecopy.runtime.blas import swap as module
from onecopy.runtime.blas.slots import Slot, library, slots
records = []
class Keep(logging.Handler):
    def emit(self, record): records.append((record.levelname, record.getMessage()))
blas.LOG.addHandler(Keep())
blas.LOG.setLevel("INFO")
def pointers():
    return [slot.read() for slot in slots(library("/libmlx.so"), module.SYMBOLS)]
"""


def fresh(code: str) -> Any:
    """What `code` leaves in `answer`, run in a new process."""
    script = PREAMBLE + code + "\nprint(json.dumps(answer))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@linux_cpu
def test_install_moves_every_gemm_pointer_and_says_so_once() -> None:
    before, after, again, active, logged = fresh(
        "before = pointers()\nreport = blas.install()\nafter = pointers()\nsecond = blas.install()\n"
        "answer = before, after, pointers(), [report.active, second.active, report == second], records"
    )
    assert len(before) == 3
    assert not set(before) & set(after)
    assert again == after
    assert active == [True, True, True]
    assert [level for level, _ in logged] == ["INFO"]
    assert "OpenBLAS" in logged[0][1]


@linux_cpu
def test_matmul_after_install_agrees_with_numpy() -> None:
    worst = fresh(
        "blas.install()\nrng = np.random.default_rng(0)\nworst = []\n"
        "for m, k, n in [(1, 576, 1536), (300, 200, 100), (7, 1, 9), (512, 512, 512)]:\n"
        "    a, b = rng.standard_normal((3, m, k)), rng.standard_normal((k, n))\n"
        "    ours = np.array(mx.array(a, mx.float32) @ mx.array(b, mx.float32))\n"
        "    worst.append(float(np.abs(ours - a @ b).max() / k ** 0.5))\n"
        "answer = worst"
    )
    assert max(worst) < 1e-5


@linux_cpu
def test_a_wrong_result_takes_the_swap_back() -> None:
    before, after, report, logged, right = fresh(
        "before = pointers()\nmodule._error = lambda shape, dtype: 0.5\nreport = blas.install()\n"
        "right = bool(np.allclose(np.array(mx.ones((4, 3)) @ mx.ones((3, 2))), 3))\n"
        "answer = before, pointers(), [report.active, report.name, report.reason], records, right"
    )
    assert after == before
    assert report == [False, "mlx", "the self-check against NumPy is off by 5.0e-01"]
    assert [level for level, _ in logged] == ["WARNING"]
    assert right


@linux_cpu
def test_a_pointer_that_does_not_stay_is_noticed() -> None:
    before, after, reason = fresh(
        "before = pointers()\nreal = Slot.write\n"
        "Slot.write = lambda self, target: None if self.symbol == 'cblas_dgemm' else real(self, target)\n"
        "report = blas.install()\nanswer = before, pointers(), report.reason"
    )
    assert after == before
    assert "did not stay" in reason


@linux_cpu
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("module._find = lambda: Path('/nowhere/lib.so')", "/nowhere/lib.so: cannot open shared object file"),
        ("module.importlib.util.find_spec = lambda name: None", "scipy-openblas32 is not installed"),
        ("module.SYMBOLS = frozenset({'cblas_sgemm', 'cblas_qgemm'})", "does not import cblas_qgemm"),
        ("module.library = lambda suffix: None", "does not import cblas_cgemm, cblas_dgemm, cblas_sgemm"),
    ],
)
def test_what_prevents_the_swap_is_one_warning_not_an_error(change: str, reason: str) -> None:
    report, logged = fresh(f"{change}\nreport = blas.install()\nanswer = [report.active, report.reason], records")
    assert report[0] is False
    assert reason in report[1]
    assert [level for level, _ in logged] == ["WARNING"]
    assert reason in logged[0][1]


def test_elsewhere_it_is_silently_absent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.install() == blas.BlasReport("mlx", False, "not a Linux CPU build of MLX")
    assert caplog.records == []


@linux_cpu
def test_a_library_is_found_by_its_file_name() -> None:
    found = slots.library("/libmlx.so")
    assert found is not None
    assert Path(found.name).name == "libmlx.so"
    assert slots.library("/libnothing.so") is None


@linux_cpu
def test_only_the_symbols_asked_for_are_found() -> None:
    found = slots.library("/libmlx.so")
    assert found is not None
    assert {slot.symbol for slot in slots.slots(found, frozenset({"cblas_sgemm", "no_such_symbol"}))} == {"cblas_sgemm"}
