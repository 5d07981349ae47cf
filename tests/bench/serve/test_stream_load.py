"""`paceline bench streams`: a sound server passes, every way of losing an answer is seen, errors say what to do."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from typer.testing import CliRunner

from paceline.bench.serve import local_service
from paceline.bench.serve.client import ServerFeatures, StreamClient, StreamRequest, find_features
from paceline.cli.main import app
from paceline.config import EngineConfig
from paceline.errors import PacelineError
from paceline.machine import free_port
from paceline.serving.api.app import build_api
from paceline.serving.api.client import LocalEngineClient
from paceline.serving.api.generation import ApiParts
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.thread import EngineThread
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, serve_app, wait_until
from tests.helpers.fakes import tiny_target
from tests.helpers.scripted_drafters import RepeatDrafter

RUN = CliRunner()
TOKEN = "secret-token"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A real engine behind the real HTTP layer."""
    target = tiny_target(vocab=300, layers=2, width=16, context=512)
    target.tokenizer = TOKENIZER
    engine = Engine(target, DrafterSlots(RepeatDrafter(), "v0"), EngineConfig(max_running=4, max_waiting=64, kv_bytes=4 * 512 * target.kv_row_bytes))  # fmt: skip
    thread = EngineThread(engine)
    thread.start()
    parts = ApiParts(
        client=LocalEngineClient(engine, thread, model_name="tiny"),
        tokenizer=TOKENIZER,
        clients=Clients(Tokens(api_token=TOKEN)),
    )
    with serve_app(build_api(parts)) as base:
        yield base
    assert thread.stop()


@pytest.mark.parametrize("route", [[], ["--chat"]])
def test_a_sound_server_is_clean(url, tmp_path, route):
    path = tmp_path / "streams.json"
    result = RUN.invoke(app, ["bench", "streams", "--url", f"{url}/v1", "--clients", "6", "--minutes", "0.05", "--max-tokens", "12", "--check", "--num-check", "4", "--api-token", TOKEN, "--json", str(path), *route])  # fmt: skip
    assert result.exit_code == 0, result.output
    text = path.read_text()
    document = json.loads(text)
    assert TOKEN not in text and document["is_complete"]
    assert document["server"] == {"model": "tiny", "has_token_ids": True, "has_usage": True}
    assert document["num_answers"] == document["num_whole"] >= 6 and document["problems"] == {}
    assert document["num_tokens"] >= 3 * 6 and document["tokens_per_s"] > 0
    for key in ("ttft_ms", "gap_ms", "client_lag_ms"):
        values = document[key]
        assert 0 <= values["p50"] <= values["p95"] <= values["p99"] <= values["max"]
    check = document["check"]
    assert check["num_answers"] == 4 and check["equal"] + check["near_tie"] == 4
    assert "verdict: clean" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "start one with `paceline serve`"),
        (["--url", "http://[::1"], "url must be an address, got 'http://[::1'"),
        (["--url", "localhost:8000"], "url must begin with http"),
        (["--clients", "0"], "clients must be in"),
        (["--minutes", "0"], "minutes must be > 0"),
        (["--check", "--temperature", "0.8"], "temperature must include 0"),
        (["--buckets", "poems"], "bucket must be one of"),
    ],
)
def test_bad_options_are_answered_in_one_sentence(arguments, message):
    result = RUN.invoke(app, ["bench", "streams", *arguments])
    assert isinstance(result.exception, PacelineError), result.output
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_a_server_that_wants_a_token_is_named_as_such(url):
    result = RUN.invoke(app, ["bench", "streams", "--url", url, "--minutes", "0.01"])
    assert isinstance(result.exception, PacelineError) and "give --api-token" in str(result.exception)


# ---- a server that breaks answers in every way ----------------------------------------------------------------------
def _chunk(text="a", ids=(1,), finish=None):
    return (
        "data: " + json.dumps({"choices": [{"text": text, "token_ids": list(ids), "finish_reason": finish}]}) + "\n\n"
    )


def _usage(count):
    return "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": count}}) + "\n\n"


DONE = "data: [DONE]\n\n"
SCRIPTS = {
    "whole": [": a comment\n\n", _chunk(), _chunk(ids=(2, 3), finish="length"), _usage(3), DONE],
    "no_done": [_chunk(), _chunk(finish="stop"), _usage(2)],
    "lost_tokens": [_chunk(), _chunk(finish="stop"), _usage(3), DONE],
    "no_end": [_chunk(), _usage(1), DONE],
    "bad_json": [_chunk(), "data: {oops\n\n", DONE],
    "error_event": [_chunk(), 'data: {"error": {"message": "fire"}}\n\n', DONE],
}


_MALFORMED = [
    '[]', 'null', '5', '"error"', '{"choices": {}}', '{"choices": [5]}', '{"choices": [{"text": 5}]}',
    '{"choices": [{"text": "a", "token_ids": "12"}]}', '{"choices": [{"text": "a", "token_ids": [1.5]}]}',
    '{"choices": [{"finish_reason": {}}]}', '{"usage": [1]}', '{"usage": {"completion_tokens": "3"}}',
]  # fmt: skip
SCRIPTS |= {f"bad_event {text}": [_chunk(), f"data: {text}\n\n", DONE] for text in _MALFORMED}
SCRIPTS["bad_json deep"] = [f'data: {{"x": {"[" * 100_000}\n\n']
SCRIPTS["whole with null"] = ['data: {"error": null, "choices": null, "usage": null}\n\n', *SCRIPTS["whole"]]


def _broken_app() -> FastAPI:
    server = FastAPI()

    @server.get("/v1/models")
    async def models():
        return {"data": [{"id": "broken"}]}

    @server.post("/v1/completions")
    async def completions(request: Request):
        body = await request.json()
        if "return_token_ids" in body and body["prompt"] == "Hello":
            return JSONResponse({"error": "unknown field return_token_ids"}, status_code=400)
        if body["prompt"] == "refused":
            return JSONResponse({"error": "full"}, status_code=429)
        if body["prompt"] == "http_500":
            return JSONResponse({"error": "fire"}, status_code=500)
        if body["prompt"] == "connection":

            async def cut():
                yield _chunk()
                raise RuntimeError("cut")

            return StreamingResponse(cut(), media_type="text/event-stream")
        return StreamingResponse(iter(SCRIPTS.get(body["prompt"], [_chunk(ids=(), finish="stop"), _usage(1), DONE])), media_type="text/event-stream")  # fmt: skip

    return server


@pytest.fixture(scope="module")
def broken() -> Iterator[str]:
    with serve_app(_broken_app()) as base:
        yield base


def _stream(base, prompt, features=None):
    async def ask():
        async with httpx.AsyncClient(base_url=base) as http:
            known = features or ServerFeatures(model="broken", has_token_ids=True, has_usage=True)
            request = StreamRequest(prompt=prompt, bucket="b", max_tokens=4, temperature=0.0, seed=0)
            return await StreamClient(http, is_chat=False, features=known).stream(request)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "problem", [*(k for k in SCRIPTS if not k.startswith("whole")), "refused", "http_500", "connection"]
)
def test_every_way_of_losing_an_answer_is_named(broken, problem):
    assert (_stream(broken, problem).problem or "").split(":")[0] == problem.split(" ")[0]


@pytest.mark.parametrize("script", ["whole", "whole with null"])
def test_a_whole_answer_has_no_problem_and_all_its_tokens(broken, script):
    result = _stream(broken, script)
    assert result.problem is None and result.token_ids == [1, 2, 3] and result.usage_tokens == 3 and result.text == "aa"
    assert result.ttft_s is not None and len(result.gaps_s) == 1 and [n for _, n in result.arrivals] == [1, 2]


def test_extensions_that_a_server_refuses_are_not_asked_for(broken):
    async def ask():
        async with httpx.AsyncClient(base_url=broken) as http:
            return await find_features(http, broken, is_chat=False)

    assert asyncio.run(ask()) == ServerFeatures(model="broken", has_token_ids=False, has_usage=True)


def test_a_broken_server_fails_the_command_and_is_told_from_a_full_one(broken, tmp_path):
    """The bundled prompts get an answer of one chunk; without token ids lost tokens cannot be seen, and that is said."""
    result = RUN.invoke(app, ["bench", "streams", "--url", broken, "--clients", "2", "--minutes", "0.01"])
    assert result.exit_code == 0 and "lost tokens cannot be seen" in result.output
    result = RUN.invoke(app, ["bench", "streams", "--url", f"{broken}/nowhere", "--minutes", "0.01"])
    assert isinstance(result.exception, PacelineError) and "answered HTTP 404" in str(result.exception)


# ---- a server that dies ---------------------------------------------------------------------------------------------
class Mortal:
    """A server that stops for good, at once, when it has given so many answers; the answers tell themselves apart."""

    def __init__(self, num_answers: int) -> None:
        self.num_answers, self.count = num_answers, 0
        server = FastAPI()
        server.get("/v1/models")(self._models)
        server.post("/v1/completions")(self._completions)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._server = uvicorn.Server(uvicorn.Config(server, host="127.0.0.1", port=port, log_level="critical"))

    async def _models(self) -> dict:
        return {"data": [{"id": "mortal"}]}

    async def _completions(self) -> StreamingResponse:
        self.count += 1
        if self.count >= self.num_answers:
            self._server.should_exit = self._server.force_exit = True
        answer = [_chunk(ids=(self.count,), finish="stop"), _usage(1), DONE]
        return StreamingResponse(iter(answer), media_type="text/event-stream")

    def __enter__(self) -> "Mortal":
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_the_clients_end_when_the_server_is_gone_and_the_command_says_so(monkeypatch, tmp_path, check):
    monkeypatch.setattr("paceline.bench.serve.load._GIVE_UP_S", 0.3)
    path = tmp_path / "streams.json"
    began = time.monotonic()
    with Mortal(num_answers=9) as server:
        result = RUN.invoke(app, ["bench", "streams", "--url", server.url, "--clients", "2", "--minutes", "0.5", "--temperature", "0", "--json", str(path), *check])  # fmt: skip
    assert time.monotonic() - began < 20, "half a minute of load is not waited for"
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    assert f"the server at {server.url} does not answer any more" in result.output
    document = json.loads(path.read_text())
    assert document["is_complete"] and document["gone_after_s"] < 15 and document["problems"]["connection"] >= 2
    if check:
        assert document["check"]["num_answers"] == document["check"]["failed"] == min(document["num_whole"], 32) >= 7


def test_a_server_that_dies_while_a_changed_answer_is_looked_into_fails_the_check(monkeypatch):
    async def dead(self, request, num_tokens):
        raise httpx.ReadError("connection reset")

    monkeypatch.setattr(StreamClient, "top_two", dead)
    with Mortal(num_answers=10**6) as server:
        result = RUN.invoke(app, ["bench", "streams", "--url", server.url, "--clients", "1", "--minutes", "0.002", "--temperature", "0", "--check", "--num-check", "2"])  # fmt: skip
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    assert "failed: connection: ReadError: connection reset" in result.output


def test_a_second_answer_that_never_ends_is_given_up(monkeypatch):
    seen = set()

    async def trickle(self, request, result):
        result.token_ids, result.finish_reason = [1], "stop"
        if request in seen:
            await asyncio.Event().wait()
        seen.add(request)
        await asyncio.sleep(0.02)

    with Mortal(num_answers=10**6) as server:
        monkeypatch.setattr(StreamClient, "_read", trickle)
        monkeypatch.setattr("paceline.bench.serve.load.find_features", _features)
        result = RUN.invoke(app, ["bench", "streams", "--url", server.url, "--clients", "1", "--minutes", "0.001", "--temperature", "0", "--check", "--timeout", "0.3"])  # fmt: skip
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    assert "failed: timeout: not complete after" in result.output


async def _features(http, url, *, is_chat):
    return ServerFeatures(model="mortal", has_token_ids=True, has_usage=False)


@pytest.mark.parametrize(
    "body",
    [[], {}, {"choices": []}, {"choices": [5]}, {"choices": [{"logprobs": 5}]}, {"choices": [{"logprobs": {"top_logprobs": [{"a": "x"}]}}]}],
)  # fmt: skip
def test_log_probabilities_in_no_known_form_are_none(body):
    async def ask():
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json=body))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            known = ServerFeatures(model="m", has_token_ids=True, has_usage=True)
            request = StreamRequest(prompt="a", bucket="b", max_tokens=4, temperature=0.0, seed=0)
            return await StreamClient(http, is_chat=False, features=known).top_two(request, 4)

    assert asyncio.run(ask()) is None


def test_a_service_that_ends_before_it_answers_is_reported_with_its_last_words(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/echo")  # prints its arguments and ends
    with pytest.raises(PacelineError) as error, local_service.local_service(timeout_s=30):
        pass
    assert "ended with code 0 before it answered: -m paceline.cli.main serve" in str(error.value)
