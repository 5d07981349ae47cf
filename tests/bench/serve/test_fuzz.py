"""The fuzzer: it passes what stands up to it and names what does not; 5,000 requests of it against a real engine."""

import asyncio
import gc
import io
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI, Request, Response
from rich.console import Console

from paceline.bench.serve.fuzz import BodyWriter, FuzzOptions, FuzzTotals, fault_of, has_failed, run_fuzz, run_one
from paceline.bench.serve.fuzz_sockets import KINDS
from paceline.config import EngineConfig
from paceline.errors import PacelineError
from paceline.infra.service.connections import Connection
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.openapi import describe
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, serve_engine, wait_until
from tests.helpers.fakes import tiny_target

DOCUMENT = describe(build_api(ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER)).routes)
MAX_GROWTH_BYTES = 150 * 2**20
"""Of the process after a first thousand requests: tokenizer caches, compiled grammars and prefix pages have bounds."""


@pytest.fixture(autouse=True)
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_s", 2.0)


def fuzz(url: str, num_requests: int, **options: Any) -> dict[str, Any]:
    return run_fuzz(FuzzOptions(url=url, num_requests=num_requests, **options), Console(file=io.StringIO()))


@pytest.mark.slow
def test_a_real_engine_takes_five_thousand_and_has_nothing_left_over() -> None:
    config = EngineConfig(max_running=8, max_waiting=32, kv_bytes=4 * 2**20)
    with serve_engine(tiny_target(vocab=300, layers=2), config) as (url, engine):
        first = fuzz(url, 1000, seed=1)
        gc.collect()
        before = psutil.Process().memory_info().rss
        rest = fuzz(url, 4000, seed=2)
        wait_until(lambda: engine.is_idle, 30)
        engine.check_integrity()
        assert engine.allocator.num_free_pages == engine.allocator.num_pages
        gc.collect()
        growth = psutil.Process().memory_info().rss - before
    for document in (first, rest):
        assert not has_failed(document), (document["faults"], document["examples"])
        assert document["statuses"]["200"] > 100 and document["statuses"]["400"] > 100, document["statuses"]
        assert document["raw"]["whole: 200"] > 0
    assert {name.partition(":")[0] for name in rest["raw"]} == set(KINDS)
    assert growth < MAX_GROWTH_BYTES, growth


def test_a_service_with_tokens_takes_it_too() -> None:
    clients = Clients(Tokens(api_token="k"))
    with serve_app(build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER, clients=clients))) as url:
        document = fuzz(url, 400, seed=3, api_token="k")
    assert not has_failed(document), (document["faults"], document["examples"])
    assert document["statuses"]["401"] > 0 and document["statuses"]["200"] > 0
    assert "'k'" not in str(document["options"])


def broken_server() -> FastAPI:
    """Describes itself as the real one does; answers 500 to some bodies and 503 without a reason to others."""
    app = FastAPI(openapi_url=None)

    async def answer(request: Request) -> Response:
        size = len(await request.body())
        return Response("oops", 500 if size and size % 7 == 0 else 503 if size % 7 == 1 else 200)

    async def description() -> dict[str, Any]:
        return DOCUMENT

    for path, operations in DOCUMENT["paths"].items():
        if "post" in operations:
            app.add_api_route(path, answer, methods=["POST"])
    app.add_api_route("/openapi.json", description, methods=["GET"])
    app.add_api_route("/healthz", answer, methods=["GET"])
    return app


def test_a_server_with_faults_fails() -> None:
    with serve_app(broken_server()) as url:
        document = fuzz(url, 200, seed=4)
    assert has_failed(document) and document["faults"]["status 500"] > 5
    assert document["faults"]["503 without a reason"] > 5 and 0 < len(document["examples"]) <= 20


def metered(gauges: Callable[[int], dict[str, float]], bodies: list[bytes] | None = None) -> FastAPI:
    """A server whose /metrics has these of each of two replicas, by the number of requests so far; it keeps their bodies."""
    app, kept = FastAPI(openapi_url=None), [] if bodies is None else bodies

    async def answer(request: Request) -> Response:
        kept.append(await request.body())
        return Response("{}")

    async def metrics() -> Response:
        found = gauges(len(kept)).items()
        return Response("".join(f'# TYPE {n} gauge\n{n}{{r="a"}} 0\n{n}{{r="b"}} {v}\n' for n, v in found))

    async def healthy() -> dict[str, str]:
        return {}

    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        app.add_api_route(path, answer, methods=["POST"])
    app.add_api_route("/openapi.json", lambda: DOCUMENT, methods=["GET"])
    app.add_api_route("/healthz", healthy, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    return app


def test_a_server_with_something_left_over_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.serve.fuzz.CHECK_S", 1.0)
    with serve_app(metered(lambda n: {"paceline_kv_pages_free": 128 - n})) as url:
        document = fuzz(url, 30, seed=4)
    assert document["before"] == {"paceline_kv_pages_free": 128.0}
    assert has_failed(document) and document["faults"] == {"not as before": 1}, document["faults"]


@pytest.mark.parametrize(
    ("bytes_each", "files_each", "faults"), [(0, 0, {}), (2**20, 0, {}), (2**24, 0, {"leak": 1}), (0, 4, {"leak": 1})]
)
def test_a_server_whose_memory_or_files_grow_with_the_requests_fails(bytes_each, files_each, faults) -> None:
    usage = {"paceline_host_kv_bytes": lambda n: 2**26, "paceline_open_files": lambda n: 50 + files_each * n}
    usage["paceline_resident_memory_bytes"] = lambda n: 2**30 + bytes_each * n
    with serve_app(metered(lambda n: {name: at(n) for name, at in usage.items()})) as url:
        document = fuzz(url, 60, seed=4)
    assert document["faults"] == faults, document["faults"]
    assert document["usage"]["after"]["paceline_open_files"] == 50 or files_each


def test_a_server_that_waits_for_heads_for_ever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.serve.fuzz_sockets.PATIENCE_S", 4.5)
    app = build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER))
    for http, faults in (("httptools", {"unfinished head was kept": 16}), (Connection, {})):
        with serve_app(app, http) as url:
            document = fuzz(url, 20, seed=4)
        assert document["faults"] == faults, document["faults"]
        assert {end_s is None for end_s in document["unfinished_s"].values()} == {bool(faults)}


def test_a_request_follows_from_the_seed_and_its_number() -> None:
    def sent(num_requests: int, **options: Any) -> list[bytes]:
        bodies: list[bytes] = []
        with serve_app(metered(lambda n: {}, bodies)) as url:
            fuzz(url, num_requests, concurrency=1, **options)
        return bodies

    whole = sent(60, seed=5)
    first, rest = sent(40, seed=5), sent(20, seed=5, skip=40)
    assert whole == first + rest and len(first) > 5 < len(rest)
    assert whole != sent(60, seed=6)


def test_a_run_that_is_cut_off_keeps_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cut_off(http: Any, number: int, request: Any, totals: FuzzTotals) -> None:
        if number == 9:
            await asyncio.sleep(60.0)
        if number == 30:
            signal.raise_signal(signal.SIGINT)
        await run_one(http, number, request, totals)

    monkeypatch.setattr("paceline.bench.serve.fuzz.run_one", cut_off)
    monkeypatch.setattr("paceline.bench.serve.fuzz.SOCKET_SHARE", 0.0)
    said = Console(file=io.StringIO(), width=200)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background lets it be ignored
    try:
        with serve_app(metered(lambda n: {})) as url, pytest.raises(KeyboardInterrupt):
            run_fuzz(FuzzOptions(url=url, num_requests=100, concurrency=4, skip=5, json=tmp_path / "fuzz.json"), said)
    finally:
        signal.signal(signal.SIGINT, before)
    document = json.loads((tmp_path / "fuzz.json").read_text())
    assert not document["is_complete"] and sum(document["statuses"].values()) > 20
    assert "--skip 9 --requests 96 goes on" in said.file.getvalue(), said.file.getvalue()  # type: ignore[attr-defined]


def test_bodies_are_the_schemas_own_unless_they_are_spoilt() -> None:
    schema = DOCUMENT["paths"]["/tokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    writer = BodyWriter(DOCUMENT, random.Random(0), spoilt=0.0)
    for _ in range(100):
        body = writer.value(schema)
        assert isinstance(body, dict) and ("prompt" in body or "messages" in body or len(body) < 8)


@pytest.mark.parametrize(
    ("status", "body", "has_deadline", "fault"),
    [
        (200, b"", False, None),
        (400, b"", False, None),
        (500, b"{}", False, "status 500"),
        (502, b"", False, "status 502"),
        (503, b'{"error": {"message": "later"}}', False, None),
        (503, b"later", False, "503 without a reason"),
        (503, b'{"error": {"message": ""}}', False, "503 without a reason"),
        (503, b"[]", False, "503 without a reason"),
        (504, b"", True, None),
        (504, b"", False, "status 504"),
    ],
)
def test_what_a_fault_is(status: int, body: bytes, has_deadline: bool, fault: str | None) -> None:
    assert fault_of(status, body, has_deadline=has_deadline) == fault


def test_a_server_that_is_not_there_or_says_nothing_of_itself_is_no_subject() -> None:
    with pytest.raises(PacelineError, match="openapi"):
        fuzz("http://127.0.0.1:9", 1)
    with serve_app(FastAPI(openapi_url=None)) as url, pytest.raises(PacelineError, match="openapi"):
        fuzz(url, 1)
