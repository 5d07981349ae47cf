"""Who may ask: the API token on every route, as the openai client sends it."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/paceline/state", "/paceline/swap"])
@pytest.mark.parametrize("token", [None, "", "wrong", "sesame", "Basic x"])
def test_every_route_asks_for_the_token(path: str, token: str | None) -> None:
    async def get(headers: dict[str, bytes]) -> httpx.Response:
        parts = ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER, clients=Clients(Tokens(api_token="sesame-ö")))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(build_api(parts)), base_url="http://test") as c:
            return await c.get(path, headers=headers)

    headers = (
        {} if token is None else {"authorization": token.encode() if " " in token else b"Bearer " + token.encode()}
    )
    refused = asyncio.run(get(headers))
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert asyncio.run(get({"authorization": "Bearer sesame-ö".encode()})).status_code == 200
    assert asyncio.run(get({})).status_code == 401


def test_the_openai_client_sends_the_token() -> None:
    engine = ScriptedEngine()
    with serve_app(
        build_api(ApiParts(client=engine, tokenizer=TOKENIZER, clients=Clients(Tokens(api_token="sesame"))))
    ) as base:
        good = openai.OpenAI(base_url=f"{base}/v1", api_key="sesame", max_retries=0)
        assert good.completions.create(model="tiny", prompt="a", max_tokens=5).choices[0].text == "Hello"
        bad = openai.OpenAI(base_url=f"{base}/v1", api_key="guess", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            bad.completions.create(model="tiny", prompt="a")
        assert httpx.get(f"{base}/healthz").status_code == 200
    assert len(engine.requests) == 1
