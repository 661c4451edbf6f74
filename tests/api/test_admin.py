"""Models, health, metrics, tokens, sessions, the generated document."""

from __future__ import annotations

import json
from typing import Any

import pytest
from onecopy.actors.service import Health
from onecopy.api.app import ROUTES
from onecopy.api.doors import Options
from onecopy.runtime.errors import ActorStopped

from tests.support.http import Direct
from tests.support.scripted import Say, ScriptedService

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


async def test_f19_each_listed_model_id_works_verbatim() -> None:
    client = Direct(ScriptedService())
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert model["object"] == "model"
    assert (model["owned_by"], model["created"]) == ("onecopy", 1_700_000_000)
    assert (await client.get(f"/v1/models/{model['id']}")).json() == model
    assert (await client.post(CHAT, BODY | {"model": model["id"]})).status == 200
    assert (await client.get("/v1/models/nope")).status == 404


@pytest.mark.parametrize(("alias", "name"), [("claude", "claude"), ("*", "anything-at-all")])
async def test_f19_aliases_are_configured(alias: str, name: str) -> None:
    answer = await Direct(ScriptedService(), Options(aliases=(alias,))).post(CHAT, BODY | {"model": name})
    assert answer.json()["model"] == "acme/tiny-chat"


@pytest.mark.parametrize(
    ("status", "code"), [("ok", 200), ("degraded", 200), ("starting", 503), ("stopping", 503), ("failed", 503)]
)
async def test_health_tells_the_truth_with_reasons(status: Any, code: int) -> None:
    service = ScriptedService()
    service.status = Health(status, ("The disk is full.",), {"depth": 3})
    answer = await Direct(service).get("/health")
    assert answer.status == code
    body = answer.json()
    assert (body["status"], body["reasons"], body["exact"]) == (status, ["The disk is full."], "exact")


async def test_health_of_a_stopped_system_is_failed() -> None:
    class Stopped(ScriptedService):
        async def health(self) -> Health:
            raise ActorStopped("The bank has stopped.")

    answer = await Direct(Stopped()).get("/health")
    assert (answer.status, answer.json()["status"]) == (503, "failed")


def metrics(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_metrics_count_what_passed_and_show_the_systems_own() -> None:
    client = Direct(ScriptedService("Hello."))
    for _ in range(2):
        await client.post(CHAT, BODY)
    text = (await client.get("/metrics")).body.decode()
    found = metrics(text)
    label = '{model_name="acme/tiny-chat"}'
    assert found[f"vllm:generation_tokens_total{label}"] == 14
    assert found[f"onecopy_rows_adopted_total{label}"] == found[f"vllm:prefix_cache_hits_total{label}"] > 0
    assert found[f"vllm:num_requests_running{label}"] == 0
    assert found['vllm:request_success_total{model_name="acme/tiny-chat",finished_reason="stop"}'] == 2
    assert found[f"vllm:time_to_first_token_seconds_count{label}"] == 2
    assert found["onecopy_bank_rows_held"] == 12
    assert "# TYPE onecopy_bank_evictions_total counter" in text
    assert "onecopy_bank_owner" not in text
    assert text.count("# TYPE vllm:time_to_first_token_seconds histogram") == 1


async def test_metrics_count_failures_by_code_and_leavers_as_aborts() -> None:
    client = Direct(ScriptedService(Say("Hello", fails_after=2)))
    await client.post(CHAT, BODY)
    found = metrics((await client.get("/metrics")).body.decode())
    assert found['onecopy_request_errors_total{model_name="acme/tiny-chat",code="internal_error"}'] == 1
    assert not any("request_success" in name for name in found)


async def test_text_to_tokens_and_back() -> None:
    client = Direct(service := ScriptedService())
    found = (await client.post("/tokenize", {"prompt": "héllo", "return_token_strs": True})).json()
    assert found["count"] == len(found["tokens"]) == 6
    assert found["token_strs"][0] == "h"
    assert (await client.post("/detokenize", {"tokens": found["tokens"]})).json() == {"prompt": "héllo"}
    chat = (await client.post("/tokenize", {"messages": BODY["messages"]})).json()
    assert chat["tokens"] == service.chat.tokens(BODY["messages"])


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {}), ("/detokenize", {}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [10**9]})],
)
async def test_tokens_that_make_no_sense_are_refused(path: str, body: Any) -> None:
    assert (await Direct(ScriptedService()).post(path, body)).status == 400


async def test_a_session_is_listed_pinned_parked_forked_exported_imported_and_dropped() -> None:
    client = Direct(ScriptedService("Hello."))
    id = (await client.post(CHAT, BODY)).headers["x-onecopy-session"]
    path = f"/v1/sessions/{id}"
    assert [s["id"] for s in (await client.get("/v1/sessions")).json()["data"]] == [id]
    assert (await client.post(path + "/pin", b"")).json()["pinned"] is True
    assert (await client.post(path + "/pin", {"pinned": False})).json()["pinned"] is False
    assert (await client.post(path + "/park", b"")).json()["state"] == "parked"
    child = await client.post(path + "/fork", {"at": 3})
    assert (child.status, child.json()["parent"], child.json()["tokens"]) == (201, id, 3)
    exported = await client.get(path + "/export")
    assert exported.headers["content-type"] == "application/vnd.safetensors"
    assert (await client.post("/v1/sessions/import", exported.body)).status == 201
    assert (await client.post(path + "/cancel", b"")).json() == {"id": id, "cancelled": False}
    assert (await client.request("DELETE", path)).json()["deleted"] is True
    assert (await client.get(path)).status == 404


@pytest.mark.parametrize("at", [-1, 10**6, "x"])
async def test_a_fork_outside_its_parent_is_refused(at: Any) -> None:
    client = Direct(ScriptedService("Hello."))
    id = (await client.post(CHAT, BODY)).headers["x-onecopy-session"]
    answer = await client.post(f"/v1/sessions/{id}/fork", {"at": at})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "at")


async def test_another_keys_session_is_as_absent_as_none() -> None:
    client = Direct(ScriptedService("Hello."), Options(keys=("a:key-a", "b:key-b")))
    a, b = ({"x-api-key": key} for key in ("key-a", "key-b"))
    id = (await client.post(CHAT, BODY, a)).headers["x-onecopy-session"]
    assert (await client.get("/v1/sessions", b)).json()["data"] == []
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pin"), ("POST", "/fork"), ("GET", "/export")):
        assert (await client.request(method, f"/v1/sessions/{id}{path}", b"", b)).status == 404
    shown = (await client.get(f"/v1/sessions/{id}", a)).json()
    assert shown["id"] == id
    assert "salt" not in shown


async def test_the_document_has_every_route_and_every_field() -> None:
    document = (await Direct(ScriptedService()).get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert listed == {(method, path.replace(":path", "")) for method, path, _, _ in ROUTES}
    schemas = document["components"]["schemas"]
    assert "max_completion_tokens" in schemas["ChatRequest"]["properties"]
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= set(schemas)


async def test_the_dashboard_is_one_page_that_loads_nothing_from_elsewhere() -> None:
    answer = await Direct(ScriptedService()).get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert b"http://" not in answer.body
    assert b"https://" not in answer.body
