"""Who may come in, and what is told to whom."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from onecopy.api.doors import Options
from onecopy.api.gate import loopback
from onecopy.api.safety import Keys, split_key
from onecopy.runtime.errors import StartupError, Unauthorized

from tests.support.http import Answer, Direct
from tests.support.scripted import ScriptedService

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "my secret prompt"}], "max_tokens": 5}
KEYED = Options(keys=("alice:sk-alice", "sk-plain"))
PAGE = "http://localhost:3000"
EVIL = "https://evil.example"


async def post(options: Options, headers: dict[str, str], path: str = CHAT) -> Answer:
    return await Direct(ScriptedService(), options).post(path, BODY, headers)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/completions"])
@pytest.mark.parametrize(
    ("headers", "served"),
    [
        (bearer("sk-alice"), True),
        ({"x-api-key": "sk-plain"}, True),
        ({**bearer("sk-alice"), "x-api-key": "sk-plain"}, True),
        ({}, False),
        (bearer("sk-nope"), False),
        (bearer(""), False),
        ({"x-api-key": ""}, False),
        ({"authorization": "Basic sk-alice"}, False),
    ],
)
async def test_f20_either_key_header_opens_every_api(path: str, headers: dict[str, str], served: bool) -> None:
    answer = await post(KEYED, headers, path)
    if served:
        assert answer.status != 401
        return
    assert answer.status == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert ("type" in answer.json()) == (path == "/v1/messages")


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/sessions", "/v1/nothing"])
async def test_every_other_route_needs_the_key_too(path: str) -> None:
    assert (await Direct(ScriptedService(), KEYED).get(path)).status == 401


async def test_f20_health_needs_no_key_and_tells_less_without_one() -> None:
    client = Direct(ScriptedService(), KEYED)
    anyone, known = await client.get("/health"), await client.get("/health", bearer("sk-alice"))
    assert (anyone.status, known.status) == (200, 200)
    assert "details" not in anyone.json()
    assert "details" in known.json()
    assert (await client.get("/health", bearer("sk-nope"))).status == 401


async def test_f20_a_preflight_needs_no_key_and_is_told_what_may_be_sent() -> None:
    asked = "authorization, x-api-key, anthropic-version"
    headers = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": asked,
    }
    answer = await Direct(ScriptedService(), KEYED).request("OPTIONS", CHAT, b"", headers)
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == asked
    assert "POST" in answer.headers["access-control-allow-methods"]


async def test_f20_a_refusal_can_be_read_by_the_page_that_caused_it() -> None:
    answer = await post(KEYED, {"origin": PAGE})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("options", [Options(), Options(loopback=False), KEYED])
async def test_f20_a_foreign_page_is_kept_out_of_a_server_that_nothing_else_guards(options: Options) -> None:
    answer = await post(options, {"origin": EVIL, **bearer("sk-alice")})
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origins", [(EVIL,), ("*",)])
async def test_f20_configured_origins_may_call(origins: tuple[str, ...]) -> None:
    answer = await post(Options(origins=origins), {"origin": EVIL})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, EVIL)


@pytest.mark.parametrize("origin", ["null", "file://", "http://localhost.evil.example", "http://[", "app://localhost"])
async def test_an_origin_that_only_looks_local_is_foreign(origin: str) -> None:
    assert (await post(Options(), {"origin": origin})).status == 403


async def test_a_page_of_the_server_itself_may_call() -> None:
    host = {"host": "box.lan:8080", "origin": "http://box.lan:8080"}
    assert (await post(Options(loopback=False), host)).status == 200


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
async def test_a_loopback_server_answers_to_its_own_names(host: str) -> None:
    assert (await post(Options(), {"host": host})).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:80", "["])
async def test_a_name_that_was_made_to_point_here_is_refused(host: str) -> None:
    for path in (CHAT, "/health"):
        answer = await Direct(ScriptedService()).request("POST", path, b"{}", {"host": host})
        assert answer.status == 403


async def test_other_names_can_be_added() -> None:
    assert (await post(Options(hosts=("box.lan",)), {"host": "box.lan:80"})).status == 200


async def test_keys_keep_their_conversations_apart() -> None:
    client = Direct(service := ScriptedService("Hello."), KEYED)
    for key in ("sk-alice", "sk-plain", "sk-alice"):
        await client.post(CHAT, BODY, bearer(key))
    a, b, again = (spec.salt for spec in service.specs)
    assert a == again != b
    assert all(len(salt) == 16 for salt in (a, b))
    answer = await client.post(CHAT, BODY, bearer("sk-plain"))
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert [salt for salt, _ in service.seen] == [a, b, a, b]


def test_keys_are_held_as_digests_only() -> None:
    assert b"sk-alice" not in repr(Keys.open(["alice:sk-alice"])).encode()


def test_an_entry_without_a_label_is_named_by_its_digest() -> None:
    label, key = split_key("sk-plain")
    assert (key, len(label)) == ("sk-plain", 8)
    assert label not in key


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def test_a_key_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, "# people\nalice:sk-1\n\n")
    keys = Keys.open(path=str(path))
    assert keys.principal("sk-1").label == "alice"
    write(path, "alice:sk-1\nbob:sk-22\n")
    assert keys.principal("sk-22").label == "bob"
    write(path, "bob:sk-22\n")
    with pytest.raises(Unauthorized):
        keys.principal("sk-1")


def test_a_key_file_that_became_unusable_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, "sk-1\n")
    keys = Keys.open(path=str(path))
    write(path, "sk-1\nsk-2\n", 0o644)
    assert keys.principal("sk-1")
    with pytest.raises(Unauthorized):
        keys.principal("sk-2")
    path.unlink()
    assert keys.principal("sk-1")


def test_an_empty_key_file_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, "")
    with pytest.raises(Unauthorized):
        Keys.open(path=str(path)).principal("anything")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_file_others_can_read_is_refused_at_the_start(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    write(path, "sk-1\n", mode)
    with pytest.raises(StartupError, match="0600"):
        Keys.open(path=str(path))
    with pytest.raises(StartupError, match="cannot be read"):
        Keys.open(path=str(tmp_path / "none"))


async def test_logs_have_no_prompt_no_key_and_no_query(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = Direct(ScriptedService("my secret reply"), KEYED)
    await client.post(CHAT + "?token=sk-query", BODY, bearer("sk-alice"))
    await client.post(CHAT, BODY, bearer("sk-wrong"))
    await client.post(CHAT, BODY | {"n": "my secret prompt"}, bearer("sk-alice"))
    assert f"POST {CHAT} 200" in caplog.text
    assert "alice" in caplog.text
    for word in ("secret", "sk-"):
        assert word not in caplog.text


async def test_a_path_cannot_forge_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await Direct(ScriptedService()).get("/v1/x\nINFO forged")
    assert "\nINFO forged" not in caplog.text


@pytest.mark.parametrize(
    ("hosts", "found"), [(["127.0.0.1"], True), (["::1", "127.0.1.1"], True), (["0.0.0.0"], False)]
)
def test_loopback_means_every_address(hosts: list[str], found: bool) -> None:
    assert loopback(hosts) == found


def test_the_environment_is_not_read_by_the_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "ONECOPY_API_KEY", "sk-env")
    assert not Keys.open().wanted
