"""Facts of the store's index: what goes first, whatever was added, used and dropped before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.store import index as store_index
from onecopy.runtime.store import manifest as log
from onecopy.runtime.store.record import Kind

KEYS = [i.to_bytes(32, "big") for i in range(1, 13)]
ROOT = bytes(32)


def add(key: int, parent: int | None, used: int = 1) -> log.Add:
    above = ROOT if parent is None else KEYS[parent]
    return log.Add(KEYS[key], above, Kind.BLOCK, 1, key << 12, 4000, 0, 256, used, 1)


def sorted_out(index: store_index.Index, pinned: Collection[bytes]) -> list[bytes]:
    """The same order by looking at every record each time."""
    left = dict(index.entries.items())
    taken = dict[bytes, int]()
    order = list[bytes]()
    while True:
        parents = Counter(e.parent for e in left.values())
        tails = [key for key in left if not parents[key] and key not in pinned]
        if not tails:
            return order
        key = min(tails, key=lambda k: (max(taken.get(k, 0), left[k].used), k))
        entry = left.pop(key)
        used = max(taken.get(key, 0), entry.used)
        taken[entry.parent] = used
        order.append(key)


changes = st.one_of(
    st.tuples(st.integers(0, 11), st.integers(1, 11), st.integers(1, 9)).map(
        lambda t: add(t[0], t[0] - t[1] if t[0] >= t[1] else None, t[2])
    ),
    st.tuples(st.integers(2, 20), st.lists(st.sampled_from(KEYS), max_size=4)).map(
        lambda t: log.Touch(t[0], tuple(t[1]))
    ),
    st.lists(st.sampled_from(KEYS), max_size=3).map(lambda keys: log.Drop(tuple(keys))),
)


@given(st.lists(changes, max_size=40), st.sets(st.sampled_from(KEYS), max_size=3), st.integers(0, 12))
def test_the_coldest_are_the_same_as_by_looking_at_every_record(
    made: list[log.Op], pinned: set[bytes], some: int
) -> None:
    index = store_index.Index()
    for op in made:
        index.apply(op)
        next(iter(index.coldest(pinned)), None)
    expected = sorted_out(index, pinned)
    assert [e.key for e, _ in zip(index.coldest(pinned), range(some), strict=False)] == expected[:some]
    assert [e.key for e in index.coldest(pinned)] == expected
    index.apply(log.Drop(tuple(expected[:some])))
    assert [e.key for e in index.coldest(pinned)] == expected[some:]


def test_ten_thousand_uses_of_one_record_keep_the_heap_small() -> None:
    index = store_index.Index()
    index.apply(add(0, None))
    for used in range(10_000):
        index.apply(log.Touch(used, (KEYS[0],)))
    assert len(index._cold) <= 2 * store_index.STALE + 1
    assert [e.key for e in index.coldest(())] == [KEYS[0]]
