"""Requests made from `/openapi.json` itself, well-formed and malformed: none may be a server error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import trio
from onecopy.api.app import ROUTES
from onecopy.api.openapi import BODIES, document, plain

from tests.support.http import Running, running
from tests.support.scripted import ScriptedService

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = 15
TABLE = tuple((method, path, summary) for method, path, _, summary in ROUTES)
WITH_BODY = sorted(plain(path) for _, path in BODIES)


def operations(path: str) -> Iterator[Any]:
    schema = schemathesis.openapi.from_dict(document(TABLE, "0"))
    yield from schema[path].values()


def attack(server: Running, path: str, mode: Any) -> list[int]:
    """Statuses of generated requests to one path."""
    statuses: list[int] = []

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(data=hypothesis.strategies.data())
    def run(data: Any) -> None:
        for operation in operations(path):
            case = data.draw(operation.as_strategy(generation_mode=mode))
            response = case.call(base_url=server.url, timeout=30)
            statuses.append(response.status_code)
            assert response.status_code < 500, (case.body, response.text)

    run()
    return statuses


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("path", WITH_BODY)
async def test_no_generated_request_is_a_server_error(path: str, mode: str) -> None:
    service = ScriptedService("Hello.")
    async with running(service) as server:
        generation = schemathesis.GenerationMode(mode)
        statuses = await trio.to_thread.run_sync(attack, server, path, generation)
    assert statuses
    assert service.active == 0
