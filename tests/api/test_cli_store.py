"""`onecopy store`, on a real directory."""

import json
import time
from pathlib import Path

import pytest
from onecopy.api.cli import main
from onecopy.runtime.seams import RealDisk
from onecopy.runtime.store import RowsOnDisk

from tests.support.rows import PRINT, records_of, same, talk


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """A store with two conversations that share two blocks."""
    path = str(tmp_path / "rows")
    store = opened(path)
    shared = talk(1, 512)
    store.put(records_of([*shared, *talk(2, 300)], anchor=True))
    store.put(records_of([*shared, *talk(3, 256)]))
    store.close()
    return path


def opened(path: str) -> RowsOnDisk:
    return RowsOnDisk.open(RealDisk(), path, fingerprint=PRINT, model="tiny", wall=time.time, floor=0)


def listed(directory: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main(["store", "ls", "--json", "--store", directory]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_ls_shows_conversations(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(directory, capsys)
    assert sorted((r["tokens"], r["model"], r["whole"]) for r in rows) == [(768, "tiny", True), (812, "tiny", True)]
    assert all(r["bytes_own"] < r["bytes"] for r in rows)  # type: ignore[operator]
    assert main(["store", "ls", "--store", directory]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_ls_works_beside_a_server_and_changes_wait_for_it(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = opened(directory)
    assert len(listed(directory, capsys)) == 2
    assert main(["store", "sweep", "--store", directory]) == 1
    assert "in use by process" in capsys.readouterr().err
    server.close()


def test_verify_finds_damage_gives_it_up_and_says_so(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", "--store", directory]) == 0
    pack = Path(directory) / "rows-00000001.pack"
    raw = bytearray(pack.read_bytes())
    raw[2000] ^= 1
    pack.write_bytes(raw)
    assert main(["store", "verify", "--store", directory]) == 1
    assert "1 damaged and given up" in capsys.readouterr().err
    assert main(["store", "verify", "--store", directory]) == 0


def test_a_conversation_is_exported_dropped_and_imported_again(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(str(r["id"]) for r in listed(directory, capsys) if r["tokens"] == 812)
    file = str(tmp_path / "talk.safetensors")
    assert main(["store", "export", "--store", directory, name[:12], file]) == 0
    size = (Path(directory) / "rows-00000001.pack").stat().st_size
    assert main(["store", "drop", "--store", directory, name[:12]]) == 0
    assert sum(p.stat().st_size for p in Path(directory).glob("*.pack")) < size
    assert [r["tokens"] for r in listed(directory, capsys)] == [768]
    assert main(["store", "import", "--store", directory, file]) == 0
    assert "2 new records" in capsys.readouterr().err
    store = opened(directory)
    assert all(same(store, r) for r in records_of([*talk(1, 512), *talk(2, 300)], anchor=True))
    store.close()


def test_dropped_bytes_are_really_gone_after_a_sweep(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(str(r["id"]) for r in listed(directory, capsys) if r["tokens"] == 768)
    secret = bytes(records_of([*talk(1, 512), *talk(3, 256)])[-1].tensors["0.keys"].tobytes()[:64])
    assert any(secret in p.read_bytes() for p in Path(directory).glob("*.pack"))
    assert main(["store", "drop", "--store", directory, name]) == 0
    assert not any(secret in p.read_bytes() for p in Path(directory).iterdir())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ls", "--store", "/nowhere"], "no rows store in /nowhere"),
        (["drop", "zz"], "No conversation begins"),
        (["drop", ""], "2 conversations begin"),
        (["import", "/no/file"], "no file /no/file"),
    ],
)
def test_mistakes_are_one_clear_line(
    args: list[str], says: str, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", *args, *([] if "--store" in args else ["--store", directory])]) == 1
    out = capsys.readouterr()
    assert says in out.err
    assert not out.out


def test_nothing_but_words_goes_to_a_log_file(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["store", "verify", "--store", directory])
    main(["store", "sweep", "--store", directory])
    assert "\x1b" not in capsys.readouterr().err
