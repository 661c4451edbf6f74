"""What one decoded token of a qwen4_exp model costs as the context grows: run `python -m benchmarks.qsa`.

The tiny model of the tests on the engine, with rows for up to 65,536 tokens put straight into the buffers (prefilling
them would take the time, not the decode). The whole token, the index scan inside it, and the rest, which should not
move; the same through a chain of eight segments; eight conversations in one round, per token. The last column reads
every row instead of the selected ones, as dense attention would.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from onecopy.runtime import blas
from onecopy.runtime.engine import Engine
from onecopy.runtime.models import load
from onecopy.runtime.rows.attention import RowTile
from onecopy.runtime.rows.indexed import IndexedCache
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.rows.ops import Allocate, Chain, Link
from onecopy.runtime.rows.plan import RoundRows, Strip

from tests.support.qwen4_tiny import tiny, write

CONTEXTS = (1024, 4096, 16384, 65536)
REPEATS = 40
SEGMENTS, BATCH = 8, 8


def main() -> None:
    blas.install()
    with tempfile.TemporaryDirectory() as folder:
        sparse, dense = _opened(Path(folder) / "sparse", 256), _opened(Path(folder) / "dense", 1 << 17)
        names = ("rows", "token ms", "scan ms", "rest ms", "8 segments", "batch of 8", "all rows, ms")
        print("".join(f"{name:>13}" for name in names))
        for rows in CONTEXTS:
            one = [_filled(sparse, rows)]
            token, scan = _best(partial(_decode, sparse, one)), _best(_scan(sparse, one[0]))
            chain = _best(partial(_decode, sparse, [_filled(sparse, rows, SEGMENTS)]))
            batch = _best(partial(_decode, sparse, [_filled(sparse, rows) for _ in range(BATCH)])) / BATCH
            every = _best(partial(_decode, dense, [_filled(dense, rows)]))
            found = (token, scan, token - scan, chain, batch, every)
            print(f"{rows:13}" + "".join(f"{ms:13.2f}" for ms in found))
            sparse.pool.segments.clear()
            dense.pool.segments.clear()


def _opened(path: Path, budget: int) -> Engine:
    loaded = load(str(write(path, tiny(indexer_budget=budget, max_position_embeddings=1 << 17))))
    return Engine.open(loaded, context=1 << 17, stopwatch=time.perf_counter)


def _filled(engine: Engine, rows: int, segments: int = 1) -> Strip:
    """A strip of one token behind `rows` random rows, in a chain of that many segments."""
    cut, links = rows // segments // BLOCK * BLOCK, []
    for i in range(segments):
        start, last = i * cut, i == segments - 1
        capacity = rows - start + BLOCK if last else cut
        number = len(engine.pool.segments) + 1
        engine.pool.apply((Allocate(number, start, capacity),))
        for layer in engine.pool.segments[number].layers:
            for buffers in (layer.arrays, layer.pooled):
                buffers.update({name: mx.random.normal(b.shape) for name, b in buffers.items()})
        mx.eval(engine.pool.segments[number].flat())
        links.append(Link(number, start, rows if last else start + cut))
    return Strip(Chain(tuple(links), rows + BLOCK), rows, (7,), 1)


def _decode(engine: Engine, strips: Sequence[Strip]) -> None:
    """One token each; the frontiers stay, so every repeat costs the same."""
    engine.settle(strips, engine.forward(strips))


def _scan(engine: Engine, strip: Strip) -> Callable[[], None]:
    """The indexed layers' scoring and selection alone, for one query each."""
    model: Any = engine.model
    indexed = [(i, layer.self_attn.indexer) for i, layer in enumerate(model.layers) if "self_attn" in layer]
    c = model.config
    query = mx.random.normal((1, c.index_heads, c.index_dim))

    def run() -> None:
        now, picks = RoundRows([strip], engine.pool, RowTile(), ()), []
        for i, indexer in indexed:
            cache = IndexedCache(i, c.ratio)
            cache.round = now
            picks.append(indexer.select(0, query, strip.position, cache).blocks)
        mx.eval([p for p in picks if p is not None])

    return run


def _best(run: Callable[[], None]) -> float:
    """The best of many runs in milliseconds, after one that nobody times."""
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


if __name__ == "__main__":
    main()
