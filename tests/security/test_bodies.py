"""Bodies of any kind at every door: an answer below 500, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onecopy.api.openapi import BODIES, plain

from tests.support.http import Direct
from tests.support.scripted import ScriptedService

PATHS = sorted({plain(path) for _, path in BODIES})
STEADY = settings(max_examples=60, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "model",
    "messages",
    "prompt",
    "input",
    "system",
    "tools",
    "tool_choice",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "response_format",
    "role",
    "content",
    "text",
]


def shaped(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with the fields that doors read, and anything in them."""
    message = st.fixed_dictionaries({}, optional={"role": JSON, "content": JSON})
    listed = st.dictionaries(st.sampled_from(FIELDS), value, max_size=6)
    return st.tuples(listed, st.lists(message, max_size=3)).map(lambda both: {"messages": both[1], **both[0]})


def answered(path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
    async def once() -> int:
        with trio.fail_after(20):
            return (await Direct(ScriptedService("Hello.")).post(path, body, headers)).status

    return trio.run(once)


@pytest.mark.parametrize("path", PATHS)
def test_any_json_is_answered(path: str) -> None:
    @STEADY
    @given(JSON | shaped(JSON))
    def attack(body: Any) -> None:
        assert answered(path, json.dumps(body).encode()) < 500

    attack()


@pytest.mark.parametrize("path", PATHS)
def test_any_bytes_are_answered(path: str) -> None:
    @STEADY
    @given(st.binary(max_size=200))
    def attack(body: bytes) -> None:
        assert 400 <= answered(path, body) < 500

    attack()


HOSTILE = {
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"messages":' * 50_000 + b"1" + b"}" * 50_000,
    "a deep message": b'{"messages":[{"role":"user","content":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
    "a huge number": b'{"messages":[],"max_tokens":' + b"9" * 5000 + b"}",
    "an endless exponent": b'{"messages":[],"temperature":1e999999}',
    "not a number": b'{"messages":[],"temperature":NaN}',
    "a key twice": b'{"messages":[],"messages":1}',
    "a lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}],"max_tokens":1}',
    "broken utf-8": b'{"messages":[{"role":"user","content":"\xff\xfe"}]}',
    "zero bytes": b'{"messages":[{"role":"user","content":"\\u0000"}],"max_tokens":1}',
    "another encoding": '{"messages":[]}'.encode("utf-16"),
    "a tool with a schema without end": json.dumps(
        {
            "messages": [{"role": "user", "content": "q"}],
            "max_tokens": 1,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
        }
    ).encode(),
    "a regular expression that explodes": json.dumps(
        {"messages": [{"role": "user", "content": "q"}], "max_tokens": 1, "stop": ["(a+)+$"] * 4}
    ).encode(),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", PATHS)
def test_hostile_json_is_answered(path: str, name: str) -> None:
    assert answered(path, HOSTILE[name]) < 500


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "a/b;" * 99]
)
def test_another_content_type_is_no_way_round(kind: str) -> None:
    assert answered("/v1/chat/completions", b"not json", {"content-type": kind}) in (400, 415)
