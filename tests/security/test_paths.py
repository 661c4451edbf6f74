"""Names from outside never become paths: models, sessions, responses, files of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onecopy.runtime.seams import RealDisk
from onecopy.runtime.store import RowsOnDisk

from tests.support.http import Direct
from tests.support.rows import DAY, PRINT, records_of, same, talk
from tests.support.scripted import ScriptedService

NAMES = (
    "../../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "....//....//etc/passwd",
    "/etc/passwd",
    "//etc/passwd",
    "file:///etc/passwd",
    "C:\\windows\\system32",
    "~root/.ssh/id_rsa",
    "a\x00b",
    "%00",
    "a" * 5000,
    "$(id)",
    "{{7*7}}",
    "..",
    ".",
)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that anybody opens by a name with `etc` or `passwd` in it."""
    seen: list[str] = []
    right = open

    def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
        if "passwd" in str(file) or "/etc/" in str(file):
            seen.append(str(file))
        return right(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", watched)
    monkeypatch.setattr("io.open", watched)
    return seen


@pytest.mark.parametrize("name", NAMES)
async def test_a_session_or_response_by_a_hostile_name_is_not_found(name: str, opened: list[str]) -> None:
    client = Direct(ScriptedService("Hello."))
    for method, path in (
        ("GET", f"/v1/sessions/{name}"),
        ("DELETE", f"/v1/sessions/{name}"),
        ("POST", f"/v1/sessions/{name}/park"),
        ("GET", f"/v1/responses/{name}"),
        ("DELETE", f"/v1/responses/{name}"),
        ("GET", f"/v1/models/{name}"),
        ("GET", f"/{name}"),
    ):
        answer = await client.request(method, path.replace("\x00", "%00"))
        assert answer.status in (400, 404, 405) or (answer.status == 200 and b"root:" not in answer.body)
        assert b"root:" not in answer.body
    assert opened == []


@pytest.mark.parametrize("name", NAMES)
async def test_a_model_by_a_hostile_name_opens_nothing(name: str, opened: list[str]) -> None:
    client = Direct(ScriptedService("Hello."))
    body = {"model": name, "messages": [{"role": "user", "content": "q"}], "max_tokens": 2}
    answer = await client.post("/v1/chat/completions", body)
    assert answer.status < 500
    assert opened == []


@pytest.mark.parametrize("name", NAMES)
async def test_a_hint_by_a_hostile_name_is_only_a_hint(name: str, opened: list[str]) -> None:
    client = Direct(ScriptedService("Hello."))
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 2, "user": name, "prompt_cache_key": name}
    assert (await client.post("/v1/chat/completions", body)).status < 500
    assert opened == []


def test_a_link_in_a_store_leads_nowhere_else(tmp_path: Path) -> None:
    """Files that a stranger put beside the packs, or linked to his own, are neither read, written nor removed."""
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    path = tmp_path / "store"
    store = RowsOnDisk.open(RealDisk(), str(path), fingerprint=PRINT, wall=lambda: DAY, floor=0)
    records = records_of(talk(1, 600))
    store.put(records)
    store.close()
    (path / "link").symlink_to(target)
    (path / "..hidden").write_bytes(b"x")
    again = RowsOnDisk.open(RealDisk(), str(path), fingerprint=PRINT, wall=lambda: DAY, floor=0)
    assert all(same(again, record) for record in records)
    again.drop([r.key for r in records])
    again.commit()
    again.sweep()
    again.close()
    assert target.read_bytes() == b"mine"
    assert (path / "link").is_symlink()
    assert (path / "..hidden").exists()
