"""Whatever stands in a field: it is honoured or refused with a reason, and never a fault of the service."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from paceline.serving.api import build_api
from paceline.serving.api_generation import ApiParts
from paceline.serving.api_models import REFUSED, ChatBody, CompletionBody
from paceline.serving.api_tokenize import DetokenizeBody, TokenizeChat, TokenizePrompt
from tests.serving.api_server import TOKENIZER, ScriptedEngine

NESTED = "[" * 300 + "]" * 300
VALUES = [
    "null", "true", "false", "0", "-1", "1", "2", "1.5", "-1.5", "1e999", "-0.0", "1" + "0" * 40, '""', '"x"',
    '"\\u0000"', '"\\ud800"', '"' + "ä" * 300 + '"', "[]", "[1]", '["x"]', "[null]", "[[1]]", '[{"role": "user"}]', "{}",
    '{"a": 1}', '{"1": 2}', '{"": null}', NESTED, "[" + ",".join(["7"] * 2000) + "]",
]  # fmt: skip
ROUTES: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/completions", CompletionBody, {"prompt": "a"}),
    ("/v1/chat/completions", ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
    ("/tokenize", TokenizePrompt, {"prompt": "a"}),
    ("/tokenize", TokenizeChat, {"messages": [{"role": "user", "content": "a"}]}),
    ("/detokenize", DetokenizeBody, {"tokens": [70]}),
]


@pytest.mark.parametrize(("path", "kind", "body"), ROUTES)
def test_no_value_of_a_field_is_a_fault(path: str, kind: type[BaseModel], body: dict[str, Any]) -> None:
    async def ask_all() -> list[tuple[str, str, httpx.Response]]:
        app = build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER))
        answers = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for name in [*kind.model_fields, "no_such_field", *REFUSED]:
                rest = "".join(f", {json.dumps(k)}: {json.dumps(v)}" for k, v in body.items() if k != name)
                for value in VALUES if name not in REFUSED else VALUES[:3]:
                    raw = f"{{{json.dumps(name)}: {value}{rest}}}"
                    answers.append((name, value, await client.post(path, content=raw)))
        return answers

    statuses = set()
    for name, value, answer in asyncio.run(ask_all()):
        assert answer.status_code in (200, 400, 404), (name, value[:60], answer.status_code, answer.text[:300])
        statuses.add(answer.status_code)
        if answer.headers["content-type"] == "application/json" and answer.status_code != 200:
            assert answer.json()["error"]["message"]
    assert statuses >= {200, 400}


@pytest.mark.parametrize(
    "headers",
    [
        {"x-request-id": "ä"},
        {"x-request-id": "a\tb"},
        {"x-paceline-bucket": "../../etc"},
        {"x-paceline-tenant": "ä"},
        {"x-request-timeout-ms": "²"},
        {"authorization": "Bearer ä"},
    ],
)
def test_no_header_is_a_fault(headers: dict[str, str]) -> None:
    async def ask() -> httpx.Response:
        app = build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER))
        raw = {k: v.encode() for k, v in headers.items()}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions", json={"prompt": "a"}, headers=raw)

    answer = asyncio.run(ask())
    assert answer.status_code == (200 if "authorization" in headers else 400), answer.text
