from __future__ import annotations

import pytest
from onecopy.runtime.decode.keys import folded_seed, key_of, mixed
from onecopy.runtime.errors import BadRequest


def test_the_mixer_gives_the_published_splitmix64_stream() -> None:
    golden = 0x9E3779B97F4A7C15
    stream = [mixed(golden * step % 2**64) for step in (1, 2, 3)]
    assert stream == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_seeds_and_positions_never_meet_in_one_key() -> None:
    seeds = [0, 1, 2, 3, 2**32, 2**63, 2**64 - 1]
    keys = {key_of(seed, position) for seed in seeds for position in range(3000)}
    assert len(keys) == 3000 * len(seeds)


def test_a_key_is_two_32_bit_words() -> None:
    assert all(0 <= word < 2**32 for position in range(100) for word in key_of(2**64 - 1, position))


@pytest.mark.parametrize(("seed", "folded"), [(0, 0), (42, 42), (2**63, 2**63), (2**64, 0), (2**70 + 5, 5)])
def test_a_seed_counts_modulo_two_to_the_64(seed: int, folded: int) -> None:
    assert folded_seed(seed) == folded
    assert key_of(seed, 9) == key_of(folded, 9)


def test_a_negative_seed_is_refused_by_name() -> None:
    with pytest.raises(BadRequest) as caught:
        folded_seed(-1)
    assert caught.value.param == "seed"
