"""Time limits, priorities, token biases, cached tokens, full queues and draining, as the engine and the client see them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import openai
import pytest

from paceline.config import EngineConfig
from paceline.errors import CapacityError
from paceline.serving.api.app import build_api
from paceline.serving.api.client import LocalEngineClient
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.prompts import Prompts
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.thread import EngineThread
from paceline.serving.sampling.draw import TokenLimits
from paceline.serving.wire.messages import Conversation
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, wait_until
from tests.helpers.fakes import tiny_target


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER))) as base:
        yield base


@pytest.fixture(autouse=True)
def _reset(engine: ScriptedEngine) -> Iterator[None]:
    yield
    engine.submit_error = engine.fail_after = engine.end = None
    engine.num_queued = engine.num_cached = 0
    engine.drains = False


def engine_text() -> str:
    """What the scripted engine always says."""
    return ScriptedEngine().text


def post(url: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": 4, **fields}
    return httpx.post(f"{url}/v1/completions", content=json.dumps(body), headers=headers)


# ---- time limits ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("headers", "fields", "deadline_s"),
    [
        ({}, {}, None),
        ({}, {"timeout_s": 2.5}, 1002.5),
        ({}, {"timeout_s": 3}, 1003.0),
        ({"x-request-timeout-ms": "250"}, {}, 1000.25),
        ({"x-request-timeout-ms": "1500"}, {"timeout_s": 1.5}, 1001.5),
        ({"x-request-timeout-ms": "86400000"}, {}, 87400.0),
    ],
)
def test_time_limits_become_deadlines_of_the_engines_clock(
    url: str, engine: ScriptedEngine, headers: dict, fields: dict, deadline_s: float | None
) -> None:
    assert post(url, headers, **fields).status_code == 200
    assert engine.requests[-1].deadline_s == deadline_s


def test_every_choice_has_the_deadline_and_the_priority(url: str, engine: ScriptedEngine) -> None:
    assert post(url, n=3, timeout_s=1.0, priority=-7).status_code == 200
    assert [(r.deadline_s, r.priority) for r in engine.requests[-3:]] == [(1001.0, -7)] * 3


@pytest.mark.parametrize("value", [0, -1, -0.5, 86_401, 1e308, float("nan"), float("inf"), "3", True, [1]])
def test_hostile_time_limits_are_refused(url: str, value: Any) -> None:
    answer = post(url, timeout_s=value)
    assert answer.status_code == 400, answer.text
    assert "timeout_s" in answer.text or "not a number of JSON" in answer.text


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "86400001", "soon", "", "1e3", "999999999999999999999"])
def test_hostile_time_limit_headers_are_refused(url: str, value: str) -> None:
    answer = post(url, {"x-request-timeout-ms": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout-ms")


def test_contradicting_time_limits_are_refused(url: str) -> None:
    answer = post(url, {"x-request-timeout-ms": "1000"}, timeout_s=2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout_s")


@pytest.mark.parametrize("num_rounds", [0, 1])
def test_an_expired_request_is_504(url: str, engine: ScriptedEngine, num_rounds: int) -> None:
    engine.fail_after, engine.end = num_rounds, "deadline"
    answer = post(url, max_tokens=99, timeout_s=1)
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert f"after {3 * num_rounds} tokens" in error["message"]
    assert answer.headers["x-should-retry"] == "false"


def test_the_openai_client_does_not_repeat_an_expired_request(url: str, engine: ScriptedEngine) -> None:
    engine.fail_after, engine.end = 0, "deadline"
    before = len(engine.requests)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=2)
    with pytest.raises(openai.InternalServerError) as e:
        client.completions.create(model="tiny", prompt="a", extra_body={"timeout_s": 1})
    assert e.value.status_code == 504
    assert len(engine.requests) == before + 1


def test_a_stream_that_expires_before_its_first_token_is_504(url: str, engine: ScriptedEngine) -> None:
    engine.fail_after, engine.end = 0, "deadline"
    answer = post(url, max_tokens=99, timeout_s=1, stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("max_tokens", [1, 99])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_with_a_time_limit_is_the_stream_without(url: str, n: int, max_tokens: int) -> None:
    ask: dict[str, Any] = {"max_tokens": max_tokens, "stream": True, "n": n}
    texts = []
    for limit in ({}, {"timeout_s": 9}):
        parts = [json.loads(p.removeprefix("data: ")) for p in post(url, **ask, **limit).text.split("\n\n")[:-2]]
        mine = [p["choices"][0] for p in parts]
        texts.append(["".join(c["text"] for c in mine if c["index"] == i) for i in range(n)])
    assert texts[0] == texts[1] == [engine_text()[: None if max_tokens == 99 else 1]] * n


def test_a_client_that_hangs_up_before_the_first_token_aborts(url: str, engine: ScriptedEngine) -> None:
    engine.go.clear()
    body = {"prompt": "a", "stream": True, "timeout_s": 60}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
    wait_until(lambda: engine.requests[-1].request_id in engine.aborted)
    engine.go.set()


def test_an_expired_stream_ends_with_an_error_event(url: str, engine: ScriptedEngine) -> None:
    engine.fail_after, engine.end = 1, "deadline"
    answer = post(url, max_tokens=99, timeout_s=1, stream=True)
    parts = [json.loads(p.removeprefix("data: ")) for p in answer.text.split("\n\n") if p]
    assert len(parts) == 2
    assert parts[-1]["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in answer.text


# ---- priorities and biases --------------------------------------------------------------------------------------
def test_priorities_reach_the_engine(url: str, engine: ScriptedEngine) -> None:
    for given, wanted in ((None, 0), (0, 0), (-1000, -1000), (1000, 1000)):
        assert post(url, priority=given).status_code == 200
        assert engine.requests[-1].priority == wanted


@pytest.mark.parametrize("value", [-1001, 1001, 1.5, "high", True])
def test_hostile_priorities_are_refused(url: str, value: Any) -> None:
    answer = post(url, priority=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


def test_service_tiers_are_not_pretended(url: str) -> None:
    assert "x-paceline-ignored" not in post(url, service_tier="auto").headers
    assert post(url, service_tier="flex").headers["x-paceline-ignored"] == "service_tier"


def test_token_biases_reach_the_engine(url: str, engine: ScriptedEngine) -> None:
    assert post(url, logit_bias={"0": -100, "299": 1.5}).status_code == 200
    assert engine.requests[-1].params.logit_bias == ((0, -100.0), (299, 1.5))
    assert post(url, logit_bias={}).status_code == 200
    assert engine.requests[-1].params.logit_bias == ()


@pytest.mark.parametrize(
    "bias",
    [
        {"300": 1}, {"-1": 1}, {"1.5": 1}, {"a": 1}, {"": 1}, {"007": 1}, {" 7": 1}, {"٣": 1}, {"9" * 50: 1},
        {"7": 101}, {"7": -100.5}, {"7": "1"}, {"7": None}, {"7": True}, {"7": [1]},
        {"7": float("nan")}, {"7": float("inf")}, [7, 1], "7",
        {str(i): 0 for i in range(1025)},
    ],
)  # fmt: skip
def test_hostile_token_biases_are_refused(url: str, engine: ScriptedEngine, bias: Any) -> None:
    before = len(engine.requests)
    answer = post(url, logit_bias=bias)
    assert answer.status_code == 400, answer.text
    assert "logit_bias" in answer.text or "not a number of JSON" in answer.text
    assert len(engine.requests) == before


# ---- usage ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2])
def test_usage_tells_cached_prompt_tokens(url: str, engine: ScriptedEngine, n: int) -> None:
    assert post(url, n=n).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    engine.num_cached = 2
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    usage = client.completions.create(model="tiny", prompt="abc", max_tokens=4, n=n).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 4 * n)


def test_continuous_usage_grows_in_every_chunk(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = post(url, max_tokens=8, stream=True, stream_options=options)
    parts = [json.loads(p.removeprefix("data: ")) for p in answer.text.split("\n\n")[:-2]]
    assert [p["usage"]["completion_tokens"] for p in parts] == [3, 6, 8, 8]
    assert parts[-1]["choices"] == []
    for alone in ({"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": None}):
        again = post(url, max_tokens=8, stream=True, stream_options=alone).text
        assert again.count('"completion_tokens":') == len(parts)
    refused = post(url, stream=True, stream_options={"continuous_usage_stats": True, "include_usage": False})
    assert refused.status_code == 400


# ---- full queues and draining -----------------------------------------------------------------------------------
def test_retry_after_grows_with_the_queue(url: str, engine: ScriptedEngine) -> None:
    for _ in range(5):
        assert post(url).status_code == 200
    engine.submit_error = CapacityError("the queue is full")
    waits = []
    for engine.num_queued in (0, 1, 10**9):
        answer = post(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        waits.append(int(answer.headers["retry-after"]))
    assert waits == sorted(waits) and (waits[0], waits[-1]) == (1, 30)


def test_a_draining_replica_is_alive_but_not_ready(url: str, engine: ScriptedEngine) -> None:
    assert httpx.get(f"{url}/readyz").json()["status"] == "ok"
    engine.drains = True
    ready, healthy = httpx.get(f"{url}/readyz"), httpx.get(f"{url}/healthz")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    assert (healthy.status_code, healthy.json()["status"]) == (200, "draining")
    before = len(engine.requests)
    refused = post(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert len(engine.requests) == before


def test_a_real_replica_drains_what_it_took_and_refuses_the_rest() -> None:
    target = tiny_target(vocab=300, layers=2)
    engine = Engine(target, DrafterSlots(), EngineConfig(max_running=4, kv_bytes=4 * 2**20))
    thread = EngineThread(engine)
    thread.start(is_warmed_up=True)
    client = LocalEngineClient(engine, thread, model_name="tiny")
    with serve_app(build_api(ApiParts(client=client, tokenizer=target.tokenizer))) as base:
        may_go_on = threading.Event()
        engine.call_between_rounds(lambda: may_go_on.wait(20))
        body = {"prompt": [5], "stream": True, "max_tokens": 40, "ignore_eos": True}
        with httpx.Client() as c, c.stream("POST", f"{base}/v1/completions", json=body) as answer:
            stopper = threading.Thread(target=thread.stop)
            stopper.start()
            wait_until(client.is_draining)
            assert httpx.get(f"{base}/readyz").status_code == 503
            assert post(base).status_code == 503
            may_go_on.set()
            lines = list(answer.iter_lines())
        stopper.join(10)
        assert not thread.is_alive
    assert lines[-2] == "data: [DONE]"


def test_error_answers_carry_the_request_id(url: str) -> None:
    answer = post(url, {"x-request-id": "mine"}, temperature=-1)
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")
    assert len(post(url, temperature=-1).headers["x-request-id"]) == 32


# ---- what a body of many prompts costs --------------------------------------------------------------------------
def test_all_choices_share_the_ids_that_may_be_drawn(url: str, engine: ScriptedEngine) -> None:
    assert post(url, prompt=["a", "b"], n=2, allowed_token_ids=[7, 5, 7] * 1000).status_code == 200
    found = [r.params.allowed_token_ids for r in engine.requests[-4:]]
    assert found[0] == (5, 7) and all(each is found[0] for each in found)
    limits = [TokenLimits(r.params, prompt_len=1, stop_token_ids=(), vocab_size=300) for r in engine.requests[-4:]]
    assert all(each.always is each.early is limits[0].always for each in limits)
    assert post(url, allowed_token_ids=[5, 300]).json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
def test_a_body_may_not_ask_for_more_scores_than_memory_holds(url: str, engine: ScriptedEngine, fields: dict) -> None:
    engine.context_tokens = 2048
    try:
        refused = post(url, prompt=["a" * 1500] * 128, n=2, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, [*fields][-1])
        assert post(url, prompt=["a" * 1500] * 4, n=2, **{**fields, "echo": False}).status_code == 200
    finally:
        engine.context_tokens = 256


def test_work_on_many_short_prompts_or_on_tools_leaves_the_event_loop_free() -> None:
    class Tokenizer:
        """Notes the threads that it works in."""

        chat_template = "{{ tools }}<tool_call>"
        threads: ClassVar[list[int]] = []

        def encode(self, text: str, **_: object) -> list[int]:
            self.threads.append(threading.get_ident())
            return [5]

        def apply_chat_template(self, messages: list, **_: object) -> str:
            return str(self.encode(""))

    tool = {"type": "function", "function": {"name": "f", "description": "x" * 20_000}}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    prompts, own = Prompts(Tokenizer()), threading.get_ident()
    asyncio.run(prompts.encode_each(["a" * 200] * 100))
    asyncio.run(prompts.render(Conversation.model_validate({**chat, "tools": [tool]})))
    assert own not in Tokenizer.threads and len(Tokenizer.threads) == 101
    asyncio.run(prompts.encode_each(["a" * 200, [5]]))
    asyncio.run(prompts.render(Conversation.model_validate(chat)))
    assert Tokenizer.threads[101:] == [own] * 2
