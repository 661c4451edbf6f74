"""What the actor core costs: an ask and its answer, and a tell in a batch, in microseconds.

    python benchmarks/ask.py [--count 20000] [--repeat 5]

Real clock, one process, best of the repeats. The asks are sequential; the tells are sent 256 at a time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio
from onecopy.runtime.core import Actor, Ask, Child, Message, Ref, Reply, Supervisor, handles

BATCH = 256


@dataclass(frozen=True, slots=True)
class Ping(Ask[int]):
    number: int


@dataclass(frozen=True, slots=True)
class Poke(Message):
    number: int


class Echo(Actor):
    @handles(Ping)
    def ping(self, message: Ping, reply: Reply[int]) -> None:
        reply.set(message.number)

    @handles(Poke)
    def poke(self, message: Poke) -> None:
        pass


async def asks(ref: Ref, count: int) -> None:
    for number in range(count):
        await ref.ask(Ping(number))


async def asks_with_deadline(ref: Ref, count: int) -> None:
    deadline = trio.current_time() + 3600
    for number in range(count):
        await ref.ask(Ping(number), deadline)


async def tells(ref: Ref, count: int) -> None:
    for number in range(count):
        ref.tell(Poke(number))
        if number % BATCH == BATCH - 1:
            await ref.ask(Ping(number))


async def best(run: Callable[[Ref, int], Awaitable[None]], ref: Ref, count: int, repeat: int) -> float:
    """Microseconds per message, the best of `repeat` runs."""
    took = []
    for _ in range(repeat):
        start = time.perf_counter()
        await run(ref, count)
        took.append(time.perf_counter() - start)
    return min(took) / count * 1e6


async def main(count: int, repeat: int) -> None:
    async with Supervisor([Child("echo", lambda: Echo("echo"))]) as supervisor:
        ref = supervisor.ref("echo")
        for run in (asks, asks_with_deadline, tells):
            print(f"{run.__name__:20} {await best(run, ref, count, repeat):6.2f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    trio.run(main, options.count, options.repeat)
