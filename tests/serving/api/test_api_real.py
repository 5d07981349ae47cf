"""The HTTP layer over a real engine: answers, statistics, buckets, seeds, stops, log-probabilities, disconnects."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from paceline.config import EngineConfig
from paceline.serving.api.app import build_api
from paceline.serving.api.client import LocalEngineClient
from paceline.serving.api.generation import ApiParts
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.thread import EngineThread
from tests.helpers.api_server import serve_app, wait_until
from tests.helpers.fakes import greedy_continuation, tiny_target
from tests.helpers.scripted_drafters import RepeatDrafter


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[openai.OpenAI, str, Engine]]:
    target = tiny_target(vocab=300, layers=2)
    config = EngineConfig(max_running=4, kv_bytes=4 * 2**20, max_buckets=5)
    engine = Engine(target, DrafterSlots(RepeatDrafter(), "repeat-1"), config)
    thread = EngineThread(engine)
    thread.start(is_warmed_up=True)
    client = LocalEngineClient(engine, thread, model_name="tiny")
    with serve_app(build_api(ApiParts(client=client, tokenizer=target.tokenizer))) as base:
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0), base, engine
    assert thread.stop(timeout_s=10)


def test_real_greedy_answers_equal_plain_decoding_and_report_their_drafter(real: tuple) -> None:
    client, _, engine = real
    answers = {}
    for group in ("adaptive", "plain"):
        answers[group] = client.completions.create(
            model="tiny", prompt=[5, 9, 33], max_tokens=20, temperature=0, extra_headers={"x-paceline-group": group},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
    ids = {g: a.choices[0].model_dump()["token_ids"] for g, a in answers.items()}
    assert ids["adaptive"] == ids["plain"] == greedy_continuation(engine.target, [5, 9, 33], 20)
    assert answers["adaptive"].paceline["drafter_version"] == "repeat-1"
    assert answers["plain"].paceline["drafter_version"] == ""
    assert answers["plain"].paceline["num_draft_tokens"] == 0
    assert answers["plain"].usage.completion_tokens == 20


def test_real_segments_say_what_was_drafted_and_of_a_plain_answer_nothing(real: tuple) -> None:
    _, base, _ = real
    ask = {"prompt": [7, 8], "max_tokens": 24, "temperature": 0, "logit_bias": {"40": 100}, "return_segments": True}
    found = httpx.post(f"{base}/v1/completions", json=ask).json()
    (choice,), stats = found["choices"], found["paceline"]
    assert "".join(text for text, _ in choice["segments"]) == choice["text"]
    assert any(is_accepted for _, is_accepted in choice["segments"]) == (stats["num_accepted_tokens"] > 0)
    (plain,) = httpx.post(f"{base}/v1/completions", json={**ask, "metadata": {"paceline_group": "plain"}}).json()[
        "choices"
    ]
    assert plain["segments"] == [[choice["text"], False]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends", [{"max_tokens": 7}, {"stop": "STOP"}, {"max_tokens": 1}])
def test_real_statistics_balance_with_the_usage(real: tuple, ends: dict, stream: bool) -> None:
    client, _, _ = real
    ask = {"model": "tiny", "prompt": [7, 8], "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    if "stop" in ends:
        ends = {"stop": client.completions.create(**ask).choices[0].text[5:7]}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(**{**ask, **ends, **options})
    last = list(answer)[-1] if stream else answer
    stats = last.paceline
    assert stats["num_emitted_tokens"] == last.usage.completion_tokens
    balance = 1 + stats["num_rounds"] + stats["num_accepted_tokens"] - stats["num_truncated_tokens"]
    assert stats["num_emitted_tokens"] == balance
    if stats["num_rounds"]:
        assert stats["acceptance_length"] == pytest.approx(
            1 + stats["num_accepted_tokens"] / stats["num_rounds"], abs=1e-4
        )


def test_real_answers_name_the_bucket_that_was_used(real: tuple) -> None:
    client, _, engine = real
    used = []
    for i in range(engine.config.max_buckets + 2):
        answer = client.completions.create(
            model="tiny", prompt=[5], max_tokens=1, extra_headers={"x-paceline-bucket": f"b{i}"}
        )
        used.append(answer.paceline["bucket"])
    assert used[: engine.config.max_buckets - 1] == [f"b{i}" for i in range(engine.config.max_buckets - 1)]
    assert set(used[engine.config.max_buckets - 1 :]) == {"other"}
    assert client.completions.create(model="tiny", prompt=[5], max_tokens=1).paceline["bucket"] == "default"


def test_real_seeded_sampling_repeats_and_streams_alike(real: tuple) -> None:
    client, _, _ = real
    ask = {"model": "tiny", "prompt": [7, 8], "max_tokens": 16, "temperature": 0.9, "seed": 11}
    ask["extra_body"] = {"ignore_eos": True, "top_k": 40}
    whole = client.completions.create(**ask).choices[0].text
    assert client.completions.create(**ask).choices[0].text == whole
    chunks = list(client.completions.create(**ask, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole
    assert len(chunks) in (chunks[-1].paceline["num_rounds"], chunks[-1].paceline["num_rounds"] + 1)
    ask["seed"] = 12
    assert client.completions.create(**ask).choices[0].text != whole


def test_real_stop_string_cuts_the_text_before_it(real: tuple) -> None:
    client, _, _ = real
    ask = {"model": "tiny", "prompt": [7, 8], "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**ask).choices[0].text
    stop = text[5:7]
    for stream in (False, True):
        answer = client.completions.create(**ask, stop=stop, stream=stream)
        parts = list(answer) if stream else [answer]
        assert "".join(p.choices[0].text for p in parts) == text[: text.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"
        assert parts[-1].choices[0].stop_reason == stop


def test_real_stop_tokens_are_told_as_what_ended_the_answer(real: tuple) -> None:
    client, _, _ = real
    ask = {"model": "tiny", "prompt": [7, 8], "max_tokens": 24, "temperature": 0}
    ids = (
        client.completions.create(**ask, extra_body={"ignore_eos": True, "return_token_ids": True}).choices[0].token_ids
    )
    for stream in (False, True):
        extra = {"ignore_eos": True, "stop_token_ids": [ids[4]], "return_token_ids": True}
        answer = client.completions.create(**ask, stream=stream, extra_body=extra)
        parts = list(answer) if stream else [answer]
        last = parts[-1].choices[0]
        assert (last.finish_reason, last.stop_reason) == ("stop", ids[4])
        told = [t for p in parts for t in p.choices[0].token_ids]
        assert told == ids[: ids.index(ids[4]) + 1], "among the tokens"
        before = client.completions.create(**{**ask, "max_tokens": len(told) - 1}, extra_body={"ignore_eos": True})
        assert "".join(p.choices[0].text for p in parts) == before.choices[0].text, "and not in the text"
    cut = client.completions.create(**ask, extra_body={"ignore_eos": True}).choices[0]
    assert (cut.finish_reason, cut.stop_reason) == ("length", None)


def test_real_logprobs_belong_to_the_tokens(real: tuple) -> None:
    client, _, _ = real
    ask = {"model": "tiny", "prompt": [7, 8], "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    logprobs = client.completions.create(**ask, logprobs=3).choices[0].logprobs
    assert len(logprobs.tokens) == 8
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and value <= 0
        assert top[token] == value == max(top.values())


def test_real_disconnect_frees_the_engine(real: tuple) -> None:
    _, base, engine = real
    before = engine.stats()["num_aborted"]
    body = {"prompt": [5], "stream": True, "max_tokens": 500, "ignore_eos": True}
    with httpx.Client() as c, c.stream("POST", f"{base}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_until(lambda: engine.stats()["num_running"] == 0)
    assert engine.stats()["num_aborted"] == before + 1
    engine.call_between_rounds(engine.check_integrity).result(timeout=10)


def test_real_requests_share_an_id_at_once(real: tuple) -> None:
    _, base, engine = real
    body = {"prompt": [5], "stream": True}
    headers = {"x-request-id": "twice"}
    may_go_on = threading.Event()
    engine.call_between_rounds(lambda: may_go_on.wait(20))
    url = f"{base}/v1/completions"
    with (
        httpx.Client() as c,
        c.stream("POST", url, json=body, headers=headers) as first,
        c.stream("POST", url, json=body, headers=headers) as second,
    ):
        may_go_on.set()
        assert (first.status_code, second.status_code) == (200, 200)
        assert list(second.iter_lines())[-2] == list(first.iter_lines())[-2] == "data: [DONE]"
