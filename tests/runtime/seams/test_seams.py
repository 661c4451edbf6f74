"""Clock, randomness and the inline device."""

from __future__ import annotations

import math

import pytest
import trio
from onecopy.runtime.seams import Clock, InlineDevice, RealClock, RealRng, Rng, SeededRng, VirtualClock
from trio.testing import MockClock


@pytest.fixture
def mock_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


@pytest.mark.parametrize("clock", [RealClock(), VirtualClock()])
async def test_now_is_trios_time_and_sleeps_move_it(clock: Clock, mock_clock: MockClock) -> None:
    start = clock.now()
    await clock.sleep(5)
    await clock.sleep_until(start + 7)
    await clock.sleep_until(start)
    await clock.sleep(-1)
    assert clock.now() - start == 7 == trio.current_time() - start


async def test_sleeping_until_infinity_ends_by_cancellation_only(mock_clock: MockClock) -> None:
    with trio.move_on_after(100) as scope:
        await RealClock().sleep_until(math.inf)
    assert scope.cancelled_caught


def test_a_real_clock_tells_time_outside_trio_too() -> None:
    first = RealClock().now()
    assert RealClock().now() >= first
    assert RealClock().wall() > 1_700_000_000


async def test_a_virtual_wall_clock_moves_with_trio_and_jumps_alone(mock_clock: MockClock) -> None:
    clock = VirtualClock(epoch=1000.0)
    start, now = clock.wall(), clock.now()
    await trio.sleep(2)
    clock.jump(-50)
    assert (clock.wall() - start, clock.now() - now) == (-48, 2)


@pytest.mark.parametrize("make", [RealRng, lambda: SeededRng(7)])
def test_draws_have_their_stated_form(make: type[RealRng]) -> None:
    rng: Rng = make()
    seeds = {rng.seed64() for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**53
    assert len(bytes.fromhex(rng.token(12))) == 12
    assert rng.token() != rng.token()
    assert len(rng.bytes(5)) == 5


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    def draws(seed: int) -> tuple[int, str, bytes]:
        rng = SeededRng(seed)
        return rng.seed64(), rng.token(4), rng.bytes(3)

    assert draws(1) == draws(1) != draws(2)


async def test_the_inline_device_runs_in_order_and_counts() -> None:
    device, seen = InlineDevice(), list[int]()
    device.post(seen.append, 1)
    assert await device.run(lambda a, b: a + b, 2, 3) == 5
    device.post(seen.append, 2)
    assert (seen, device.statistics()) == ([1, 2], {"runs": 1, "posts": 2})


async def test_a_posted_failure_surfaces_once_on_the_next_run() -> None:
    device = InlineDevice()
    device.post(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1)
    assert await device.run(lambda: 1) == 1


async def test_a_device_run_is_a_checkpoint() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await InlineDevice().run(lambda: 1)
    assert scope.cancelled_caught
