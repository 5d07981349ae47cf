"""Whatever stands in a field: it is honoured or refused with a reason, and never a fault of the service."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from paceline.errors import RequestError
from paceline.serving.api.app import build_api
from paceline.serving.api.bodies import ChatBody, CompletionBody, ResponsesBody
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.prompts import DetokenizeBody, TokenizeChat, TokenizePrompt
from paceline.serving.sampling.draw import SamplingBatch, TokenCounts, draw_tokens, has_penalties
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.wire.fields import IGNORED, REFUSED
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
    ("/v1/responses", ResponsesBody, {"input": "a"}),
    ("/tokenize", TokenizePrompt, {"prompt": "a"}),
    ("/tokenize", TokenizeChat, {"messages": [{"role": "user", "content": "a"}]}),
    ("/detokenize", DetokenizeBody, {"tokens": [70]}),
]


NUM_BAD = 20_000
BAD: list[Any] = [
    [{}] * NUM_BAD, [""] * NUM_BAD, [None] * NUM_BAD, [[{}] * NUM_BAD], {str(i): None for i in range(NUM_BAD)},
    {str(i): "x" for i in range(NUM_BAD)}, [{"type": "text", "text": 5}] * NUM_BAD, [{"role": "user"}] * NUM_BAD,
    [{"role": "user", "content": [{"type": "z"}] * NUM_BAD}], [{"role": "user", "x": 1} | {str(i): 1 for i in range(NUM_BAD)}],
    [{"role": "assistant", "tool_calls": [{}] * NUM_BAD}], {"type": "json_schema", "json_schema": {str(i): 1 for i in range(NUM_BAD)}},
]  # fmt: skip


@pytest.mark.parametrize(("path", "kind", "body"), ROUTES)
def test_many_bad_elements_cost_no_error_each(path: str, kind: type[BaseModel], body: dict[str, Any]) -> None:
    for name in [*kind.model_fields]:
        for bad in BAD:
            num_errors = 0
            try:
                kind.model_validate({**body, kind.model_fields[name].alias or name: bad})
            except ValidationError as e:
                num_errors = e.error_count()
            except RequestError:
                pass
            assert num_errors < NUM_BAD / 4, (name, str(bad)[:60])


@pytest.mark.parametrize(("path", "kind", "body"), ROUTES)
def test_no_value_of_a_field_is_a_fault(path: str, kind: type[BaseModel], body: dict[str, Any]) -> None:
    async def ask_all() -> list[tuple[str, str, httpx.Response]]:
        app = build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER))
        answers = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for name in [*kind.model_fields, "no_such_field", *REFUSED, *IGNORED]:
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


APP = build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER))
_NAMES = st.sampled_from(
    ["type", "text", "function", "name", "arguments", "id", "json", "regex", "choice", "schema", "a", ""]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["auto", "required", "function", "text", "assistant", "tool", "x" * 300]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
TOOL = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g", ""]), "parameters": JSON})}
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": JSON},
    optional={"name": JSON, "tool_calls": JSON, "tool_call_id": JSON, "refusal": JSON, "reasoning_content": JSON},
)
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE | JSON, max_size=3) | JSON},
    optional={
        "tools": st.lists(TOOL | JSON, max_size=3) | JSON,
        **dict.fromkeys(("tool_choice", "metadata", "response_format", "structured_outputs", "guided_json", "store", "n"), JSON),
    },
)  # fmt: skip
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])},
    optional={
        "role": st.sampled_from(["user", "assistant"]),
        **dict.fromkeys(("content", "call_id", "name", "arguments", "output", "id", "status"), JSON),
    },
)
PLAIN = st.fixed_dictionaries(
    {"role": st.just("user"), "content": st.lists(st.fixed_dictionaries({"type": st.just("input_text"), "text": st.text(max_size=3)}), max_size=2)}
)  # fmt: skip
FLAT_TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "web_search"]), "name": st.sampled_from(["f", "g", ""]), "parameters": JSON}
)
RESPONSE = st.fixed_dictionaries(
    {"input": st.lists(ITEM | PLAIN | JSON, max_size=3) | st.text(max_size=4) | JSON},
    optional={
        "tools": st.lists(FLAT_TOOL | JSON, max_size=3) | JSON,
        "text": st.fixed_dictionaries({"format": JSON}) | JSON,
        **dict.fromkeys(
            ("instructions", "tool_choice", "include", "metadata", "bad_words", "reasoning", "stream_options"), JSON
        ),
    },
)
COMPLETION = st.fixed_dictionaries(
    {"prompt": st.lists(st.text(max_size=3) | st.lists(st.integers(-1, 300), max_size=3) | JSON, max_size=4) | JSON},
    optional=dict.fromkeys(
        ("min_tokens", "allowed_token_ids", "truncate_prompt_tokens", "guided_choice", "ebnf", "bad_words"), JSON
    ),
)


@settings(max_examples=50)
@given(
    body=st.tuples(st.just("/v1/chat/completions"), CHAT)
    | st.tuples(st.just("/v1/completions"), COMPLETION)
    | st.tuples(st.just("/v1/responses"), RESPONSE)
)
def test_no_nesting_of_values_is_a_fault(body: tuple[str, dict[str, Any]]) -> None:
    path, values = body

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://test") as client:
            return await client.post(path, content=json.dumps(values).encode(errors="surrogatepass"))

    answer = asyncio.run(ask())
    assert answer.status_code in (200, 400), (values, answer.text[:300])
    assert len(answer.content) < 20_000 and (answer.status_code == 200 or answer.json()["error"]["message"])


TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}<tool_call>"
)
CALLS = '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}}]}'
USER = '"messages": [{"role": "user", "content": "a"}]'
TOOLS = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]'


def test_half_a_character_in_the_arguments_of_a_call_is_a_400() -> None:
    async def ask(template: str | None) -> httpx.Response:
        tokenizer = copy.copy(TOKENIZER)
        tokenizer.chat_template = template or TOKENIZER.chat_template
        app = build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=tokenizer))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/chat/completions", content=f'{{"messages": [{CALLS}]}}')

    assert asyncio.run(ask(TEMPLATE)).status_code == 400
    assert asyncio.run(ask(None)).status_code == 200, "an escape in a text is text"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", f"{{{USER}, {TOOLS}}}"),
        ("/v1/chat/completions", f'{{{USER}, {TOOLS}, "tool_choice": "required"}}'),
        ("/v1/responses", '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"x": %s}}]}'),
        (
            "/v1/responses",
            '{"input": "a", "text": {"format": {"type": "json_schema", "name": "f", "schema": {"x": %s}}}}',
        ),
        ("/tokenize", f"{{{USER}, {TOOLS}}}"),
        ("/v1/completions", '{"prompt": "a", "guided_json": {"x": %s}}'),
        ("/v1/completions", '{"prompt": "\\ud83d\\ude00", "guided_json": {"x": %s}}'),
    ],
)
def test_no_depth_of_values_is_a_fault(path: str, body: str) -> None:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = TEMPLATE

    async def ask_all() -> list[tuple[int, httpx.Response]]:
        app = build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=tokenizer))
        answers = []
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test"
        ) as client:
            for depth in (50, 252, 254, 256, 300, *range(860, 1000, 2)):
                answers.append((depth, await client.post(path, content=body % ("[" * depth + "]" * depth))))
        return answers

    for depth, answer in asyncio.run(ask_all()):
        assert answer.status_code in (200, 400), (depth, answer.status_code, answer.text[:300])
