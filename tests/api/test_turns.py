"""The channel between turns and whoever reads them: bounded, in order, and nobody is forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import trio
from onecopy.api.turns import Channel


def item(n: int) -> Any:
    return n, SimpleNamespace()


async def fill(channel: Channel, first: int, count: int) -> None:
    for n in range(first, first + count):
        await channel.put(item(n))


@pytest.mark.parametrize("writers", [1, 2, 3])
async def test_all_who_wait_for_room_go_on_when_there_is_some(writers: int) -> None:
    channel, found = Channel(2), list[int]()
    async with trio.open_nursery() as nursery:
        for writer in range(writers):
            nursery.start_soon(fill, channel, 100 * writer, 5)
        await trio.testing.wait_all_tasks_blocked()
        assert len(channel._items) == 2
        while len(found) < 5 * writers:
            await channel.wait()
            while (taken := channel.take()) is not None:
                found.append(taken[0])
            await trio.testing.wait_all_tasks_blocked()
            assert len(channel._items) <= 2 + writers - 1
    for writer in range(writers):
        own = [n for n in found if n // 100 == writer]
        assert own == list(range(100 * writer, 100 * writer + 5))


async def test_a_reader_waits_no_longer_than_its_patience(autojump_clock: object) -> None:
    channel = Channel()
    await channel.wait(3.0)
    assert trio.current_time() == pytest.approx(3.0)
    assert channel.take() is None
    await channel.put(item(1))
    await channel.wait()
    assert channel.take() is not None


async def test_after_the_close_items_go_nowhere_and_nobody_waits() -> None:
    channel = Channel(1)
    await channel.put(item(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill, channel, 2, 3)
        await trio.testing.wait_all_tasks_blocked()
        channel.close()
    assert channel.take() is None


def test_it_works_on_asyncio_too() -> None:
    async def main() -> int:
        channel, found = Channel(1), 0
        async with anyio.create_task_group() as group:
            for writer in range(3):
                group.start_soon(fill, channel, writer, 3)
            while found < 9:
                await channel.wait()
                while channel.take() is not None:
                    found += 1
        return found

    assert anyio.run(main, backend="asyncio") == 9
