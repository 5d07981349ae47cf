"""What an engine's process answers reaches the client unchanged through the process in front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from paceline.infra.resume.relay import answer_http, relay_router
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, below, serve_app, wait_until


class Behind:
    """The application of an engine, and a way to it that may be dead."""

    def __init__(self) -> None:
        self.app = app = FastAPI()
        self.num_dead = self.num_opened = 0
        self.is_left = False

        @app.api_route("/paceline/echo", methods=["GET", "POST"])
        async def echo(request: Request) -> dict[str, Any]:
            client = request.client
            return {
                "method": request.method, "query": str(request.query_params), "x": request.headers.get("x-some"),
                "host": request.headers["host"], "peer": client and client.host, "body": (await request.body()).decode(),
            }  # fmt: skip

        @app.get("/dashboard")
        async def page() -> Response:
            headers = {"content-security-policy": "none", "etag": '"1"'}
            return Response("größe".encode(), media_type="text/html; charset=utf-8", headers=headers)

        @app.get("/dashboard/unchanged")
        async def unchanged() -> Response:
            return Response(status_code=304, headers={"etag": '"1"'})

        @app.get("/dashboard/events")
        async def events() -> Response:
            async def forever() -> AsyncIterator[bytes]:
                try:
                    while True:
                        yield b"data: 1\n\n"
                        await asyncio.sleep(0.01)
                finally:
                    self.is_left = True

            return StreamingResponse(forever(), media_type="text/event-stream")

        @app.get("/paceline/refused")
        async def refused() -> Response:
            raise HTTPException(403, "not you", {"x-why": "because"})

        @app.get("/paceline/broken")
        async def broken() -> Response:
            raise RuntimeError("oops")

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(b"engine 1\n", media_type="text/plain; version=0.0.4; charset=utf-8")

    def open(self, raw: bytes) -> Parts:
        self.num_opened += 1
        is_dead, self.num_dead = self.num_dead > 0, max(self.num_dead - 1, 0)
        return Parts(None if is_dead else answer_http(self.app, raw))


class Parts:
    def __init__(self, parts: Any) -> None:
        self.parts = parts

    async def __anext__(self) -> bytes:
        if self.parts is None:
            raise ConnectionError("the replica died")
        return await anext(self.parts)

    def cancel(self) -> None:
        if self.parts is not None:
            asyncio.get_running_loop().create_task(self.parts.aclose())


@pytest.fixture
def behind() -> Behind:
    return Behind()


@pytest.fixture(params=["", "/below/it"])
def http(behind: Behind, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    router = relay_router(behind.open, lambda: b"ingress 2\n")
    parts = ApiParts(
        client=ScriptedEngine(),
        tokenizer=TOKENIZER,
        open_routers=(router,),
        clients=Clients(Tokens(api_token="secret")),
    )
    app = below(request.param, build_api(parts))
    with serve_app(app) as url, httpx.Client(base_url=f"{url}{request.param}") as client:
        yield client


def test_requests_cross_with_peer_headers_query_and_body(http: httpx.Client) -> None:
    got = http.post("/paceline/echo?a=1&b=%C3%BC", content="körper".encode(), headers={"x-some": "thing", "host": "h"})
    assert got.json() == {
        "method": "POST", "query": "a=1&b=%C3%BC", "x": "thing", "host": "h", "peer": "127.0.0.1", "body": "körper",
    }  # fmt: skip


def test_answers_cross_with_status_and_headers(http: httpx.Client) -> None:
    page = http.get("/dashboard")
    assert page.text == "größe" and page.headers["content-security-policy"] == "none"
    assert page.headers["content-length"] == str(len("größe".encode())) and page.headers["etag"] == '"1"'
    assert http.get("/dashboard/unchanged").status_code == 304
    refused = http.get("/paceline/refused")
    assert (refused.status_code, refused.headers["x-why"], refused.json()) == (403, "because", {"detail": "not you"})
    assert http.get("/paceline/broken").status_code == 500
    assert http.get("/paceline/nowhere").status_code == 404


def test_metrics_of_the_engine_come_with_those_of_the_ingress(http: httpx.Client, behind: Behind) -> None:
    got = http.get("/metrics")
    assert got.text == "engine 1\ningress 2\n" and got.headers["content-type"].startswith("text/plain; version=0.0.4")
    behind.num_dead = 99
    refused = http.get("/metrics")
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (503, "server_error", "unavailable")


def test_only_state_routes_are_relayed(http: httpx.Client, behind: Behind) -> None:
    assert http.get("/healthz").json()["status"] == "ok"
    assert http.get("/v1/models").status_code == 401  # the ingress' own rule
    assert http.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
    assert behind.num_opened == 0


def test_another_replica_is_asked_but_a_command_is_not_repeated(http: httpx.Client, behind: Behind) -> None:
    behind.num_dead = 1
    assert http.get("/paceline/echo").status_code == 200
    behind.num_dead = 1
    failed = http.post("/paceline/echo")
    assert failed.status_code == 503 and failed.headers["retry-after"] == "2"
    assert behind.num_opened == 3


def test_a_large_body_is_refused_here(http: httpx.Client, behind: Behind) -> None:
    assert http.post("/paceline/echo", content=b"x" * 300_000).status_code == 413
    assert behind.num_opened == 0


def test_a_reader_that_leaves_a_stream_ends_it_behind(http: httpx.Client, behind: Behind) -> None:
    with http.stream("GET", "/dashboard/events") as events:
        assert next(events.iter_lines()) == "data: 1"
    wait_until(lambda: behind.is_left)
