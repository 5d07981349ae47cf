"""Whatever stands in a field: it is honoured or refused with a reason, and never a fault of the service."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import torch
from pydantic import BaseModel

from paceline.errors import RequestError
from paceline.serving.api.app import build_api
from paceline.serving.api.bodies import REFUSED, ChatBody, CompletionBody
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.prompts import DetokenizeBody, TokenizeChat, TokenizePrompt
from paceline.serving.sampling.draw import SamplingBatch, TokenCounts, draw_tokens, has_penalties
from paceline.serving.sampling.request import SamplingParams
from tests.helpers.api_server import TOKENIZER, ScriptedEngine

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


WHOLE = [0, 1, -1, 2**31, 2**63, 2**70]
BROKEN = [1e-50, 1e-7, 1e300, float("inf"), float("nan")]


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, v) for n in ("top_k", "max_tokens", "seed") for v in WHOLE]
    + [
        (n, v)
        for n in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        for v in (*WHOLE, *BROKEN)
    ],
)
def test_parameters_that_are_taken_can_be_sampled_with(name: str, value: float) -> None:
    try:
        params = SamplingParams(**{"temperature": 0.7, name: value})  # type: ignore[arg-type]
    except RequestError:
        return
    counts = TokenCounts([1], 16) if has_penalties(params) else None
    batch = SamplingBatch.from_params([params], [int(params.seed or 0)], [counts])
    drawn = draw_tokens(torch.linspace(0, 3, 16)[None], torch.tensor([0]), torch.tensor([5]), batch)
    assert 0 <= int(drawn[0]) < 16
    if name == "temperature" and value < 1e-3:
        assert int(drawn[0]) == 15


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "\xed\xa0\x80"}',
        '{"prompt": "\\ud800"}'.encode("utf-16"),
        b'{"prompt": "a", "model": "\xed\xa0\x80"}',
        b'{"prompt": "a", "top_k": 9223372036854775808}',
        b'{"prompt": "a", "stop_token_ids": [1180591620717411303424]}',
        b'{"prompt": [' + b"1," * 200_000 + b'"a"]}',
        b'{"prompt": "a", "stop": [' + b"1," * 200_000 + b"1]}",
        b'{"prompt": "a", ' + b",".join(b'"f%d": 1' % i for i in range(50_000)) + b"}",
    ],
)
def test_a_body_that_cannot_be_meant_is_a_400_with_a_short_reason(raw: bytes) -> None:
    async def ask() -> httpx.Response:
        app = build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions", content=raw)

    answer = asyncio.run(asyncio.wait_for(ask(), 20))
    assert answer.status_code == 400 and len(answer.content) < 2000
