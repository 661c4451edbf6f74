"""One conversation out of a store and into another."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onecopy.runtime.errors import BadRequest, NotFound
from onecopy.runtime.seams import append_all
from onecopy.runtime.store import fingerprint
from onecopy.runtime.store.portable import export_conversation, import_conversation, read_exported
from onecopy.runtime.store.safetensors import BF16, Image, decode, encode

from tests.sim.disk import SimDisk
from tests.support.rows import open_store, records_of, same, talk

FILE = "/out.safetensors"


def exported(n: int = 700) -> tuple[SimDisk, list[int]]:
    disk, tokens = SimDisk(), talk(1, n)
    store = open_store(disk, model="tiny")
    records = records_of(tokens, b"salt-1", anchor=n % 256 > 0)
    store.put(records)
    export_conversation(store, records[-1].key, disk, FILE)
    return disk, tokens


@pytest.mark.parametrize("n", [100, 512, 700])
def test_a_conversation_moves_to_another_machine_and_another_salt(n: int) -> None:
    disk, tokens = exported(n)
    about = read_exported(disk, FILE)
    assert (list(about.tokens), about.model, about.anchor) == (tokens, "tiny", n % 256 > 0)
    there = open_store(disk, "/there", model=about.model)
    seen: list[tuple[int, int]] = []
    _, new = import_conversation(there, disk, FILE, b"salt-2", lambda done, total: seen.append((done, total)))
    records = records_of(tokens, b"salt-2", anchor=n % 256 > 0)
    assert new == len(records) == len(seen)
    assert seen[-1] == (new, new)
    assert all(same(there, r) for r in records)
    assert not there.find(tokens, b"salt-1").keys


def test_any_safetensors_reader_opens_an_exported_conversation() -> None:
    disk, tokens = exported(700)
    image = decode(bytes(disk.medium.names[FILE].live))
    assert image.tensors["tokens"].tolist() == tokens
    assert image.tensors["000001.0.keys"].shape == (2, 256, 4)
    assert image.tensors["anchor.0.values"].shape == (2, 188, 4)


def test_half_precision_rows_keep_their_type() -> None:
    disk = SimDisk()
    store = open_store(disk)
    (record,) = records_of(talk(1, 256))
    record.tensors["0.keys"] = np.arange(64, dtype="<u2").view(BF16)  # type: ignore[index]
    store.put([record])
    export_conversation(store, record.key, disk, FILE)
    there = open_store(disk, "/there")
    import_conversation(there, disk, FILE, b"")
    got = there.read(record.key)
    assert got is not None
    assert got.tensors["0.keys"].dtype.metadata == {"safetensors": "BF16"}


def test_a_damaged_conversation_is_not_exported_and_leaves_no_file() -> None:
    disk = SimDisk()
    store = open_store(disk)
    records = records_of(talk(1, 768))
    store.put(records)
    store.drop([records[0].key])
    with pytest.raises(NotFound):
        export_conversation(store, records[-1].key, disk, FILE)
    assert disk.listdir("/") == ["store"]


def test_another_models_file_is_refused() -> None:
    disk, _ = exported()
    with pytest.raises(BadRequest, match="another model"):
        import_conversation(open_store(disk, "/there", fingerprint=fingerprint({})), disk, FILE, b"")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"{}",
        encode(Image({"tokens": np.zeros(256, "<u4")}, {"format": "other"})),
        encode(Image({"tokens": np.zeros(256, "<u4")}, {"format": "onecopy.conversation", "version": "2"})),
        encode(Image({}, {"format": "onecopy.conversation", "version": "1", "fingerprint": "00" * 32})),
        encode(
            Image(
                {"tokens": np.zeros(256, "<u4"), "000001.k": np.zeros(1)},
                {"format": "onecopy.conversation", "version": "1", "fingerprint": "00" * 32},
            )
        ),
        encode(
            Image(
                {"tokens": np.zeros(300, "<u4"), "000000.k": np.zeros(1)},
                {"format": "onecopy.conversation", "version": "1", "fingerprint": "00" * 32},
            )
        ),
    ],
)
def test_files_that_are_no_conversation_are_refused(raw: bytes) -> None:
    disk = SimDisk()
    append_all(disk.open_append(FILE), raw)
    with pytest.raises(BadRequest, match="not a conversation file"):
        read_exported(disk, FILE)


@given(st.integers(0, 3000), st.binary(min_size=1, max_size=4))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_tampered_header_is_refused_or_harmless(at: int, garbage: bytes) -> None:
    disk, _ = exported(256)
    size = 8 + int.from_bytes(disk.medium.names[FILE].live[:8], "little")
    disk.corrupt(FILE, at % size, garbage)
    there = open_store(disk, "/there")
    with contextlib.suppress(BadRequest):
        import_conversation(there, disk, FILE, b"")
    assert there.verify().bad == 0
