"""f32 matmul of MLX side by side: the stock wheel's BLAS against OpenBLAS swapped in by `onecopy.runtime.blas`.

    python benchmarks/blas.py [--repeat 3]

Each side runs in its own process, in turn, because the swap is for the life of a process. Numbers are GFLOP/s, the
best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

SHAPES = ((1, 576, 1536), (8, 576, 1536), (256, 576, 1536), (256, 576, 49152), (1024, 1024, 1024))
SECONDS = 0.2


def measure(swap: bool) -> list[float]:
    """GFLOP/s per shape in this process."""
    import mlx.core as mx

    if swap:
        from onecopy.runtime import blas

        report = blas.install()
        if not report.active:
            raise SystemExit(f"OpenBLAS is not active: {report.reason}")
        print(f"{report.name}, {report.threads} threads", file=sys.stderr)
    return [rate(mx, *shape) for shape in SHAPES]


def rate(mx: object, m: int, k: int, n: int) -> float:
    a, b = mx.random.normal((m, k)), mx.random.normal((k, n))  # type: ignore[attr-defined]
    mx.eval(a @ b)  # type: ignore[attr-defined]
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        mx.eval(a @ b)  # type: ignore[attr-defined]
        count += 1
    return count * 2 * m * k * n / (time.perf_counter() - start) / 1e9


def side(name: str) -> list[float]:
    done = subprocess.run([sys.executable, __file__, "--side", name], stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(done.stdout))


def table(stock: list[float], fast: list[float]) -> None:
    print(f"{'M x K x N':>20} {'stock':>10} {'OpenBLAS':>10} {'ratio':>8}")
    for shape, slow, quick in zip(SHAPES, stock, fast, strict=True):
        print(f"{' x '.join(map(str, shape)):>20} {slow:>10.1f} {quick:>10.1f} {quick / slow:>7.0f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each side, alternating")
    parser.add_argument("--side", choices=("stock", "openblas"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side == "openblas")))
        return
    runs = [(side("stock"), side("openblas")) for _ in range(options.repeat)]
    stock, fast = (list(map(max, zip(*sides, strict=True))) for sides in zip(*runs, strict=True))
    table(stock, fast)


if __name__ == "__main__":
    main()
