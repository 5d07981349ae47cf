"""The HTTP surface as clients see it: the official openai client and raw HTTP against a real server."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator

import httpx
import openai
import pytest

from paceline.contracts import Group
from paceline.errors import CapacityError, EngineStoppedError, RequestError
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts, default_group
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, wait_until

TEXT = "Hello, wörld! 日本"
NUM_TOKENS = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1  # with the end token


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(TEXT)


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    parts = ApiParts(
        client=engine,
        tokenizer=TOKENIZER,
        holdback_percent=lambda: 30,
        opt_out_tenants=frozenset({"acme"}),
        state=lambda: {"gen": 3},
        swap=lambda: {"slots": {"A": "v7"}},
        metrics=lambda: (b"# TYPE x counter\nx_total 1\n", "text/plain; version=0.0.4"),
        max_silence_s=2.0,
    )
    with serve_app(build_api(parts)) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(autouse=True)
def _reset(engine: ScriptedEngine) -> Iterator[None]:
    yield
    engine.submit_error, engine.fail_after, engine.heartbeat_s = None, None, 0.0
    engine.go.set()


# ---- the openai client ------------------------------------------------------------------------------------------
def test_completion(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=100, temperature=0, seed=3)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, NUM_TOKENS)
    assert answer.usage.total_tokens == 3 + NUM_TOKENS
    assert engine.requests[-1].params.seed == 3
    assert answer._request_id and answer.id == f"cmpl-{engine.requests[-1].request_id}"
    rounds = -(-NUM_TOKENS // 3)
    assert answer.paceline == {  # type: ignore[attr-defined]
        "drafter_version": "v7", "bucket": "default", "acceptance_length": 3.0, "num_rounds": rounds, "num_draft_tokens": 4 * rounds,
        "num_accepted_tokens": 2 * rounds, "num_emitted_tokens": NUM_TOKENS,
        "num_truncated_tokens": 0, "draft_ms": 1.0 * rounds,
        "verify_ms": 2.0 * rounds, "total_ms": 3.5 * rounds, "round_ms": 0.0,
    }  # fmt: skip


def test_chat(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    prompt = TOKENIZER.decode(engine.requests[-1].prompt_token_ids)
    assert prompt == "user: hi\nassistant: "
    assert engine.requests[-1].params.max_tokens == 256 - len(engine.requests[-1].prompt_token_ids)


def test_chat_stream_has_one_chunk_a_round_then_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len(chunks) == -(-NUM_TOKENS // 3) + 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == TEXT
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert chunks[-2].paceline["drafter_version"] == "v7"  # type: ignore[attr-defined]
    assert all(not hasattr(c, "paceline") for c in chunks[:-2])
    assert len({c.id for c in chunks}) == 1


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="abc", max_tokens=100, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == TEXT
    assert all("�" not in c.choices[0].text for c in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_length_limit(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hell", "length")


@pytest.mark.parametrize("stop", ["wör", [", w", "zzz"]])
def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, stop: str | list[str]) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=100, stop=stop)
    wanted = TEXT[: TEXT.index(stop if isinstance(stop, str) else stop[0])]
    assert answer.choices[0].text == wanted
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.completions.create(model="tiny", prompt="abc", max_tokens=100, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == wanted


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Hello")
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.top_logprobs is not None
    assert all(len(t) == 2 and t[c] == -0.5 for t, c in zip(logprobs.top_logprobs, "Hello", strict=True))


def test_chat_logprobs_stream_and_whole_agree(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert b"".join(bytes(t.bytes or []) for t in content).decode().removesuffix("<|end|>") == TEXT
    assert all(len(t.top_logprobs) == 2 for t in content)
    chunks = client.chat.completions.create(**ask, stream=True)
    parts = [t for c in chunks for t in (c.choices[0].logprobs.content or [])]
    assert [t.model_dump() for t in parts] == [t.model_dump() for t in content]


def test_logprobs_end_where_the_stop_string_begins(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=100, stop="lo,", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens == list("Hel")
    assert logprobs.top_logprobs is None


def test_extension_fields_through_extra_body(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=3, extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "stop_token_ids": [9], "ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    params = engine.requests[-1].params
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.1)
    assert (params.stop_token_ids, params.ignore_eos) == ((9,), True)
    choice = answer.choices[0].model_dump()
    assert choice["token_ids"] == TOKENIZER.encode("Hel", add_special_tokens=False)
    assert choice["prompt_token_ids"] == list(engine.requests[-1].prompt_token_ids)


def test_token_id_prompts(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=1)
    assert engine.requests[-1].prompt_token_ids == (5, 6, 7)


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    behind = httpx.get(f"{client.base_url}models/", headers={"authorization": "Bearer x"})
    assert [m["id"] for m in behind.json()["data"]] == ["tiny"]
    assert client.completions.create(model="", prompt="abc", max_tokens=4).model == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


# ---- labels -----------------------------------------------------------------------------------------------------
def test_labels_come_from_headers_or_metadata(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    headers = {
        "x-paceline-bucket": "math",
        "x-paceline-group": "plain",
        "x-paceline-trace": "off",
    }
    client.completions.create(model="tiny", prompt="abc", max_tokens=1, extra_headers=headers)
    request = engine.requests[-1]
    assert (request.bucket, request.group, request.is_traced) == ("math", Group.PLAIN, False)
    client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        metadata={"bucket": "code", "paceline_group": "static"},
        max_tokens=1,
    )
    request = engine.requests[-1]
    assert (request.bucket, request.group, request.is_traced) == ("code", Group.STATIC, True)


def test_a_tenant_that_opted_out_is_never_traced(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    def ask(headers: dict[str, str], **fields: dict[str, str]) -> tuple[str, bool]:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=1, extra_headers=headers, **fields
        )  # type: ignore[call-overload]
        return engine.requests[-1].tenant, engine.requests[-1].is_traced

    assert ask({"x-paceline-tenant": "acme"}) == ("acme", False)
    assert ask({}, metadata={"paceline_tenant": "acme"}) == ("acme", False)
    assert ask({"x-paceline-tenant": "acme", "x-paceline-trace": "on"}) == ("acme", False)
    assert ask({"x-paceline-tenant": "other"}) == ("other", True)
    assert ask({"x-paceline-tenant": "other", "x-paceline-trace": "off"}) == ("other", False)
    assert ask({}) == ("", True)


def test_default_group_is_the_hold_back_by_crc32(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for _ in range(20):
        client.completions.create(model="tiny", prompt="a", max_tokens=1)
        sent = engine.requests[-1]
        wanted = Group.STATIC if zlib.crc32(sent.request_id.encode()) % 100 < 30 else Group.ADAPTIVE
        assert sent.group == wanted and sent.counted_group == wanted.value
    assert default_group("any", 0) == Group.ADAPTIVE
    assert default_group("any", 100) == Group.STATIC


@pytest.mark.parametrize(
    "headers",
    [
        {"x-paceline-bucket": "has space"},
        {"x-paceline-bucket": ""},
        {"x-paceline-bucket": "x" * 65},
        {"x-paceline-group": "fast"},
        {"x-paceline-trace": "maybe"},
        {"x-paceline-tenant": "a b"},
        {"x-paceline-tenant": ""},
        {"x-request-id": "a b"},
        {"x-request-id": "x" * 129},
    ],
)
def test_malformed_labels_are_refused(url: str, headers: dict[str, str]) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers)
    assert answer.status_code == 400, answer.text


def test_contradicting_labels_are_refused(url: str) -> None:
    body = {"prompt": "a", "metadata": {"bucket": "math"}}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-paceline-bucket": "code"})
    assert answer.status_code == 400
    assert "differ" in answer.json()["error"]["message"]


# ---- errors -----------------------------------------------------------------------------------------------------
def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="tiny", prompt="a", suffix="b")
    assert e.value.body == {
        "message": "suffix is not supported: infilling is not offered by this model",
        "type": "invalid_request_error", "param": "suffix", "code": None,
    }  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a" * 257}, "257 tokens"),
        ({"prompt": "a" * 250, "max_tokens": 7}, "at most 6"),
        ({"prompt": [300]}, r"\[0, 300\)"),
        ({"prompt": [-1]}, r"\[0, 300\)"),
        ({"prompt": "a", "temperature": -1}, "temperature must be in"),
        ({"prompt": "a", "unknown_field": 1}, "unknown_field is not a field"),
    ],
)
def test_bad_requests_say_what_to_do(url: str, body: dict, words: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 400
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(answer.json()["error"]["message"])


def test_default_length_is_clipped_to_the_context(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 250})
    assert answer.json()["usage"]["completion_tokens"] == 6


def test_a_full_queue_is_429_with_retry_after(url: str, client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.submit_error = CapacityError("the queue is full (256 waiting); retry later")
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="a")


def test_engine_errors_map_to_statuses(url: str, engine: ScriptedEngine) -> None:
    engine.submit_error = EngineStoppedError("the engine is shutting down")
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
    engine.submit_error = RequestError("request id r1 is in use")
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 400


def test_unknown_routes_and_methods_have_openai_errors(url: str) -> None:
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{url}/v1/completions").status_code == 405


def test_too_large_bodies_are_refused(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=b"x" * (8 * 2**20 + 1))
    assert answer.status_code == 413


def test_an_error_event_ends_the_stream_without_done(url: str, engine: ScriptedEngine) -> None:
    engine.fail_after = 2
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 99})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line for line in answer.text.split("\n\n") if line]
    assert len(events) == 3
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "the drafting table caught fire"
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("responses", {"input": "a"}),
    ],
)
def test_every_event_is_one_line_to_every_client(route: str, body: dict[str, object]) -> None:
    """Some, httpx among them, end lines at all that Unicode calls a line end, which JSON may hold as it is."""
    text = "a\u2028b\x85c\u2029d"
    limit = {"max_output_tokens" if route == "responses" else "max_tokens": 99}
    with serve_app(build_api(ApiParts(client=ScriptedEngine(text), tokenizer=TOKENIZER))) as url:
        answer = httpx.post(f"{url}/v1/{route}", json={**body, **limit, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if route == "responses":
        said = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    else:
        choices = [c for e in events for c in e["choices"]]
        said = "".join(c["text"] if route == "completions" else c["delta"].get("content") or "" for c in choices)
    assert said == text


def test_the_openai_client_raises_on_an_error_event(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.fail_after = 1
    with pytest.raises(openai.APIError, match="caught fire"):
        list(client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=99))


def test_an_error_without_stream_is_503(url: str, engine: ScriptedEngine) -> None:
    engine.fail_after = 1
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 99})
    assert answer.status_code == 503
    assert "caught fire" in answer.json()["error"]["message"]


def test_a_silent_engine_ends_the_stream_with_an_error(url: str, engine: ScriptedEngine) -> None:
    engine.go.clear()
    engine.heartbeat_s = 60.0
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}, timeout=10)
    assert "silent" in answer.text and "[DONE]" not in answer.text
    assert engine.requests[-1].request_id in engine.aborted
    assert httpx.get(f"{url}/healthz").status_code == 503


def test_sse_format(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 7})
    events = answer.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    bodies = [json.loads(e.removeprefix("data: ")) for e in events[:-2]]
    assert all(b["object"] == "text_completion" for b in bodies)
    assert answer.headers["x-accel-buffering"] == "no"


# ---- disconnects ------------------------------------------------------------------------------------------------
def test_a_client_that_hangs_up_aborts_its_stream(url: str, engine: ScriptedEngine) -> None:
    engine.go.clear()
    body = {"prompt": "a", "stream": True, "max_tokens": 99}
    with httpx.Client() as c, c.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200
    wait_until(lambda: engine.requests[-1].request_id in engine.aborted)


def test_a_client_that_hangs_up_aborts_its_whole_answer(url: str, engine: ScriptedEngine) -> None:
    engine.go.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=0.3)
    wait_until(lambda: engine.requests[-1].request_id in engine.aborted)


def test_finished_requests_are_not_aborted(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(model="tiny", prompt="abc", max_tokens=5)
    list(client.completions.create(model="tiny", prompt="a", stream=True))
    assert not {r.request_id for r in engine.requests[-2:]} & engine.aborted


def test_many_clients_at_once(url: str) -> None:
    results: list[str] = []

    def ask() -> None:
        results.append(
            httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 99}, timeout=30).json()["choices"][
                0
            ]["text"]
        )

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [TEXT] * 20


# ---- other routes -----------------------------------------------------------------------------------------------
def test_operating_routes(url: str) -> None:
    assert httpx.get(f"{url}/healthz").json()["status"] == "ok"
    assert httpx.get(f"{url}/paceline/state").json() == {"gen": 3}
    assert httpx.get(f"{url}/paceline/swap").json() == {"slots": {"A": "v7"}}
    metrics = httpx.get(f"{url}/metrics")
    assert "x_total 1" in metrics.text and metrics.headers["content-type"].startswith("text/plain")
    assert httpx.post(f"{url}/paceline/swap").status_code == 405


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_segments_cut_the_text_where_accepted_tokens_begin_and_end(url: str, route: str) -> None:
    ask: dict = {"max_tokens": 100, "return_segments": True}
    ask |= {"prompt": "abc"} if route == "completions" else {"messages": [{"role": "user", "content": "abc"}]}
    (choice,) = httpx.post(f"{url}/v1/{route}", json=ask).json()["choices"]
    # Two of three tokens a round are accepted ones, a token is a byte, and a character is its last byte's.
    assert choice["segments"] == [
        ["He", True], ["l", False], ["lo", True], [",", False], [" wör", True], ["l", False], ["d!", True], [" 日本", False],
    ]  # fmt: skip
    (cut,) = httpx.post(f"{url}/v1/{route}", json={**ask, "stop": "rl"}).json()["choices"]
    assert cut["segments"] == [["He", True], ["l", False], ["lo", True], [",", False], [" wö", True]]
    with httpx.stream("POST", f"{url}/v1/{route}", json={**ask, "stop": "rl", "stream": True}) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    streamed = [s for line in lines for c in json.loads(line)["choices"] for s in c["segments"]]
    assert "".join(t for t, a in streamed if a) == "Helo wö" and streamed[0] == ["He", True]
    if route == "completions":
        (echoed,) = httpx.post(f"{url}/v1/{route}", json={**ask, "echo": True}).json()["choices"]
        assert echoed["segments"][0] == ["abc", False] and echoed["text"].startswith("abcHe")
    assert (
        "segments" not in httpx.post(f"{url}/v1/{route}", json={**ask, "return_segments": False}).json()["choices"][0]
    )
