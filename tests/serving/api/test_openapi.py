"""The API's description names every route and every field of its bodies, and its page needs nothing from outside."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from paceline.serving.api import openapi
from paceline.serving.api.app import build_api, make_router
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.openapi import BODIES, describe
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine


@pytest.fixture(scope="module")
def answers() -> dict[str, httpx.Response]:
    client = TestClient(
        build_api(ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER, clients=Clients(Tokens(api_token="t"))))
    )
    return {path: client.get(path) for path in ("/openapi.json", "/docs")}


def test_every_route_and_every_body_is_described(answers: dict[str, httpx.Response]) -> None:
    document = answers["/openapi.json"].json()
    paths = _paths(make_router(ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER)).routes)
    assert set(document["paths"]) == {path.replace(":path", "") for path in paths}
    posts = {path for path, each in document["paths"].items() if "post" in each}
    assert posts == set(BODIES), "every POST has a body that is described"
    schemas = document["components"]["schemas"]
    for path, kinds in BODIES.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        refs = [each["$ref"] for each in body.get("anyOf", [body])]
        assert refs == [f"#/components/schemas/{kind.__name__}" for kind in kinds]
        for kind in kinds:
            own = schemas[kind.__name__]["properties"]
            assert set(own) == set(kind.model_fields)
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', answers["/openapi.json"].text))
    assert refs <= set(schemas), "a reference leads nowhere"
    assert schemas["ChatBody"]["properties"]["min_tokens"]["description"].startswith("Tokens before which")


def test_commands_are_described_with_their_refusals_and_the_dashboards_own_routes_are_left_out() -> None:
    app = FastAPI()
    for path in ("/paceline/{name}", "/dashboard/api/commands/{name}"):
        app.add_api_route(path, lambda name: {}, methods=["POST"])
    paths = describe(app.routes)["paths"]
    assert set(paths) == {"/paceline/{name}"}
    assert set(paths["/paceline/{name}"]["post"]["responses"]) >= {
        "200",
        "400",
        "401",
        "403",
        "404",
        "413",
        "415",
        "503",
    }


def test_the_page_is_offline_and_has_every_field(answers: dict[str, httpx.Response]) -> None:
    page = answers["/docs"]
    assert page.status_code == 200 and "<script" not in page.text and not re.search(r"https?://", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert all(
        f"<code>{name}</code>" in page.text for kinds in BODIES.values() for k in kinds for name in k.model_fields
    )


def test_the_api_is_described_once_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(openapi, "describe", lambda routes: calls.append(1) or describe(routes))
    client = TestClient(build_api(ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER)))
    found = [client.get(path).text for path in ("/openapi.json", "/docs") * 2]
    assert len(calls) == 1 and found[:2] == found[2:]


def _paths(routes: list) -> set[str]:
    found: set[str] = set()
    for route in routes:
        inner = getattr(route, "original_router", None)
        found |= _paths(inner.routes) if inner is not None else {route.path}
    return found
