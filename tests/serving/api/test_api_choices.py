"""`n` choices over HTTP: reproducible, interleaved, admitted all or none, ended together."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from paceline.config import EngineConfig
from paceline.serving.api import generation
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.requests import choice_seed
from paceline.serving.engine.engine import Engine
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, serve_engine, wait_until
from tests.helpers.fakes import tiny_target

ASK: dict[str, Any] = {"model": "tiny", "prompt": [7, 8], "max_tokens": 12, "temperature": 0.9, "seed": 11}
EXTRA = {"ignore_eos": True, "top_k": 40}
MAX_WAITING = 6


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[openai.OpenAI, str, Engine]]:
    config = EngineConfig(max_running=8, max_waiting=MAX_WAITING, kv_bytes=4 * 2**20)
    with serve_engine(tiny_target(vocab=300, layers=2), config) as (base, engine):
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0), base, engine


def texts(choices: list[Any]) -> list[str]:
    return [c.text for c in sorted(choices, key=lambda c: c.index)]


def test_choices_are_reproducible_differ_and_begin_with_the_answer_of_one(real: tuple) -> None:
    client, _, _ = real
    answer = client.completions.create(**ASK, n=4, extra_body=EXTRA)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert texts(client.completions.create(**ASK, n=4, extra_body=EXTRA).choices) == texts(answer.choices)
    assert len(set(texts(answer.choices))) == 4
    for i, choice in enumerate(answer.choices):
        alone = client.completions.create(**{**ASK, "seed": choice_seed(11, i)}, extra_body=EXTRA)
        assert alone.choices[0].text == choice.text
    assert choice_seed(11, 0) == 11


def test_fewer_choices_are_the_first_of_more(real: tuple) -> None:
    client, _, _ = real
    two, three = (client.completions.create(**ASK, n=n, extra_body=EXTRA).choices for n in (2, 3))
    assert texts(two) == texts(three)[:2]


def test_choices_without_a_seed_differ(real: tuple) -> None:
    client, _, _ = real
    answer = client.completions.create(**{**ASK, "seed": None}, n=3, extra_body=EXTRA)
    assert len(set(texts(answer.choices))) == 3


def test_stream_interleaves_choices_and_equals_the_whole_answer(real: tuple) -> None:
    client, _, _ = real
    ask = {**ASK, "n": 3, "extra_body": EXTRA, "logprobs": 1}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()
    parts: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        parts[choice.index].append(choice)
    assert ["".join(c.text for c in parts[i]) for i in range(3)] == texts(whole.choices)
    for i in range(3):
        assert [c.finish_reason for c in parts[i]] == [None] * (len(parts[i]) - 1) + ["length"]
        assert [t for c in parts[i] for t in c.logprobs.tokens] == whole.choices[i].logprobs.tokens
        assert parts[i][-1].paceline["num_emitted_tokens"] == 12
    order = [c.choices[0].index for c in chunks[:-1]]
    assert order != sorted(order), "a choice was sent only after another was complete"


def test_chat_choices_each_begin_with_the_role(real: tuple) -> None:
    client, _, _ = real
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "n": 2, "seed": 1}
    whole = client.chat.completions.create(**ask)
    assert [c.message.role for c in whole.choices] == ["assistant"] * 2
    first: dict[int, Any] = {}
    for chunk in client.chat.completions.create(**ask, stream=True):
        first.setdefault(chunk.choices[0].index, chunk.choices[0].delta.role)
    assert first == {0: "assistant", 1: "assistant"}


def test_usage_counts_the_prompt_once_and_sums_the_choices(real: tuple) -> None:
    client, _, _ = real
    answer = client.completions.create(**ASK, n=3, extra_body=EXTRA)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 36, 38)
    assert [c.paceline["num_emitted_tokens"] for c in answer.choices] == [12] * 3
    assert not hasattr(answer, "paceline")


def test_choices_are_admitted_all_or_none(real: tuple) -> None:
    client, base, engine = real
    may_go_on = threading.Event()
    blocked = engine.call_between_rounds(lambda: may_go_on.wait(20))
    try:
        waiting = []
        for _ in range(MAX_WAITING - 1):
            stream = client.completions.create(**{**ASK, "max_tokens": 1}, stream=True, extra_body=EXTRA)
            waiting.append(stream)
        refused = httpx.post(f"{base}/v1/completions", json={"prompt": [5], "n": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert "room for 1 of 2" in refused.json()["error"]["message"]
        waiting.append(client.completions.create(**{**ASK, "max_tokens": 1}, stream=True, extra_body=EXTRA))
    finally:
        may_go_on.set()
    assert blocked.result(timeout=10)
    assert all(len(list(stream)) >= 1 for stream in waiting)
    engine.call_between_rounds(engine.check_integrity).result(timeout=10)


def test_more_choices_than_the_queue_ever_holds_are_a_bad_request(real: tuple) -> None:
    _, base, _ = real
    refused = httpx.post(f"{base}/v1/completions", json={"prompt": [5], "n": MAX_WAITING + 1})
    assert refused.status_code == 400
    assert f"at most {MAX_WAITING}" in refused.json()["error"]["message"]


def test_a_client_that_hangs_up_aborts_every_choice(real: tuple) -> None:
    _, base, engine = real
    before = engine.stats()["num_aborted"]
    body = {"prompt": [5], "stream": True, "max_tokens": 400, "ignore_eos": True, "n": 3}
    with httpx.Client() as c, c.stream("POST", f"{base}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_until(lambda: engine.stats()["num_running"] == 0 and engine.is_idle)
    assert engine.stats()["num_aborted"] == before + 3
    engine.call_between_rounds(engine.check_integrity).result(timeout=10)


@pytest.mark.parametrize("value", [0, -1, 17, 10**9, 1.5, True, "2", [2], {"n": 2}])
def test_hostile_numbers_of_choices_are_refused(real: tuple, value: Any) -> None:
    _, base, _ = real
    refused = httpx.post(f"{base}/v1/completions", json={"prompt": [5], "n": value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_best_of_is_only_another_word_for_n(real: tuple) -> None:
    client, base, _ = real
    assert len(client.completions.create(**{**ASK, "max_tokens": 1}, n=2, best_of=2).choices) == 2
    for best_of in (1, 3):
        refused = httpx.post(f"{base}/v1/completions", json={"prompt": [5], "n": 2, "best_of": best_of}).json()
        assert refused["error"]["param"] == "best_of"
        assert "must equal n=2" in refused["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_choice_fails_the_answer_and_stops_the_others(stream: bool) -> None:
    class OneFails(ScriptedEngine):
        def _speak(self, request: Any, on_event: Any) -> None:
            if request.request_id.endswith("~c1"):
                self.fail_after = 0
                super()._speak(request, on_event)

    engine = OneFails()
    body = {"prompt": "a", "n": 3, "stream": stream, "max_tokens": 9}
    with serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER))) as base:
        answer = httpx.post(f"{base}/v1/completions", json=body, headers={"x-request-id": "r"})
    error = json.loads(answer.text.removeprefix("data: ").strip())["error"]
    assert "caught fire" in error["message"]
    assert answer.status_code == (200 if stream else 503)
    assert "[DONE]" not in answer.text
    assert sorted(i[-3:] for i in engine.aborted) == ["~c0", "~c2"]
    assert sorted(r.request_id[-3:] for r in engine.requests) == ["~c0", "~c1", "~c2"]
    assert len({r.request_id[:-3] for r in engine.requests}) == 1
    assert len({r.group for r in engine.requests}) == 1


@pytest.mark.parametrize("name", ["twice", "r~c0", "r~1", "~"])
def test_one_id_may_be_used_by_many_at_once_however_it_looks(name: str) -> None:
    engine = ScriptedEngine()
    engine.go.clear()
    body, headers = {"prompt": "a", "stream": True}, {"x-request-id": name}
    with serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER))) as base:
        url = f"{base}/v1/completions"
        with httpx.Client() as c, c.stream("POST", url, json={**body, "n": 2}, headers=headers) as first:
            with httpx.Client() as d, d.stream("POST", url, json=body, headers=headers) as second:
                assert (first.status_code, second.status_code) == (200, 200)
                assert first.headers["x-request-id"] == second.headers["x-request-id"] == name
                engine.go.set()
                assert list(second.iter_lines())[-2] == "data: [DONE]"
            assert list(first.iter_lines())[-2] == "data: [DONE]"
    assert len({r.request_id for r in engine.requests}) == 3 and not any(
        name in r.request_id for r in engine.requests if name != "~"
    )


def test_an_id_is_free_again_after_a_refusal(real: tuple) -> None:
    _, base, _ = real
    headers = {"x-request-id": "again"}
    refused = httpx.post(f"{base}/v1/completions", json={"prompt": [5], "n": MAX_WAITING + 1}, headers=headers)
    taken = httpx.post(f"{base}/v1/completions", json={"prompt": [5], "max_tokens": 1}, headers=headers)
    assert (refused.status_code, taken.status_code) == (400, 200)


def test_a_whole_answer_keeps_a_bounded_number_of_scores_and_a_stream_none(real: tuple, monkeypatch) -> None:
    _, base, engine = real
    body = {"prompt": [5], "n": 2, "max_tokens": 40, "logprobs": 3, "ignore_eos": True}
    monkeypatch.setattr(generation, "MAX_ANSWER_SCORES", 2 * 40 * 4)
    assert httpx.post(f"{base}/v1/completions", json=body).status_code == 200
    monkeypatch.setattr(generation, "MAX_ANSWER_SCORES", 2 * 40 * 4 - 1)
    refused = httpx.post(f"{base}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cannot_be_answered")
    assert "a stream" in refused.json()["error"]["message"]
    wait_until(lambda: engine.is_idle)
    assert httpx.post(f"{base}/v1/completions", json={**body, "stream": True}).text.endswith("data: [DONE]\n\n")
    assert httpx.post(f"{base}/v1/completions", json={**body, "logprobs": None}).status_code == 200
    echoed = {**body, "prompt": [5] * 30, "n": 1, "max_tokens": 2, "echo": True, "temperature": 0}
    monkeypatch.setattr(generation, "MAX_ANSWER_SCORES", 2 * 4)
    whole = httpx.post(f"{base}/v1/completions", json=echoed)
    assert whole.status_code == 200, "the prompt's own are bounded before it is read"
    assert len(whole.json()["choices"][0]["logprobs"]["tokens"]) == 32
    monkeypatch.setattr(generation, "LONG_ENTRIES", 10)
    lines = [
        line
        for line in httpx.post(f"{base}/v1/completions", json={**echoed, "stream": True}).text.split("\n\n")
        if line
    ]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert "".join(part["text"] for part in parts) == whole.json()["choices"][0]["text"]
    assert sum(len(part["logprobs"]["tokens"]) for part in parts if part["logprobs"]) == 32
