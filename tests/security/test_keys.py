"""Two API keys on one server: no row, name, file or count of one reaches the other, in memory or from disk.

That a prefix was kept can be told by timing among clients that share a key, which is documented; across keys nothing
is kept for anybody else, so there is nothing to time.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from onecopy.api.doors import Options

from tests.support.system import CHAT, Reply, Whole, body, serving, system_text, user, write_tiny

BLOCK = 256
CANARY = "the launch code is 7461"
TEXT = "".join(random.Random(31).choices("abcdefghijklmnopqrstuvwxyz ,.", k=3 * BLOCK))
SECRET = body(system_text(f"{CANARY} {TEXT}"), user("go on"))
ALICE, MALLORY = ({"authorization": f"Bearer sk-{name}"} for name in ("alice", "mallory"))
KEYED = Options(keys=("alice:sk-alice", "mallory:sk-mallory"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def whole(tiny: Path) -> AsyncIterator[Whole]:
    async with serving(tiny, doors=KEYED) as made:
        yield made


async def asked(whole: Whole, key: dict[str, str], wanted: dict[str, Any], **more: Any) -> Reply:
    answer = await whole.http.post(CHAT, json={**wanted, **more}, headers=key)
    assert answer.status_code == 200, answer.text
    return Reply.of(answer.json())


async def test_the_same_prompt_of_another_key_finds_nothing_and_is_answered_the_same(whole: Whole) -> None:
    first = await asked(whole, ALICE, SECRET)
    other = await asked(whole, MALLORY, SECRET)
    assert (first.cached, other.cached, other.onecopy["how"]) == (0, 0, "fresh")
    assert other.onecopy["diverged_at"] == 0
    assert other.said == first.said
    assert (await asked(whole, ALICE, SECRET)).cached == first.prompt - 1


@pytest.mark.parametrize("hint", ["prompt_cache_key", "user", "cache_salt"])
@pytest.mark.parametrize("guess", ["mine", "alice", "", "alice:sk-alice", "SESSION"])
async def test_a_hint_or_salt_that_names_the_other_key_opens_nothing(whole: Whole, hint: str, guess: str) -> None:
    first = await asked(whole, ALICE, SECRET, prompt_cache_key="mine", user="alice")
    guess = first.onecopy["session"] if guess == "SESSION" else guess
    assert (await asked(whole, MALLORY, SECRET, **{hint: guess})).cached == 0


async def test_sessions_of_another_key_are_not_there(whole: Whole) -> None:
    session = (await asked(whole, ALICE, SECRET)).onecopy["session"]
    listed = (await whole.http.get("/v1/sessions", headers=MALLORY)).json()["data"]
    assert session not in {s["id"] for s in listed}
    path = f"/v1/sessions/{session}"
    for method, url in (
        ("GET", path),
        ("DELETE", path),
        ("POST", f"{path}/fork"),
        ("POST", f"{path}/pin"),
        ("POST", f"{path}/park"),
        ("GET", f"{path}/export"),
        ("POST", f"{path}/export"),
    ):
        answer = await whole.http.request(method, url, headers=MALLORY)
        assert answer.status_code in (403, 404, 405), (method, url, answer.status_code)
        assert CANARY not in answer.text
    assert (await asked(whole, ALICE, SECRET)).cached > 0


async def test_rows_on_disk_serve_their_own_key_only(tiny: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    async with serving(tiny, store=store, doors=KEYED) as before:
        first = await asked(before, ALICE, SECRET)
    async with serving(tiny, store=store, doors=KEYED) as whole:
        other = await asked(whole, MALLORY, SECRET)
        assert (other.cached, other.onecopy["rows_restored"]) == (0, 0)
        assert other.said == first.said
        again = await asked(whole, ALICE, SECRET)
        assert again.onecopy["rows_restored"] >= 3 * BLOCK
        assert again.said == first.said


async def test_rows_that_were_given_up_are_never_read_by_whoever_gets_their_memory(tiny: Path) -> None:
    """Buffers go from one key to the other again and again; replies are those of a server that never saw the first."""
    async with serving(tiny, rows=5 * BLOCK * 512, doors=KEYED) as whole, serving(tiny, doors=KEYED) as fresh:
        for turn in range(4):
            mine, yours = (body(system_text(f"{turn} {who} {TEXT}"), user("?")) for who in ("a", "m"))
            await asked(whole, ALICE, mine)
            assert (await asked(whole, MALLORY, yours)).said == (await asked(fresh, MALLORY, yours)).said


@pytest.mark.parametrize("path", ["/metrics", "/v1/sessions", "/v1/models", "/health"])
async def test_without_a_key_nothing_tells_of_anybody(whole: Whole, path: str) -> None:
    first = await asked(whole, ALICE, SECRET)
    answer = await whole.http.get(path)
    assert answer.status_code == (200 if path == "/health" else 401)
    assert CANARY not in answer.text
    assert first.onecopy["session"] not in answer.text


def test_the_timing_that_is_left_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert "Clients that share a key can tell by timing" in text
