"""POST /v1/responses: a chat in the words of the Responses API; streams and whole answers hold the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import responses as kinds
from pydantic import TypeAdapter

from paceline.errors import CapacityError
from paceline.serving.api.app import build_api
from paceline.serving.api.bodies import ResponsesBody
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from paceline.serving.wire.items import messages_of
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, wait_until

TEXT = "Hello, wörld! 日本"
ROUTE = "/v1/responses"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
EVENTS = TypeAdapter(kinds.ResponseStreamEvent)


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine(TEXT)
    engine.context_tokens = 2048
    return engine


@pytest.fixture
def url(engine: ScriptedEngine) -> Iterator[str]:
    with serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER, max_silence_s=2.0))) as base:
        yield base


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(url + ROUTE, json={"input": "hi", **fields}, timeout=30)


def events_of(url: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, which are what openai's types say, numbered and named."""
    answer = post(url, stream=True, **fields)
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream"), (
        answer.text
    )
    blocks = [block.split("\n") for block in answer.text.split("\n\n")[:-1]]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {e['type']}" for e in found]
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    for event in found:
        assert EVENTS.validate_python(event).type == event["type"]
    return found


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def prompt_of(engine: ScriptedEngine) -> str:
    return TOKENIZER.decode(engine.requests[-1].prompt_token_ids)


def test_a_text_is_answered(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.num_cached = 3
    answer = client.responses.create(
        model="tiny", input="hi", instructions="Be kind.", temperature=0.5, max_output_tokens=90, metadata={"k": "v"}
    )
    request = engine.requests[-1]
    assert answer.output_text == TEXT and prompt_of(engine) == "system: Be kind.\nuser: hi\nassistant: "
    assert (request.params.temperature, request.params.max_tokens) == (0.5, 90)
    assert (answer.id, answer.object, answer.status, answer.model) == (
        f"resp_{request.request_id}", "response", "completed", "tiny",
    )  # fmt: skip
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.id.startswith("msg_") and message.content[0].annotations == []
    usage, num_prompt = answer.usage, len(request.prompt_token_ids)
    num_answer = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (
        num_prompt,
        num_answer,
        num_prompt + num_answer,
    )
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 0)
    assert (answer.instructions, answer.temperature, answer.top_p, answer.max_output_tokens) == (
        "Be kind.",
        0.5,
        1.0,
        90,
    )
    assert (answer.metadata, answer.tool_choice, answer.tools) == ({"k": "v"}, "auto", [])
    assert (answer.error, answer.incomplete_details, answer.previous_response_id) == (None, None, None)
    assert answer.text.format.type == "text" and answer.completed_at >= answer.created_at
    assert answer.paceline["drafter_version"] == "v7"  # type: ignore[attr-defined]


def test_a_stream_tells_the_events_of_the_same_response(url: str) -> None:
    events = events_of(url)
    names = [e["type"].removeprefix("response.") for e in events]
    num_deltas = names.count("output_text.delta")
    assert names == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * num_deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert num_deltas > 3 and "".join(e["delta"] for e in events if "delta" in e) == TEXT
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert events[-4]["text"] == events[-3]["part"]["text"] == TEXT and events[-2]["item"] == last["output"][0]
    assert {e["item_id"] for e in events if "item_id" in e} == {last["output"][0]["id"]} == {events[2]["item"]["id"]}
    whole = post(url).json()
    changing = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in last.items() if k not in changing} == {k: v for k, v in whole.items() if k not in changing}
    assert without_ids(last["output"]) == without_ids(whole["output"]) and first["id"] == last["id"] != whole["id"]


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI, url: str) -> None:
    answer = client.responses.create(model="tiny", input="hi", max_output_tokens=5)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete" and answer.output_text == "Hello" and answer.completed_at is None
    events = events_of(url, max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]["output"]) == without_ids(post(url, max_output_tokens=5).json()["output"])


def test_calls_are_items_in_the_order_of_the_text(client: openai.OpenAI, engine: ScriptedEngine, url: str) -> None:
    engine.text = f"I see.\n{CALL}\nDone."
    answer = client.responses.create(model="tiny", input="hi", tools=[ADD])
    assert [item.type for item in answer.output] == ["message", "function_call", "message"]
    first, call, second = answer.output
    assert (first.content[0].text, second.content[0].text) == ("I see.", "\nDone.")
    assert (call.name, json.loads(call.arguments), call.status) == ("add", {"a": 1}, "completed")
    assert call.call_id.startswith("call_") and call.id.startswith("fc_") and answer.status == "completed"
    engine.text = f"I see.\n{CALL}\n{CALL}"
    events = events_of(url, tools=[ADD])
    whole = post(url, tools=[ADD]).json()
    ended = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [item["type"] for item in ended] == ["message", "function_call", "function_call"]
    assert ended == events[-1]["response"]["output"] and without_ids(ended) == without_ids(whole["output"])
    for index, item in enumerate(ended[1:], 1):
        own = [e for e in events if e.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added" and own[0]["item"]["arguments"] == ""
        assert "".join(e["delta"] for e in own if "delta" in e) == own[-2]["arguments"] == item["arguments"]
        assert (
            own[-2]["type"] == "response.function_call_arguments.done" and own[0]["item"]["call_id"] == item["call_id"]
        )
    off = client.responses.create(model="tiny", input="hi", tools=[ADD], tool_choice="none")
    assert off.output_text == engine.text and off.tool_choice == "none"
    one = post(url, tools=[ADD], parallel_tool_calls=False).json()
    assert [item["type"] for item in one["output"]] == ["message", "function_call"]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_items_do_not_depend_on_where_rounds_end(engine: ScriptedEngine, url: str, cut: int) -> None:
    engine.text = "x" * cut + f"\n{CALL}\nand {CALL} end"
    events = events_of(url, tools=[ADD])
    output = events[-1]["response"]["output"]
    assert [i["type"] for i in output] == ["message", "function_call", "message", "function_call", "message"]
    texts = [i["content"][0]["text"] for i in output[::2]]
    assert texts == ["x" * cut, "\nand", " end"] and {i["arguments"] for i in output[1::2]} == {'{"a": 1}'}
    told: dict[int, str] = {}
    for event in events:
        if "delta" in event:
            told[event["output_index"]] = told.get(event["output_index"], "") + event["delta"]
    assert [told[i] for i in (0, 2, 4)] == texts


def test_items_go_back_in_as_they_came(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.text = f"I see.\n{CALL}"
    answer = client.responses.create(model="tiny", input="hi", tools=[ADD])
    result = {"type": "function_call_output", "call_id": answer.output[1].call_id, "output": "2"}
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "?"}],
        "encrypted_content": "x",
    }
    parts = {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    client.responses.create(
        model="tiny", input=[{"role": "user", "content": "hi"}, thought, *answer.output, result, parts]
    )
    assert prompt_of(engine) == (
        'user: hi\nassistant: I see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        "user: <tool_response>\n2\n</tool_response>\nsystem: a\nb\nassistant: "
    )


def test_what_says_nothing_changes_nothing() -> None:
    """Fields of the API that hold nothing, and a refusal, which is what the assistant said."""
    tool = {
        "type": "function",
        "name": "f",
        "parameters": {},
        "strict": None,
        "defer_loading": False,
        "output_schema": None,
    }
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "id": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": None, "caller": None},
        {"type": "function_call_output", "call_id": "c", "output": "b", "caller": None},
    ]
    body = ResponsesBody.model_validate({"input": items, "tools": [tool]})
    said = messages_of(None, body.input)
    assert [m["content"] for m in said] == ["a", "no", "b"] and len(said[1]["tool_calls"]) == 1
    with pytest.raises(ValueError, match="namespace"):
        ResponsesBody.model_validate({"input": [{**items[2], "namespace": "x"}]})


def test_the_tokens_of_the_text_are_scored_where_it_is_asked_for(url: str) -> None:
    asked = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2}
    whole = post(url, **asked).json()["output"][0]["content"][0]
    scores = whole["logprobs"]
    assert (
        bytes(b for s in scores for b in s["bytes"]).decode().startswith(TEXT) and len(scores[0]["top_logprobs"]) == 2
    )
    events = events_of(url, **asked)
    assert [s for e in events if "delta" in e for s in e["logprobs"]] == scores
    assert post(url).json()["output"][0]["content"][0]["logprobs"] == []


def test_a_form_is_asked_for_and_extensions_are_those_of_a_chat(url: str, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"b": {"default": None}, "a": {}}}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"}
    answer = post(url, text=form, seed=3, top_k=5, bad_words=["x"], timeout_s=60, priority=2, user="u").json()
    request = engine.requests[-1]
    assert request.params.grammar.kind == "json_schema" and json.loads(request.params.grammar.text) == schema
    assert (request.params.seed, request.params.top_k, request.priority) == (3, 5, 2) and request.deadline_s
    assert request.params.bad_words == tuple(tuple(TOKENIZER.encode(t)) for t in ("x", " x"))
    assert answer["text"] == form
    post(url, text={"format": {"type": "json_object"}})
    assert engine.requests[-1].params.grammar.kind == "json_object"
    named = post(url, tools=[ADD], tool_choice={"type": "function", "name": "add"})
    assert named.json()["tool_choice"] == {"type": "function", "name": "add"}
    assert engine.requests[-1].params.grammar.kind == "calls"


def test_hints_are_named_and_metadata_comes_back(url: str) -> None:
    hints = {
        "user": "u",
        "reasoning": {"effort": "low"},
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "store": True,
        "truncation": "auto",
        "stream_options": {"include_obfuscation": True},
    }
    answer = post(url, **hints, metadata={"a": "b"})
    named = "user, reasoning, prompt_cache_key, store, truncation, include_obfuscation"
    assert answer.headers["x-paceline-ignored"] == named
    neutral = {"store": False, "truncation": "disabled", "stream_options": {"include_obfuscation": False}}
    assert "x-paceline-ignored" not in post(url, **neutral).headers
    assert answer.json()["metadata"] == {"a": "b"} and answer.json()["store"] is False
    most = {f"k{i}": "v" for i in range(16)}
    assert post(url, metadata=most).json()["metadata"] == most
    assert post(url, metadata={**most, "one more": "v"}).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"background": True}, "background", "answers are not stored"),
        ({"prompt": {"id": "p"}}, "prompt", "send `instructions`"),
        ({"tools": [{"type": "web_search"}]}, "tools", "no other tool is hosted"),
        ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, None, ""),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "name one of the tools"),
        ({"tools": [ADD, ADD]}, "tools", "a name each"),
        ({"tools": [ADD] * 129}, "tools", "at most 128"),
        ({"tools": [ADD], "include": ["message.output_text.logprobs"]}, "include", "together with tools"),
        ({"include": ["file_search_call.results"]}, "include.0", "should be"),
        ({"input": []}, "input", "not empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "none can be referred to"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "at least 1"),
        ({"input": [{"type": "web_search_call"}]}, "input", "of the type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content", "only text"),
        ({"input": "x" * 3000}, "input", "maximum context length is 2048"),
        ({"max_output_tokens": 4000}, "max_output_tokens", "max_output_tokens must be at most"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format", "exclude each other"),
        ({"stream_options": {"include_obfuscation": "x"}}, "stream_options.include_obfuscation", ""),
        ({"n": 2}, "n", "not a field"),
        ({"messages": []}, "messages", "not a field"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_a_sentence(
    url: str, fields: dict, param: str | None, words: str
) -> None:
    answer = post(url, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert words in error["message"] and (param is None or error["param"] == param), error


def test_a_stream_that_breaks_ends_with_the_failure(url: str, client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for end, code in ((None, "server_error"), ("deadline", "server_error")):
        engine.fail_after, engine.end = 2, end
        events = events_of(url)
        response = events[-1]["response"]
        assert events[-1]["type"] == "response.failed" and response["status"] == "failed"
        assert response["error"]["code"] == code and response["error"]["message"]
        assert response["output"][0]["status"] == "incomplete" and TEXT.startswith(
            response["output"][0]["content"][0]["text"]
        )
    with client.responses.stream(model="tiny", input="hi") as stream:
        assert [e.type for e in stream][-1] == "response.failed"
    engine.fail_after, engine.end = 2, None
    assert post(url).status_code == 503 and post(url).json()["error"]["code"] == "incomplete"
    engine.fail_after, engine.submit_error = None, CapacityError("the queue is full")
    full = post(url, stream=True)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full") and int(
        full.headers["retry-after"]
    ) >= 1


def test_tenants_labels_and_the_log_are_those_of_every_route(engine: ScriptedEngine, tmp_path) -> None:
    parts = ApiParts(client=engine, tokenizer=TOKENIZER, clients=Clients(Tokens(api_token="t")))
    with serve_app(build_api(parts)) as base:
        assert post(base).status_code == 401
        headers = {
            "authorization": "Bearer t",
            "x-paceline-tenant": "acme",
            "x-paceline-bucket": "b",
            "x-request-timeout-ms": "5000",
        }
        answer = httpx.post(base + ROUTE, json={"input": "hi"}, headers=headers)
        assert answer.status_code == 200
        request = engine.requests[-1]
        assert (request.tenant, request.bucket, request.deadline_s) == ("acme", "b", engine.clock_s + 5)
        wait_until(lambda: {200, 401} <= set(parts.meters.responses.get(ROUTE, ())))  # counted behind the answer
