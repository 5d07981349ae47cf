"""What a replica counts and times of its requests: every answer once, where clients see it, whatever they do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.contracts import HttpMeters
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.engine.engine import Engine
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, serve_engine, wait_until
from tests.helpers.fakes import tiny_target

ROUTE = "/v1/completions"


def num(histogram) -> int:
    return sum(histogram.counts)


def post(base: str, **fields) -> httpx.Response:
    body = {"prompt": "one two", "max_tokens": 9, "ignore_eos": True, "temperature": 0, **fields}
    return httpx.post(base + ROUTE, json=body, timeout=30)


def ended(meters: HttpMeters, count: int) -> dict[int, int]:
    """Status codes once so many responses have ended; the client has its answer a little earlier."""
    wait_until(lambda: sum(n for codes in meters.responses.values() for n in codes.values()) == count)
    return meters.responses[ROUTE]


@pytest.fixture
def real() -> Iterator[tuple[str, Engine, HttpMeters]]:
    meters = HttpMeters()
    with serve_engine(tiny_target(vocab=300, layers=2), meters=meters) as (base, engine):
        yield base, engine, meters


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_timed_once_and_each_token_but_those_of_the_first_chunk(real, stream: bool) -> None:
    base, engine, meters = real
    began = time.perf_counter()
    got = post(base, stream=stream)
    took_s = time.perf_counter() - began
    assert got.status_code == 200 and ended(meters, 1) == {200: 1}
    times, other = meters.times(stream), meters.times(not stream)
    assert num(times.first_token) == num(times.whole) == 1
    first_chunk = 9 - num(times.per_token)
    assert 1 <= first_chunk < 9
    assert 0 < times.first_token.sum_s <= times.whole.sum_s <= took_s
    assert times.first_token.sum_s + times.per_token.sum_s <= times.whole.sum_s + 1e-9
    assert num(other.first_token) == num(other.per_token) == num(other.whole) == 0
    assert num(engine.queue_times) == 1 and 0 <= engine.queue_times.sum_s <= took_s


def test_choices_are_timed_apart(real) -> None:
    base, engine, meters = real
    assert post(base, n=3, temperature=1.0).status_code == 200
    ended(meters, 1)
    times = meters.times(False)
    assert num(times.first_token) == 1, "a request has one first token"
    assert num(times.per_token) <= 3 * 8 and num(times.per_token) > 8
    assert times.per_token.sum_s <= 3 * times.whole.sum_s
    assert num(engine.queue_times) == 3


def test_refusals_are_counted_by_code_and_not_timed(real) -> None:
    base, _, meters = real
    assert post(base, max_tokens=-1).status_code == 400
    assert httpx.get(base + ROUTE).status_code == 405
    assert post(base, model="nobody").status_code == 404
    assert ended(meters, 3) == {400: 1, 405: 1, 404: 1}
    assert num(meters.at_once.whole) == num(meters.at_once.first_token) == 0


def test_paths_of_clients_make_no_series(real) -> None:
    base, _, meters = real
    for path in ("/evil/v1/completions", "/v1/completions/evil", "/x" * 50, "/healthz"):
        httpx.get(base + path)
    post(base)
    wait_until(lambda: 200 in meters.responses.get(ROUTE, {}))
    assert set(meters.responses) == {ROUTE} and set(meters.responses[ROUTE]) <= {200, 404}


def test_a_stream_that_breaks_off_is_a_failure_though_its_status_was_200() -> None:
    engine, meters = ScriptedEngine(), HttpMeters()
    engine.fail_after = 1
    with serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER, meters=meters))) as base:
        assert post(base, stream=True, ignore_eos=False).status_code == 200
        assert ended(meters, 1) == {200: 1} and meters.broken == {ROUTE: 1}
        assert num(meters.streamed.whole) == 0 and num(meters.streamed.first_token) == 1
        assert post(base, ignore_eos=False).status_code == 503
        assert ended(meters, 2) == {200: 1, 503: 1} and meters.broken == {ROUTE: 1}


def like_serve(app: Any) -> Any:
    """The app below a server whose `receive` fails when the client hangs up: Serve's cancels the call behind it."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        async def failing() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RuntimeError("the task was cancelled")
            return message

        await app(scope, failing if scope["type"] == "http" else receive, send)

    return call


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("server", [like_serve, lambda app: app], ids=["serve", "uvicorn"])
def test_a_client_that_leaves_is_no_failure_of_the_service(server, stream: bool, caplog) -> None:
    engine, meters = ScriptedEngine(), HttpMeters()
    engine.go.clear()
    with serve_app(server(build_api(ApiParts(client=engine, tokenizer=TOKENIZER, meters=meters)))) as base:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(base + ROUTE, json={"prompt": "x", "max_tokens": 4, "stream": stream}, timeout=0.5)
        wait_until(lambda: meters.responses)
        engine.go.set()
        assert meters.responses[ROUTE] == {200 if stream else 499: 1}
        assert meters.broken == {} and not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.parametrize("has_body", [True, False])
def test_a_request_that_its_server_cancels_is_no_failure_of_the_service(has_body: bool) -> None:
    """Serve's way to tell of a client that is gone, during the answer or, where the proxy passed a part on, the body."""
    engine, meters = ScriptedEngine(), HttpMeters()
    engine.go.clear()
    app = build_api(ApiParts(client=engine, tokenizer=TOKENIZER, meters=meters))
    messages = [{"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}] if has_body else []

    async def main() -> None:
        async def receive() -> dict:
            if not messages:
                await asyncio.sleep(60)
            return messages.pop()

        async def send(message: dict) -> None:
            raise AssertionError("nobody is there")

        task = asyncio.ensure_future(app(scope_of(ROUTE), receive, send))
        while has_body and not engine.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 30))
    engine.go.set()
    assert meters.responses == {ROUTE: {499: 1}} and meters.broken == {}


def scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [],
        "client": ("127.0.0.1", 1), "server": None,
    }  # fmt: skip


def test_a_reader_that_stalls_does_not_make_tokens_look_slow() -> None:
    engine, meters = ScriptedEngine(), HttpMeters()
    app = build_api(ApiParts(client=engine, tokenizer=TOKENIZER, meters=meters))
    body, num_sent, is_read = b'{"prompt": "x", "stream": true}', 0, False

    async def receive() -> dict:
        nonlocal is_read
        if is_read:
            await asyncio.sleep(60)
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict) -> None:
        nonlocal num_sent
        if message.get("body"):
            num_sent += 1
            await asyncio.sleep(0.2)

    asyncio.run(asyncio.wait_for(app(scope_of(ROUTE), receive, send), 30))
    times = meters.streamed
    assert num_sent > 4 and times.whole.sum_s > 0.8, "the answer waited for its reader"
    slowest = times.per_token.quantile(1.0)
    assert slowest is not None and slowest < 0.05
