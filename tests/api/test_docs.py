"""docs/api.md names every route and every request field, so that it cannot fall behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from onecopy.api.anthropic.types import MessagesRequest
from onecopy.api.app import ROUTES
from onecopy.api.gate import OPEN
from onecopy.api.openai.types import ChatRequest
from onecopy.api.openapi import plain
from onecopy.api.prometheus import COUNTERS

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("path", sorted({plain(path) for _, path, _, _ in ROUTES}))
def test_every_route_is_described(path: str) -> None:
    assert path.replace("/v1/models/{model}", "/v1/models/{id}").replace("/v1/sessions/{id}/", "…/{id}/") in TEXT


@pytest.mark.parametrize("field", ChatRequest.__struct_fields__)
def test_every_chat_field_is_described(field: str) -> None:
    assert f"`{field}" in TEXT


@pytest.mark.parametrize("field", MessagesRequest.__struct_fields__)
def test_every_message_field_is_described(field: str) -> None:
    assert f"`{field}" in TEXT


def test_counters_and_open_paths_are_described() -> None:
    words = {*COUNTERS, *(OPEN - {"/favicon.ico"})}
    assert {word for word in words if f"`{word}`" not in TEXT} == set()
