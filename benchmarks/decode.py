"""Prefill and decode on the engine, against mlx-lm's own generator: run `python -m benchmarks.decode`.

Four ways to run the same weights take turns, a few rounds at a time, so that a busy machine is unfair to nobody:

ours    the engine, exact arithmetic            mlx-lm  mlx-lm's generator on the same BLAS
fast    the engine without that promise          stock   mlx-lm's generator as pip installs it

Figures are tokens a second by the median round; ratios are ours over the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from onecopy.runtime.seams.pages import ask_for_large_pages

from .common import HERE, Report, flags, median, model_of, ratio, sized

WAYS = ("ours", "fast", "mlx-lm", "stock")
BARS = {("stock", "prefill"): 20.0, ("stock", "1"): 2.0, ("mlx-lm", "prefill"): 1.0, ("mlx-lm", "1"): 1.0}
MANY = 1.2
EXACT = 0.85
LONG = 512
"""Prompts of more tokens take so long that they are read twice at most, and not by the stock side."""


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which to run")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 16], help="conversations at once")
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model)
        return
    with model_of(options) as model:
        options.model = model
        compare(options).finish()


def compare(options: argparse.Namespace) -> Report:
    report = Report("decode", options)
    turns = sized(options, full=8, quick=4, smoke=1)
    prompts = sized(options, full=(512, 4096), quick=(512,), smoke=(64,))
    workers = {way: Worker(way, options.model) for way in options.ways}
    try:
        asks: dict[str, list[Any]] = {f"prefill {n}": ["prefill", n] for n in prompts}
        asks |= {str(b): ["decode", b, 6] for b in options.batches}
        speeds = {name: _alternate(workers, ask, turns) for name, ask in asks.items()}
    finally:
        for worker in workers.values():
            worker.stop()
    table = report.table(
        "tokens a second", "what", *options.ways, *(f"ours / {w}" for w in options.ways if w != "ours")
    )
    for name, by_way in speeds.items():
        what = name if name.startswith("prefill") else f"decode, {name} at once"
        ratios = {way: ratio(by_way.get("ours"), by_way[way]) for way in options.ways if way != "ours"}
        table.add(what, *by_way.values(), *ratios.values())
        for way, value in ratios.items():
            bar = BARS.get((way, name.split()[0]), MANY if way == "mlx-lm" else EXACT if way == "fast" else None)
            if bar is not None and value is not None:
                report.bar(f"{what}: ours / {way}", value, "at least", bar)
    return report


def _alternate(workers: dict[str, Worker], ask: list[Any], turns: int) -> dict[str, float | None]:
    """Tokens a second of each way: the median over rounds that the ways took in turns."""
    found: dict[str, list[float]] = {way: [] for way in workers}
    for turn in range(turns if ask[1] <= LONG else min(turns, 2)):
        for way, worker in workers.items():
            if way == "stock" and (turn > 1 or (ask[0] == "prefill" and (turn or ask[1] > LONG))):
                continue  # tens of seconds each; far from any bar
            time.sleep(0.3)  # mlx-lm computes one token ahead: let it end before another's turn
            found[way] += worker.ask(
                *(["prefill", min(ask[1], 128)] if way == "stock" and ask[0] == "prefill" else ask)
            )
    return {way: median(speeds) for way, speeds in found.items()}


class Worker:
    """One way in a process of its own, which answers each question with tokens a second, round by round."""

    def __init__(self, way: str, model: str) -> None:
        command = [sys.executable, "-m", "benchmarks.decode", "--worker", way, "--model", model]
        self._process = subprocess.Popen(
            command, cwd=HERE.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ask("ready")

    def ask(self, *question: Any) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: list[float] = json.loads(self._process.stdout.readline())
        return answer

    def stop(self) -> None:
        self._process.communicate(timeout=60)


# --- in the worker


def work(way: str, model: str) -> None:
    if way in ("ours", "fast"):
        ask_for_large_pages()  # as `onecopy serve` does
    if way != "stock":
        from onecopy.runtime import blas

        blas.install()
    from onecopy.runtime.models.load import load

    loaded = load(model)
    vocab = min(int(loaded.config["vocab_size"]), 40_000)
    player = Rows(loaded, way == "fast") if way in ("ours", "fast") else Generators(loaded.model)
    decoding: dict[int, Iterator[None]] = {}
    for line in sys.stdin:
        kind, *sizes = json.loads(line)
        if kind == "prefill":
            prompt = _prompt(sizes[0], 0, vocab)
            answer = [sizes[0] / _timed(partial(player.prefill, prompt))]
        elif kind == "decode":
            batch, rounds = sizes
            if batch not in decoding:
                decoding.clear()
                decoding[batch] = player.decode([_prompt(64, i, vocab) for i in range(batch)])
                next(decoding[batch])
            step = partial(next, decoding[batch])
            step()  # the first round after another way's turn finds cold caches
            answer = [batch / _timed(step) for _ in range(rounds)]
        else:
            answer = []
        print(json.dumps(answer), flush=True)


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _prompt(length: int, seed: int, vocab: int) -> list[int]:
    import numpy as np

    return [int(t) for t in np.random.default_rng(seed).integers(2, vocab, length)]


class Rows:
    """The engine, driven as the lane drives it."""

    def __init__(self, loaded: Any, fast: bool) -> None:
        from onecopy.runtime.engine import Engine
        from onecopy.runtime.rows.ops import Allocate, Drop

        self._engine = Engine.open(loaded, context=16384, stopwatch=time.perf_counter, fast=fast)
        self._allocate, self._drop = Allocate, Drop

    def prefill(self, prompt: list[int]) -> int:
        self._engine.pool.apply((self._allocate(1, 0, -(-len(prompt) // 256) * 256),))
        for at in range(0, len(prompt), 256):
            token = self._round([(1, at, prompt[at : at + 256])], at + 256 >= len(prompt))
        self._engine.pool.apply((self._drop(1),))
        return token[0]

    def decode(self, prompts: list[list[int]]) -> Iterator[None]:
        ids = range(10, 10 + len(prompts))
        self._engine.pool.apply(tuple(self._allocate(i, 0, 1024) for i in ids))
        tokens = [self._round([(i, 0, p)], True)[0] for i, p in zip(ids, prompts, strict=True)]
        at = len(prompts[0])
        while at < 1024:
            tokens = self._round([(i, at, [t]) for i, t in zip(ids, tokens, strict=True)], True)
            at += 1
            yield

    def _round(self, work: list[tuple[int, int, list[int]]], wanted: bool) -> list[int]:
        from onecopy.runtime.decode.want import Want
        from onecopy.runtime.rows.ops import Chain, Link
        from onecopy.runtime.rows.plan import Strip
        from onecopy.runtime.turn import Sampling

        greedy = Sampling(seed=0, temperature=0.0)
        strips = [Strip(Chain((Link(s, 0, at),), 1024), at, tuple(tokens), int(wanted)) for s, at, tokens in work]
        picks = self._engine.run(strips, [Want(greedy, s.end) for s in strips if wanted]).picks
        return [p[0].token for p in picks if p]


class Generators:
    """mlx-lm's generators: one for a single stream, one for batches."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def prefill(self, prompt: list[int]) -> int:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        return int(next(generate_step(mx.array(prompt), self._model, max_tokens=1))[0])

    def decode(self, prompts: list[list[int]]) -> Iterator[None]:
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator, generate_step

        if len(prompts) == 1:
            for _ in generate_step(mx.array(prompts[0]), self._model, max_tokens=900):
                yield
            return
        generator = BatchGenerator(self._model, max_tokens=900, prefill_batch_size=len(prompts))
        generator.insert(prompts)
        while generator.next_generated():
            yield


if __name__ == "__main__":
    main()
