"""Several prompts in one request, their limits, what is left aside, and the model's other names, over HTTP and a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from paceline.serving.api.requests import CONTEXT_CODE
from paceline.serving.engine.engine import Engine
from tests.helpers.api_server import serve_engine
from tests.helpers.fakes import EOS_ID, tiny_target

CONTEXT = 128


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Engine]]:
    target = tiny_target(vocab=300, layers=2, context=CONTEXT)
    with serve_engine(target, aliases=("gpt-4o-mini", "org/tiny:latest")) as found:
        yield found


@pytest.fixture
def url(served: tuple[str, Engine]) -> str:
    return served[0]


def ask(url: str, **body: object) -> dict:
    answer = httpx.post(f"{url}/v1/completions", json={"max_tokens": 8, "temperature": 1.0, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prompts", [["abc", "de", "ü"], [[5, 6, 7], [8], [9, 9]]])
def test_prompts_in_one_request_are_answered_as_one_by_one(url: str, prompts: list) -> None:
    extra = {"seed": 4, "n": 2, "logprobs": 1, "echo": True, "ignore_eos": True, "return_token_ids": True}
    found = ask(url, prompt=prompts, **extra)
    alone = [ask(url, prompt=p, **extra) for p in prompts]
    assert [c["index"] for c in found["choices"]] == list(range(6))
    for key in ("text", "token_ids", "prompt_token_ids", "finish_reason"):
        assert [c[key] for c in found["choices"]] == [c[key] for one in alone for c in one["choices"]]
    starts = [c["logprobs"]["text_offset"] for c in found["choices"]]
    assert starts == [c["logprobs"]["text_offset"] for one in alone for c in one["choices"]]
    assert all("paceline" in c for c in found["choices"]) and "paceline" not in found
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][key] == sum(one["usage"][key] for one in alone)


def test_a_stream_of_several_prompts_says_which_choice_each_chunk_is_of(url: str) -> None:
    body = {"prompt": ["abc", "de"], "max_tokens": 6, "temperature": 0, "stream": True, "n": 2}
    whole = ask(url, **{**body, "stream": False})
    texts = dict.fromkeys(range(4), "")
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    assert lines[-1] == "data: [DONE]" and list(texts.values()) == [c["text"] for c in whole["choices"]]


def test_one_prompt_that_does_not_fit_refuses_all_and_says_so_in_openais_code(url: str, served: tuple) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    before = served[1].output.num_finished
    for fields in ({"prompt": ["a", "b" * 200]}, {"prompt": "a", "max_tokens": 200}):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens") as e:
            client.completions.create(model="tiny", **fields)
        assert e.value.code == CONTEXT_CODE
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a" * 200}])
    assert e.value.code == CONTEXT_CODE and served[1].output.num_finished == before


def test_prompts_are_cut_in_front_where_that_is_asked_for(url: str) -> None:
    for limit, want in ((3, "xyz"), (6, "abcxyz"), (100, "abcxyz")):
        found = ask(url, prompt="abcxyz", truncate_prompt_tokens=limit, return_token_ids=True, echo=True, seed=1)
        assert found["usage"]["prompt_tokens"] == len(want) and found["choices"][0]["text"].startswith(want)
    found = ask(url, prompt="a" * 500, truncate_prompt_tokens=-1, max_tokens=28)
    assert found["usage"]["prompt_tokens"] == 100
    for bad in (0, CONTEXT, 10**30):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "truncate_prompt_tokens": bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_limits_of_tokens_reach_the_engine(url: str) -> None:
    ends = {"prompt": "ab", "logit_bias": {str(EOS_ID): 100}, "max_tokens": 9}
    assert ask(url, **ends)["usage"]["completion_tokens"] == 1
    assert ask(url, **ends, min_tokens=5)["usage"]["completion_tokens"] == 6
    found = ask(url, prompt="ab", allowed_token_ids=[70, 71], return_token_ids=True)["choices"][0]["token_ids"]
    assert set(found) <= {70, 71} and len(found) == 8
    only = {"prompt": "ab", "logit_bias": {"70": 100}, "max_tokens": 9, "return_token_ids": True}
    letter = ask(url, **only)["choices"][0]["text"][0]
    for limit, num in ((0, 1), (4, 5), (9, 9)):
        found = ask(url, **only, stop=letter, min_tokens=limit)
        assert (found["usage"]["completion_tokens"], found["choices"][0]["text"]) == (num, letter * min(num, limit))
    for bad in ({"allowed_token_ids": [300]}, {"min_tokens": 9}):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 8, **bad}).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_hints_that_change_nothing_are_named_in_a_header(url: str, stream: bool) -> None:
    hints = {"store": True, "user": "u", "reasoning_effort": "high", "metadata": {"run": "7"}, "verbosity": None}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": stream}
    answer = httpx.post(f"{url}/v1/chat/completions", json={**body, **hints})
    assert answer.status_code == 200
    assert answer.headers["x-paceline-ignored"] == "store, user, reasoning_effort, metadata"
    assert "x-paceline-ignored" not in httpx.post(f"{url}/v1/chat/completions", json=body).headers


def test_a_model_answers_to_all_of_its_names(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    assert [m.id for m in client.models.list()] == ["tiny", "gpt-4o-mini", "org/tiny:latest"]
    assert client.models.retrieve("org/tiny:latest").model_dump()["root"] == "tiny"
    for name in ("tiny", "gpt-4o-mini", "org/tiny:latest"):
        assert client.completions.create(model=name, prompt="a", max_tokens=1).model == "tiny"
    with pytest.raises(openai.NotFoundError, match="this service has 'tiny' and 'gpt-4o-mini'") as e:
        client.completions.create(model="gpt-4o", prompt="a")
    assert e.value.code == "model_not_found"


def test_probes_of_other_servers_work(url: str) -> None:
    for path in ("/health", "/ping"):
        assert httpx.get(f"{url}{path}").json()["status"] == "ok"
    assert set(httpx.get(f"{url}/version").json()) == {"version"}


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_prompts_tokens_are_scored_where_that_is_asked_for(url: str, route: str) -> None:
    prompt = {"prompt": ["abc", "de"]} if route == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {**prompt, "max_tokens": 2, "prompt_logprobs": 3, "return_token_ids": True, "seed": 1}
    found = httpx.post(f"{url}/v1/{route}", json=body, timeout=60).json()
    for choice in found["choices"]:
        scores = (choice if route == "completions" else found)["prompt_logprobs"]
        ids = choice["prompt_token_ids"]
        assert len(scores) == len(ids) and scores[0] is None
        for token_id, score in zip(ids[1:], scores[1:], strict=True):
            own, ranks = score[str(token_id)], [s["rank"] for s in score.values()]
            assert 3 <= len(score) <= 4 and {1, 2, 3} <= set(ranks) and own["logprob"] <= 0
            assert own["rank"] <= 3 if len(score) == 3 else own["rank"] > 3
            assert max(score.values(), key=lambda s: s["logprob"])["rank"] == 1
    if route == "completions":
        echo = ask(url, prompt="abc", max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"]
        scores = found["choices"][0]["prompt_logprobs"]
        own = [
            s[str(t)]["logprob"] for t, s in zip(found["choices"][0]["prompt_token_ids"][1:], scores[1:], strict=True)
        ]
        assert own == pytest.approx(echo[1:], abs=1e-4)
    refused = httpx.post(f"{url}/v1/{route}", json={**body, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert "prompt_logprobs" not in httpx.post(f"{url}/v1/{route}", json={**prompt, "max_tokens": 1}).text
