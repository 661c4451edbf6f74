"""Names of conversations that only the disk has."""

from __future__ import annotations

from onecopy.actors.away import Away, OnDisk
from onecopy.runtime.rows.grants import Conversation
from onecopy.runtime.rows.segments import Segment

BLOCK = 256
KEYS = tuple(bytes([i]) * 32 for i in range(4))


def gone(name: str, salt: bytes = b"") -> Conversation:
    return Conversation(name, Segment(1, None, 0, BLOCK), salt, 1.0, 0.5, lambda segment, by: None, "hint")


def test_a_name_is_found_by_the_record_it_ends_in_and_by_its_own_salt_only() -> None:
    away = Away()
    away.add(gone("one"), OnDisk(KEYS[:2], None, 2 * BLOCK))
    away.add(gone("two", b"key"), OnDisk(KEYS[:3], b"anchor", 3 * BLOCK + 9))
    assert away.named(KEYS, b"") == "one"
    assert away.named((*KEYS[:3], b"anchor"), b"key") == "two"
    assert away.named(KEYS[:1], b"") is None
    assert away.named((*KEYS[:3], b"anchor"), b"other") is None
    kept = away.get("two")
    assert kept is not None
    assert (kept.tokens, kept.owned, kept.parked, kept.hint, kept.tip) == (3 * BLOCK + 9, 0, True, "hint", b"anchor")


def test_what_the_disk_has_nothing_of_is_gone() -> None:
    away = Away()
    away.add(gone("one"), OnDisk(()))
    assert away.get("one") is None


def test_a_later_conversation_with_the_same_end_takes_the_name() -> None:
    away = Away()
    away.add(gone("one"), OnDisk(KEYS[:2], None, 2 * BLOCK))
    away.add(gone("two"), OnDisk(KEYS[:2], None, 2 * BLOCK))
    assert away.named(KEYS[:2], b"") == "two"
    assert [k.id for k in away] == ["two"]


def test_a_name_that_comes_back_is_forgotten_and_unknown_ones_are_passed_over() -> None:
    away = Away()
    away.add(gone("one"), OnDisk(KEYS[:2], None, 2 * BLOCK))
    away.remove("one")
    away.remove("one")
    assert (len(away), away.named(KEYS, b"")) == (0, None)


def test_only_so_many_names_are_kept_the_oldest_go() -> None:
    away = Away(most=2)
    for i, name in enumerate(("one", "two", "three")):
        away.add(gone(name), OnDisk(KEYS[: i + 1], None, (i + 1) * BLOCK))
    assert [k.id for k in away] == ["two", "three"]


def test_after_a_rewind_only_the_blocks_that_are_as_written_count() -> None:
    disk = OnDisk(KEYS, b"anchor", 4 * BLOCK + 9)
    assert disk.upto(4 * BLOCK + 9) is disk
    assert disk.upto(4 * BLOCK + 8) == OnDisk(KEYS, None, 4 * BLOCK)
    assert disk.upto(700) == OnDisk(KEYS[:2], None, 2 * BLOCK)
    assert disk.upto(100).tip == b""
