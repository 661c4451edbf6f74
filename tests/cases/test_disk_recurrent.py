"""A model with recurrent state on disk: its conversations come back at the states that were kept, and only there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.system import Reply, Whole, body, eventually, grown, serving, system_text, user, write_tiny

BLOCK = 256
TEXT = "".join(random.Random(12).choices("abcdefghijklmnopqrstuvwxyz ,.", k=8 * BLOCK))
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("recurrent"), kind="qwen3_5", **CONFIG)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def about(blocks: float, seed: int = 0) -> list[dict[str, Any]]:
    return [system_text(f"{seed} {TEXT[: int(blocks * BLOCK)]}"), user("go on")]


async def saved(whole: Whole) -> dict[str, Any]:
    await whole.at_rest()

    async def done() -> bool:
        return not (await whole.numbers())["stager"]["saving"]

    await eventually(done)
    return await whole.numbers()


@pytest.mark.parametrize("blocks", [0.5, 2.5])
async def test_a_conversation_goes_on_from_its_state_on_disk_as_it_would_have_in_memory(
    recurrent: Path, store: str, blocks: float
) -> None:
    async with serving(recurrent, store=store) as whole:
        first = await whole.ask(body(*about(blocks)))
        assert (await saved(whole))["stager"]["dirty"] == {}
    wanted = body(*grown(about(blocks), first, "and then?"))
    async with serving(recurrent) as whole:
        assert (await whole.ask(body(*about(blocks)))).said == first.said
        in_memory = await whole.ask(wanted)
        assert in_memory.onecopy["how"] in ("adopted", "extended")
    async with serving(recurrent, store=store) as whole:
        reply = await whole.ask(wanted)
        assert reply.onecopy["how"] == "restored"
        assert reply.cached == in_memory.cached == first.prompt + len(first.tokens) - 1
        assert reply.said == in_memory.said


async def test_a_parked_conversation_comes_back_at_its_last_row(recurrent: Path, store: str) -> None:
    async with serving(recurrent, store=store) as whole:
        first = await whole.ask(body(*about(1.5)))
        answer = await whole.http.post(f"/v1/sessions/{first.onecopy['session']}/park")
        assert answer.json()["state"] == "parked"
        assert (await saved(whole))["bank"]["bytes_used"] == 0
        reply = await whole.ask(body(*grown(about(1.5), first, "and then?")))
        assert reply.onecopy["session"] == first.onecopy["session"]
        assert reply.cached == first.prompt + len(first.tokens) - 1


async def test_without_a_state_at_or_before_its_end_a_prompt_is_computed_from_its_beginning(
    recurrent: Path, store: str
) -> None:
    async with serving(recurrent, store=store) as whole:
        first = await whole.ask(body(*about(2.5)))
    async with serving(recurrent, store=store) as whole:
        again = await whole.ask(body(*about(2.5)))
        assert again.cached == 0
        assert again.said == first.said


async def talked(whole: Whole, talk: list[dict[str, Any]], turns: int) -> tuple[list[dict[str, Any]], list[Reply]]:
    """Turns one after another, each saved: the messages of a next one, and the replies."""
    replies = list[Reply]()
    for turn in range(turns):
        replies.append(await whole.ask(body(*talk)))
        await saved(whole)
        talk = grown(talk, replies[-1], f"more {turn}")
    return talk, replies


async def test_states_stay_on_disk_while_they_are_smaller_than_the_rows_and_an_edit_goes_back_to_any(
    recurrent: Path, store: str
) -> None:
    async with serving(recurrent, store=store) as whole:
        talk, replies = await talked(whole, about(1.5), 5)
        layout = whole.system._engine.layout
        assert 5 * layout.state_bytes < replies[-1].prompt * layout.row_bytes
        assert (await saved(whole))["rows store"]["anchors"] == 5
    for back in (1, 3):
        async with serving(recurrent, store=store) as whole:
            reply = await whole.ask(body(*talk[: 1 - 2 * back], user("something else")))
            before = replies[-back]
            assert reply.cached == before.prompt + len(before.tokens) - 1


async def test_of_states_larger_than_the_rows_two_are_kept(tmp_path: Path, store: str) -> None:
    large = write_tiny(tmp_path / "large", kind="qwen3_5", **{**CONFIG, "linear_num_value_heads": 64})
    async with serving(large, store=store) as whole:
        talk, replies = await talked(whole, about(0.3), 4)
        layout = whole.system._engine.layout
        assert 3 * layout.state_bytes > replies[-1].prompt * layout.row_bytes
        assert (await saved(whole))["rows store"]["anchors"] == 2
    async with serving(large, store=store) as whole:
        reply = await whole.ask(body(*talk[:-3], user("something else")))
        assert reply.cached == replies[2].prompt + len(replies[2].tokens) - 1


async def test_where_prompts_part_a_state_is_on_disk_and_the_next_one_goes_on_there_after_a_restart(
    recurrent: Path, store: str
) -> None:
    def asking(text: str) -> dict[str, Any]:
        return body(about(1.6)[0], user(text))

    async with serving(recurrent, store=store) as whole:
        replies = [await whole.ask(asking(text)) for text in ("alpha?", "beta?", "gamma?")]
        assert [reply.cached > BLOCK for reply in replies] == [False, True, True]
        await saved(whole)
    async with serving(recurrent, store=store) as whole:
        after = await whole.ask(asking("delta?"))
        assert (after.onecopy["how"], after.cached) == ("restored", replies[2].cached)
    async with serving(recurrent) as whole:
        assert (await whole.ask(asking("delta?"))).said == after.said


async def test_an_edit_of_any_message_of_a_long_prompt_goes_on_where_the_message_starts(recurrent: Path) -> None:
    messages = [
        system_text(TEXT[:300]),
        user(TEXT[300:500]),
        {"role": "assistant", "content": TEXT[500:800]},
        user(TEXT[800:1100]),
    ]
    async with serving(recurrent) as whole:
        await whole.ask(body(*messages))
        for edited in (3, 2, 1):
            changed = {**messages[edited], "content": "instead " + TEXT[1100:1300]}
            wanted = body(*messages[:edited], changed, *messages[edited + 1 :])
            reply = await whole.ask(wanted)
            assert reply.cached > sum(len(message["content"]) for message in messages[:edited])
            assert reply.said == (await whole.cold(wanted)).said


async def test_bytes_of_states_taken_for_saves_are_accounted_and_come_back(recurrent: Path, store: str) -> None:
    async with serving(recurrent, store=store) as whole:
        replies = await whole.together([body(*about(1.2, seed)) for seed in range(4)])
        await saved(whole)
        assert whole.system._ledger is not None
        assert whole.system._ledger.audit() == []
        for reply in replies:
            await whole.system.drop(reply.onecopy["session"])
        assert (await whole.at_rest())["bank"]["bytes_used"] == 0
        assert whole.system._engine.pool.anchors == {}
