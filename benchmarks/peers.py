"""The other servers: llama.cpp built into an environment of its own, weights exported for mlx-lm, its two launchers.

python -m benchmarks.peers build           builds llama.cpp's server (minutes, once)
python -m benchmarks.peers export MODEL    writes MODEL as a Hugging Face directory in float32, prints the path
python -m benchmarks.peers mlx ...         mlx_lm.server with OpenBLAS under MLX, options as for mlx_lm.server
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .common import HERE, console

PEERS = HERE / ".peers"
LLAMA = PEERS / "llama"
ROOT = HERE.parent
LLAMA_PACKAGE = "llama-cpp-python[server]"


class PeerMissing(Exception):
    """A peer cannot be used here; the message says why in one line."""


# --- llama.cpp


def llama_python() -> Path | None:
    """The interpreter of llama.cpp's environment, when the build is there."""
    python = LLAMA / "bin" / "python"
    return python if (LLAMA / "ready").exists() else None


def build_llama() -> Path:
    """Builds llama.cpp's server from its source package unless it is there. PeerMissing when it cannot be built."""
    if (found := llama_python()) is not None:
        return found
    console.print(f"building {LLAMA_PACKAGE} into {LLAMA.relative_to(ROOT)}: minutes, once", style="yellow")
    PEERS.mkdir(exist_ok=True)
    uv = [sys.executable, "-m", "uv", "--no-config"]
    python = LLAMA / "bin" / "python"
    _quietly([*uv, "venv", "--clear", "--python", sys.executable, str(LLAMA)])
    _quietly([*uv, "pip", "install", "--python", str(python), LLAMA_PACKAGE])
    _quietly([str(python), "-c", "import llama_cpp.server.app"])
    (LLAMA / "ready").touch()
    return python


def _quietly(command: list[str]) -> None:
    log = PEERS / "build.log"
    with log.open("ab") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=PEERS, check=False)
    if done.returncode:
        tail = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise PeerMissing(f"llama.cpp could not be built ({' '.join(tail)}); see {log.relative_to(ROOT)}")


# --- weights for mlx-lm


def exported(model: str) -> Path:
    """`model` as a directory mlx-lm reads: itself, or a float32 copy of a GGUF file, written once."""
    from onecopy.runtime.models import resolve

    source = resolve(model)
    if source.kind == "hf":
        return source.path
    target = PEERS / f"{source.id}-float32"
    if not (target / "config.json").exists():
        subprocess.run(
            [sys.executable, "-m", "benchmarks.peers", "export", model], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
    return target


def export(model: str) -> Path:
    """Writes weights, tokenizer and, last, the config. Loads the model in this process."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from onecopy.runtime.models import load

    loaded = load(model, dtype="float32")
    target = PEERS / f"{loaded.id}-float32"
    target.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    if loaded.tokenizer is None:
        raise PeerMissing(f"{model} has no tokenizer")
    loaded.tokenizer.inner.save(str(target / "tokenizer.json"))
    _write(target / "tokenizer_config.json", tokenizer_config(loaded))
    _write(target / "config.json", {**loaded.config, "eos_token_id": sorted(loaded.eos), "torch_dtype": "float32"})
    return target


def tokenizer_config(loaded: Any) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": loaded.template,
        "model_max_length": loaded.context,
        **loaded.tokenizer.names,
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


# --- launching


def mlx_with_openblas(arguments: list[str]) -> None:
    """mlx_lm.server in this process, with the matmul that onecopy uses under it."""
    from onecopy.runtime import blas

    report = blas.install()
    if not report.active:
        raise SystemExit(f"OpenBLAS is not active: {report.reason}")
    from mlx_lm import server

    sys.argv = ["mlx_lm.server", *arguments]
    server.main()


def main(arguments: list[str]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    match arguments:
        case ["build"]:
            print(build_llama())
        case ["export", model]:
            print(export(model))
        case ["mlx", *rest]:
            mlx_with_openblas(rest)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except PeerMissing as missing:
        raise SystemExit(str(missing)) from None
