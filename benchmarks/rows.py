"""Rows: what the bank's operations cost, what a long conversation holds, what forks add; and mlx-lm's prompt cache.

    python -m benchmarks.rows [--quick]

First without a model: rows are reserved, committed and released as a bank and a lane would, over real buffers where
memory is measured. Then with one, beside mlx-lm's prompt cache doing the same work. Bars: resident bytes at most 1.02
times the rows' bytes and one block a segment; forks at most their parent, their own tails and 5 %, and 16 of them at
least 4 times as fast together as one stream; a resize at most what it gains and one layer.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
from onecopy.runtime.rows.buffers import Pool
from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor, round_up
from onecopy.runtime.rows.ledger import Grant, Ledger, Shortage, Wanted

from .common import Report, Table, flags, median, mib, model_of, ratio, sized
from .kept import PromptCache, Rows, Side

REPEAT = 30
WORDS = 50_000
SMALL = Layout((LayerLayout("attention", (RowTensor("k", 1, 1), RowTensor("v", 1, 1))),) * 2)
"""For counting time: rows of 16 bytes."""
MODEL = Layout((LayerLayout("attention", (RowTensor("k", 3, 64), RowTensor("v", 3, 64))),) * 8)
"""For measuring memory: eight layers of the bundled model's."""


class Desk:
    """A ledger, and a pool when `real`, with whole turns as one call."""

    def __init__(self, layout: Layout, budget: int, real: bool) -> None:
        self.ledger = Ledger(layout, budget)
        self.pool = Pool(layout) if real else None
        self.turn = 0

    def settle(self) -> None:
        orders = self.ledger.take_orders()
        if self.pool is not None:
            self.pool.apply(orders)

    def begin(self, tokens: Sequence[int], answer: int, capacity: int | None = None) -> Grant:
        self.turn += 1
        wanted = Wanted(tuple(tokens), answer, capacity=capacity)
        got = self.ledger.admit(self.turn, wanted, f"c{self.turn}", float(self.turn))
        if isinstance(got, Shortage):
            raise MemoryError(got)
        self.ledger.execute(self.turn)
        self.settle()
        return got

    def write(self, tokens: Sequence[int]) -> None:
        """Commits the rest of `tokens` as rows, growing where the leaves end."""
        made = self.ledger.turns[self.turn]
        while made.frontier < len(tokens):
            room = made.lease.room(made.frontier)
            if room:
                self.ledger.commit(self.turn, tuple(tokens[made.frontier : made.frontier + room]))
            elif isinstance(self.ledger.grow(self.turn, 1), Shortage):
                raise MemoryError("growth")
            self.settle()

    def end(self) -> None:
        self.ledger.release(self.turn, 1 << 30, float(self.turn))
        self.settle()

    def run(self, tokens: Sequence[int], answer: int = 16) -> Grant:
        got = self.begin(tokens, answer)
        self.write(tokens)
        self.end()
        return got


def story(seed: int, n: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(WORDS) for _ in range(n)]


# --- operations


SHARED = story(0, BLOCK)
"""What all conversations begin with: they are forks of one root, so that one trie node has them all."""


def operations(report: Report, sizes: Sequence[int]) -> None:
    table = report.table("The bank's books", "operation", *(f"{n:,} segments, us" for n in sizes), "growth")
    columns = [timings(n) for n in sizes]
    for what in columns[0]:
        found = [column[what] for column in columns]
        table.add(what, *found, ratio(found[-1], found[0]))


def timings(segments: int) -> dict[str, float]:
    desk = Desk(SMALL, 1 << 40, real=False)
    for k in range(segments):
        desk.run([*SHARED, *story(k + 1, 40)])
    last = [*SHARED, *story(segments, 40)]
    wanted = Wanted((*last, 7), 16)
    out = {"longest kept prefix": timed(lambda: desk.ledger.longest(wanted))}
    out |= turn(desk, "a new conversation", lambda k: [*story(-k - 1, 300)])
    out |= turn(desk, "a fork", lambda k: [*SHARED, *story(-k - 1000, 40)])
    out["its bytes"] = timed(lambda: desk.ledger.owned_bytes(desk.ledger.conversations["c1"]))
    out["idle with slack"] = timed(lambda: desk.ledger.idle_slack(1e9, 1.0))
    full = Desk(SMALL, desk.ledger.used, real=False)
    full.ledger = desk.ledger
    full.turn = desk.turn
    desk.ledger._books.budget = desk.ledger.used
    out |= turn(full, "a new conversation when memory is full", lambda k: [*story(-k - 5000, 300)])
    return out


def turn(desk: Desk, what: str, prompt: Callable[[int], list[int]]) -> dict[str, float]:
    """Microseconds of admit, commit and release of one turn, medians."""
    took: dict[str, list[float]] = {"admit": [], "commit": [], "release": []}
    for k in range(REPEAT):
        tokens = prompt(k)
        began = time.perf_counter()
        got = desk.begin(tokens, 16)
        admitted = time.perf_counter()
        desk.ledger.commit(desk.turn, tuple(tokens[got.matched :]))
        committed = time.perf_counter()
        desk.end()
        for name, start, stop in (
            ("admit", began, admitted),
            ("commit", admitted, committed),
            ("release", committed, time.perf_counter()),
        ):
            took[name].append((stop - start) * 1e6)
    return {f"{what}: {name}": median(values) or 0.0 for name, values in took.items()}


def timed(run: Callable[[], object]) -> float:
    took = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        run()
        took.append((time.perf_counter() - began) * 1e6)
    return median(took) or 0.0


# --- memory


def resident(report: Report, turns: int) -> None:
    """One conversation over many turns: what is held against what its rows are, when it runs and when it rests."""
    table = report.table(
        "One conversation", "turns", "rows", "segments", "rows MiB", "held MiB", "trimmed MiB", "trimmed / bar",
        note="held: at the end of the turn; trimmed: after the bank's housekeeping gave back unused blocks",
    )  # fmt: skip
    before = mx.get_active_memory()
    desk, tokens, worst = Desk(MODEL, 1 << 40, real=True), story(1, 300), 0.0
    for k in range(1, turns + 1):
        tokens = tokens + story(k, 120)
        desk.run(tokens)
        ended = mx.get_active_memory() - before
        desk.ledger.trim(next(iter(desk.ledger.conversations)))
        desk.settle()
        held, rows = mx.get_active_memory() - before, len(tokens) * MODEL.row_bytes
        over = held / (1.02 * rows + len(desk.ledger.segments) * MODEL.block_bytes)
        worst = max(worst, over)
        if k in (1, turns // 5, turns):
            table.add(k, len(tokens), len(desk.ledger.segments), mib(rows), mib(ended), mib(held), over)
    report.bar(
        "resident bytes at rest over all turns, against 1.02 x rows and a block a segment", worst, "at most", 1.0
    )


def forks(report: Report, counts: Sequence[int], parent: int) -> None:
    """Children of one parent that all run at once, each with a short tail of its own."""
    columns = ("forks", "held MiB", "parent and tails MiB", "held / fair", "us each")
    table = report.table(f"Forks of {parent:,} tokens", *columns)
    worst = 0.0
    for n in counts:
        held, took = forked(n, parent)
        tail = MODEL.capacity_bytes(round_up(parent % BLOCK + TAIL + ANSWER))
        fair = MODEL.capacity_bytes(round_up(parent + PARENT_TAIL + ANSWER)) + n * tail
        worst = max(worst, held / fair)
        table.add(n, mib(held), mib(fair), held / fair, took)
    report.bar("memory of forks, against their parent and own tails", worst, "at most", 1.05)


PARENT_TAIL, TAIL, ANSWER = 30, 50, 16


def forked(n: int, parent: int) -> tuple[int, float]:
    """Bytes held while a parent and `n` forks of it have their rows, and microseconds a fork. Nothing outlives it."""
    mx.clear_cache()
    before = mx.get_active_memory()
    desk, shared = Desk(MODEL, 1 << 40, real=True), story(1, parent)
    desk.run([*shared, *story(2, PARENT_TAIL)])
    began = time.perf_counter()
    for k in range(n):
        tokens = [*shared, *story(k + 3, TAIL)]
        desk.begin(tokens, ANSWER)
        desk.write(tokens)
    took = (time.perf_counter() - began) / n * 1e6
    return mx.get_active_memory() - before, took


def resizes(report: Report, blocks: int) -> None:
    """Buffers of another size for a long conversation: peak against what is gained and one layer."""
    table = report.table("Resized one layer at a time", "from", "to", "peak MiB", "gained MiB", "one layer MiB")
    worst = 0.0
    for have, want in ((blocks, 2 * blocks), (2 * blocks, blocks)):
        peak = resized(have, want, (blocks - 2) * BLOCK)
        gained = max(0, MODEL.capacity_bytes(want * BLOCK) - MODEL.capacity_bytes(have * BLOCK))
        layer = MODEL.layers[0].capacity_bytes(want * BLOCK)
        worst = max(worst, peak / (gained + layer))
        table.add(have * BLOCK, want * BLOCK, mib(peak), mib(gained), mib(layer))
    report.bar("peak of a resize, against what it gains and one layer", worst, "at most", 1.0)


def resized(have: int, want: int, rows: int) -> int:
    """Peak bytes, beyond what was held, of a turn that wants buffers of `want` blocks instead of `have`."""
    desk, tokens = Desk(MODEL, 1 << 40, real=True), story(1, rows)
    desk.begin(tokens, 1, capacity=have * BLOCK)
    desk.write(tokens)
    desk.end()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    if desk.begin([*tokens, 1], 1, capacity=want * BLOCK).how != "resized":
        raise AssertionError("the turn was met in another way")
    return mx.get_peak_memory() - before


# --- beside mlx-lm's prompt cache


def beside(report: Report, options: argparse.Namespace, model: str) -> None:
    """The same work on both sides, one side after the other."""
    columns = ("side", "turns", "rows", "rows MiB", "held MiB", "held / rows")
    turns = report.table("Turns of one conversation, at rest", *columns)
    columns = ("side", "session", "seconds", "peak MiB", "held MiB")
    sessions = report.table("Sessions that begin beside a long one", *columns)
    columns = ("side", "forks", "held MiB", "fair MiB", "held / fair", "ms a fork", "tokens/s together", "times one")
    note = "fair: the parent's rows and each fork's own blocks. mlx-lm joins the caches of a batch into one more copy"
    forked = report.table("Forks of one parent, decoding together", *columns, note=note)
    long = sized(options, full=4_000, quick=2_000, smoke=600)
    for make in (Rows, PromptCache):
        side = make(model, 2 * long + 8_192)
        talked(report, turns, side, sized(options, full=50, quick=20, smoke=4))
        began(sessions, side, long)
        counts = sized(options, full=(1, 4, 16, 64), quick=(1, 4, 16), smoke=(1, 2))
        branched(report, forked, side, counts, long, sized(options, full=32, quick=16, smoke=4))
        del side


def words(seed: int, n: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 250) for _ in range(n)]


def memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def held() -> int:
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


def talked(report: Report, table: Table, side: Side, turns: int) -> None:
    """Turns of 60 tokens and a reply of 12: what is held at rest after each, over what the rows are."""
    before = held()
    talk, rows, worst = side.start(words(1, 300)), 300, 0.0
    for n in range(1, turns + 1):
        talk = side.go_on(talk, words(n, 60), 12)
        side.rest()
        rows += 72
        now, size = held() - before, (rows - 1) * side.row_bytes
        if isinstance(side, Rows):
            worst = max(worst, now / (1.02 * size + len(side.ledger.segments) * side.layout.block_bytes))
        if n in (1, turns):
            table.add(side.name, n, rows - 1, mib(size), mib(now), now / size)
    if isinstance(side, Rows):
        what = "resident bytes over turns of the model, against 1.02 x rows and a block a segment"
        report.bar(what, worst, "at most", 1.0)
    side.drop([])
    del talk


def began(table: Table, side: Side, long: int) -> None:
    """A session of its own and one that shares half of the long one: seconds, peak and bytes held for it."""
    side.drop([side.branch(side.start(words(6, 300)), words(7, 40), 4)])  # what the first call makes for good
    parent = side.start(words(2, long))
    for what, tokens in (("of its own", None), ("that goes on from the long one", words(3, 40))):
        before = held()
        mx.reset_peak_memory()
        begun = time.perf_counter()
        talk = side.start(words(4, 300)) if tokens is None else side.branch(parent, tokens, 16)
        took = time.perf_counter() - begun
        peak = mx.get_peak_memory() - before
        table.add(side.name, what, took, mib(peak), mib(held() - before))
        if tokens is not None:
            side.drop([talk])
        del talk
    side.drop([])
    del parent


def branched(report: Report, table: Table, side: Side, counts: Sequence[int], parent: int, tokens: int) -> None:
    """Forks of one parent, each with a message of its own, all decoding at once."""
    alone = None
    for n in counts:
        if not isinstance(side, Rows) and 2 * n * round_up(parent) * side.row_bytes > memory() // 2:
            table.add(side.name, n, *[None] * 6)  # a copy for each fork and one of them all: more than half of memory
            continue
        before = held()
        talk = side.start(words(5, parent))
        begun = time.perf_counter()
        forks = [side.branch(talk, words(100 + k, TAIL), tokens + 8) for k in range(n)]
        each = (time.perf_counter() - begun) / n
        now = held() - before
        speed = n * tokens / side.decode(forks, tokens)
        alone = alone or speed
        own = round_up(parent % BLOCK + TAIL + tokens + 8)
        fair = (round_up(parent) + n * own) * side.row_bytes
        table.add(side.name, n, mib(now), mib(fair), now / fair, each * 1e3, speed, speed / alone)
        if isinstance(side, Rows):
            what = f"memory of {n} forks of the model, against their parent and own tails"
            report.bar(what, now / fair, "at most", 1.05)
            if n == 16:
                report.bar("16 forks decoding together, against one stream", speed / alone, "at least", 4.0)
        side.drop(forks)
        del talk, forks


def main(argv: list[str] | None = None) -> None:
    options: argparse.Namespace = flags(__doc__).parse_args(argv)
    report = Report("rows", options)
    operations(report, sized(options, full=(100, 1_000, 10_000, 100_000), quick=(100, 1_000, 10_000), smoke=(50, 100)))
    resident(report, sized(options, full=50, quick=50, smoke=10))
    parent = sized(options, full=4_000, quick=4_000, smoke=600)
    forks(report, sized(options, full=(1, 4, 16, 64), quick=(1, 4, 16), smoke=(1, 2)), parent)
    resizes(report, sized(options, full=32, quick=16, smoke=4))
    with model_of(options) as model:
        beside(report, options, model)
    report.finish()


if __name__ == "__main__":
    main()
