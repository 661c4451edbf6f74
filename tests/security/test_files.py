"""A store directory damaged in any way: what is read is right, or it is not there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onecopy.runtime.errors import StoreUnusable
from onecopy.runtime.seams import RealDisk
from onecopy.runtime.store import RowsOnDisk

from tests.support.rows import DAY, PRINT, records_of, same, talk

RECORDS = [*records_of(talk(1, 700), anchor=True, width=1), *records_of(talk(2, 300), width=1)]


def open_at(path: Path) -> RowsOnDisk:
    return RowsOnDisk.open(RealDisk(), str(path), fingerprint=PRINT, wall=lambda: DAY, floor=0)


def made() -> dict[str, bytes]:
    """The files of a small store."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store"
        store = open_at(path)
        store.put(RECORDS)
        store.close()
        return {f.name: f.read_bytes() for f in path.iterdir() if f.is_file()}


FILES = made()


@st.composite
def damage(draw: st.DrawFn) -> dict[str, bytes]:
    """The files with one to four things done to them."""
    files = dict(FILES)
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(files)))
        data = bytearray(files[name])
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(("flip", "cut", "zero", "swell", "shift", "swap", "gone"))):
            case "flip" if data:
                data[at] ^= draw(st.integers(1, 255))
            case "cut":
                del data[at:]
            case "zero":
                data[at : at + 512] = bytes(len(data[at : at + 512]))
            case "swell":
                data += draw(st.binary(max_size=300))
            case "shift":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case "swap":
                data = bytearray(files[draw(st.sampled_from(sorted(files)))])
            case "gone":
                del files[name]
                if not files:
                    return files
                continue
        files[name] = bytes(data)
    return files


@settings(max_examples=250, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(damage())
def test_damaged_files_give_right_rows_or_none(files: dict[str, bytes]) -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        path = directory / "store"
        path.mkdir(mode=0o700)
        for name, data in files.items():
            (path / name).write_bytes(data)
        try:
            store = open_at(path)
        except StoreUnusable:
            return
        for record in RECORDS:
            assert store.read(record.key) is None or same(store, record)
        store.put(RECORDS)
        assert all(same(store, record) for record in RECORDS)
        store.close()
    finally:
        shutil.rmtree(directory)


def test_the_harness_reads_what_nobody_damaged() -> None:
    assert len(FILES) >= 2
