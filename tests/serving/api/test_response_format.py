"""Forms of an answer, from the request body through a real engine to the text that the client reads."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import jsonschema
import openai
import pytest

from paceline.config import EngineConfig
from paceline.errors import RequestError
from paceline.serving.api.access_log import AccessRecord
from paceline.serving.api.app import build_api
from paceline.serving.api.bodies import ChatBody, CompletionBody
from paceline.serving.api.client import LocalEngineClient
from paceline.serving.api.generation import ApiParts, Generation
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.thread import EngineThread
from paceline.serving.sampling.request import GenerationRequest, GrammarSpec, SamplingParams
from paceline.serving.wire.fields import FieldError, parse_body
from tests.helpers.api_server import ScriptedEngine, serve_app
from tests.helpers.constrained import PERSON
from tests.helpers.fakes import tiny_target
from tests.helpers.scripted_drafters import RandomDrafter

SCHEMA = {**PERSON, "x-guidance": {"whitespace_flexible": False}}


def completion(**fields: object) -> CompletionBody:
    return parse_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)


def spec(**fields: object) -> GrammarSpec | None:
    return completion(**fields).sampling(max_tokens=1).grammar


def schema_format(schema: object, **fields: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, **fields}}


def test_every_form_reaches_the_engine() -> None:
    assert spec() is None and spec(response_format=None) is None and spec(response_format={"type": "text"}) is None
    assert spec(response_format={"type": "json_object"}) == GrammarSpec(kind="json_object")
    for extra in ({}, {"strict": True}, {"strict": False}, {"description": "who"}):
        found = spec(response_format=schema_format(SCHEMA, **extra))
        assert found is not None and found.kind == "json_schema"
        assert list(json.loads(found.text)["properties"]) == list(PERSON["properties"])
    assert spec(guided_regex="a+") == GrammarSpec(kind="regex", text="a+")
    assert spec(guided_grammar='start: "a"') == GrammarSpec(kind="lark", text='start: "a"')
    assert spec(guided_regex="a+", response_format={"type": "text"}) == GrammarSpec(kind="regex", text="a+")
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    chat = parse_body(json.dumps(body).encode(), ChatBody)
    assert chat.sampling(max_tokens=1).grammar == GrammarSpec(kind="json_object")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": []}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema_format([])}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({}, name="a b")}, "response_format.json_schema.name"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_regex": "a", "guided_grammar": 'start: "a"'}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}, "structured_outputs": {"json": {}}}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, None),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": 3}, "structured_outputs"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a", 3] * 9999}, "guided_choice"),
        ({"ebnf": ["root"]}, "ebnf"),
    ],
)
def test_malformed_forms_name_the_field(fields: dict, param: str | None) -> None:
    with pytest.raises(FieldError) as e:
        completion(**fields)
    assert e.value.param == param


def test_one_form_has_the_same_grammar_under_every_projects_name() -> None:
    as_json = spec(response_format=schema_format(SCHEMA))
    names = ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}})
    texts = [{k: json.dumps(v, separators=(",", ":"))} for k, v in (("guided_json", SCHEMA), ("json_schema", SCHEMA))]
    wrapped = {"response_format": {"type": "json_object", "schema": SCHEMA}}
    assert all(spec(**fields) == as_json for fields in (*names, *texts, wrapped))
    regex = GrammarSpec(kind="regex", text="a+")
    assert spec(regex="a+") == spec(structured_outputs={"regex": "a+"}) == regex
    assert (
        spec(structured_outputs={"regex": "a+", "whitespace_pattern": None, "disable_any_whitespace": False}) == regex
    )
    gbnf = GrammarSpec(kind="gbnf", text='root ::= "a"')
    assert (
        spec(ebnf=gbnf.text)
        == spec(guided_grammar=gbnf.text)
        == spec(structured_outputs={"grammar": gbnf.text})
        == gbnf
    )
    assert spec(guided_grammar='start: "::="') == GrammarSpec(kind="lark", text='start: "::="')
    assert spec(structured_outputs={"json_object": True}) == GrammarSpec(kind="json_object")
    assert spec(structured_outputs={}) is None and spec(structured_outputs={"json_object": False}) is None
    assert spec(guided_choice=["a", "b"]) == spec(structured_outputs={"choice": ["a", "b"]}) != None  # noqa: E711


@pytest.mark.parametrize("field", ["guided_regex", "guided_grammar", "ebnf", "guided_json"])
def test_empty_texts_are_refused(field: str) -> None:
    with pytest.raises(RequestError, match="grammar needs a text"):
        completion(**{field: ""})


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[openai.OpenAI, str]]:
    target = tiny_target(vocab=300, layers=2)
    engine = Engine(target, DrafterSlots(RandomDrafter(300), "random"), EngineConfig(kv_bytes=4 * 2**20))
    thread = EngineThread(engine)
    thread.start(is_warmed_up=True)
    client = LocalEngineClient(engine, thread, model_name="tiny")
    with serve_app(build_api(ApiParts(client=client, tokenizer=target.tokenizer))) as base:
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0), base
    assert thread.stop(timeout_s=10)


def test_answers_over_http_keep_to_their_schema(real: tuple) -> None:
    client, _ = real
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "who"}], max_tokens=60, seed=1,
        response_format=schema_format(SCHEMA, strict=True),
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)
    parts = client.completions.create(
        model="tiny", prompt="x", max_tokens=60, seed=2, stream=True, extra_body={"guided_regex": "(ab){2,5}[日月]"}
    )
    assert re.fullmatch("(ab){2,5}[日月]", "".join(part.choices[0].text for part in parts if part.choices))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["left", 'ri"ght\\\n', "日本", "😀", "\x7f"]}, 'left|ri"ght\\\\\n|日本|😀|\x7f'),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"ebnf": 'root ::= word ("-" word)?\nword ::= "ab" | "cd"'}, "(ab|cd)(-(ab|cd))?"),
        ({"guided_grammar": 'root ::= [a-c] "1"'}, "[a-c]1"),
        ({"regex": "x{3,5}"}, "x{3,5}"),
    ],
)
def test_answers_keep_to_the_forms_of_other_projects(real: tuple, fields: dict, pattern: str) -> None:
    for seed in range(3):
        ask = {"prompt": "x", "max_tokens": 60, "seed": seed, **fields}
        (choice,) = httpx.post(f"{real[1]}/v1/completions", json=ask, timeout=30).json()["choices"]
        assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"]), choice


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema_format({"type": "banana"})},
        {"response_format": schema_format({"$ref": "#"})},
        {"response_format": schema_format({"enum": ["x" * 100] * 10_000})},
        {"guided_regex": "(["},
        {"guided_grammar": "start start"},
        {"ebnf": "no rules"},
        {"ebnf": "root ::= " + "(" * 4000},
        {"ebnf": 'root ::= "' + "x" * 9000 + '"'},
        {"ebnf": 'root ::= "a\\'},
        {"guided_json": "[1"},
        {"guided_json": "[1]"},
    ],
)
def test_grammars_that_cannot_be_used_are_bad_requests(real: tuple, fields: dict) -> None:
    answer = httpx.post(f"{real[1]}/v1/completions", json={"prompt": "x", **fields}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_handler_cancelled_while_the_grammar_compiles_submits_no_request() -> None:
    go, begun, done, engine = threading.Event(), threading.Event(), threading.Event(), ScriptedEngine()

    def slow_prepare(request):
        begun.set()
        assert go.wait(10)
        done.set()

    engine.prepare = slow_prepare  # type: ignore[method-assign]

    async def main() -> None:
        params = SamplingParams(grammar=GrammarSpec(kind="json_object"))
        request = GenerationRequest(request_id="r", prompt_token_ids=(5,), params=params)
        answer = SimpleNamespace(choices=[], num_completion_tokens=0)
        record = AccessRecord(method="POST", route="/v1/completions", start_s=0.0)
        generation = Generation(ApiParts(client=engine, tokenizer=None), [request], answer, record)  # type: ignore[arg-type]
        task = asyncio.ensure_future(generation.submit())
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        assert await asyncio.to_thread(done.wait, 10)

    asyncio.run(asyncio.wait_for(main(), 10))
    assert not engine.requests and not engine.aborted
