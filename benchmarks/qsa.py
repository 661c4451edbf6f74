"""What one decoded token of a qwen4_exp model costs as the context grows: run `python -m benchmarks.qsa`.

The tiny model of the tests with rows for up to 65,536 tokens put straight into the buffers (prefilling them would
take the time, not the decode). Three columns: the whole token, the index scan inside it, and the rest, which should
not move. The last column reads every row instead of the selected ones, as dense attention would.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from onecopy.runtime import blas
from onecopy.runtime.models.qwen4_exp import Conversation, Model, Round, load_qwen4_exp
from onecopy.runtime.models.qwen4_exp.indexer import Indexer

from tests.support.qwen4_tiny import tiny, write

CONTEXTS = (1024, 4096, 16384, 65536)
REPEATS = 60


def main() -> None:
    blas.install()
    with tempfile.TemporaryDirectory() as folder:
        sparse, dense = _model(Path(folder) / "sparse", 256), _model(Path(folder) / "dense", 1 << 17)
    print(f"{'rows':>8} {'token ms':>9} {'scan ms':>9} {'rest ms':>9} {'gathered':>9} {'all rows, ms':>13}")
    for rows in CONTEXTS:
        conversation = _filled(sparse, rows)
        token, scan = _best(partial(_decode, sparse, conversation)), _best(_scan(sparse, conversation))
        every = _best(partial(_decode, dense, _filled(dense, rows)))
        print(f"{rows:8} {token:9.2f} {scan:9.2f} {token - scan:9.2f} {sparse.config.tile:9} {every:13.2f}")


def _model(path: Path, budget: int) -> Model:
    return load_qwen4_exp(write(path, tiny(indexer_budget=budget, max_position_embeddings=1 << 17)))[0]


def _filled(model: Model, rows: int) -> Conversation:
    """A conversation whose frontier is `rows`, with random rows under it."""
    conversation = Conversation(model.config, model.states(), model.kinds)
    for buffers in filter(None, conversation.rows):
        buffers.reserve(rows + 64, model.config)
        for name in ("keys", "values", "raw", "pooled"):
            setattr(buffers, name, mx.random.normal(getattr(buffers, name).shape))
    conversation.length = rows
    mx.eval(conversation.arrays())
    return conversation


def _decode(model: Model, conversation: Conversation) -> None:
    """One token; the frontier stays, so every repeat costs the same."""
    round_ = Round([conversation])
    mx.eval(model([[7]], round_.layers))
    round_.commit([1])
    conversation.length -= 1


def _scan(model: Model, conversation: Conversation) -> Callable[[], None]:
    """The indexed layers' scoring and selection alone, for one query each."""
    indexed = [(i, layer.self_attn.indexer) for i, layer in enumerate(model.layers) if "self_attn" in layer]
    c = model.config
    query = mx.random.normal((1, c.index_heads, c.index_dim))

    def run() -> None:
        layers = Round([conversation]).layers
        picks = [Indexer.select(x, 0, query, conversation.length, layers[i]).blocks for i, x in indexed]
        mx.eval([p for p in picks if p is not None])

    return run


def _best(run: Callable[[], None]) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e3)


if __name__ == "__main__":
    main()
