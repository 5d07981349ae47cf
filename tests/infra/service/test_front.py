"""The front over real HTTP: an application that says nothing ends in a refusal, and what it says goes through as it is."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from paceline.infra.service import front
from paceline.infra.service.front import LOST_RETRY_S, Front
from paceline.infra.service.presence import Presence
from paceline.machine import free_port

START = {"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"text/plain")]}


@contextmanager
def served(app: Any, **settings: Any) -> Iterator[str]:
    """The address of a front before an application."""
    server = uvicorn.Server(
        uvicorn.Config(Front(app, **settings), port=(port := free_port()), log_level="critical", lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10.0)


async def says_nothing(scope, receive, send):
    await receive()


async def fails(scope, receive, send):
    raise RuntimeError("ActorDiedError")


async def breaks_off(scope, receive, send):
    await send({**START, "status": 200})
    await send({"type": "http.response.body", "body": b"a part", "more_body": True})
    raise RuntimeError("ActorDiedError")


async def refuses(scope, receive, send):
    await send(START)
    await send({"type": "http.response.body", "body": b"mine"})


@pytest.mark.parametrize("app", [says_nothing, fails])
@pytest.mark.parametrize("body", [None, b"{}", b"x" * 200_000])
def test_a_request_whose_replica_is_lost_is_refused_with_a_time_to_try_again(app, body, monkeypatch):
    counted: list[dict[str, str]] = []
    monkeypatch.setattr(front.refusals(), "inc", lambda tags: counted.append(tags))
    with served(app) as url, httpx.Client(timeout=20) as client:
        for _ in range(2):
            answer = client.post(url, content=body)
            assert answer.status_code == 503 and answer.headers["retry-after"] == str(LOST_RETRY_S)
            assert answer.headers["content-type"] == "application/json"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "replica_lost") and "try again" in error[
                "message"
            ]
    assert counted == [{"code": "503"}] * 2


def test_an_answer_that_has_begun_breaks_off_and_one_of_the_application_stays_as_it_is():
    with served(breaks_off) as url, pytest.raises(httpx.RemoteProtocolError):
        httpx.get(url, timeout=20)
    with served(refuses) as url:
        answer = httpx.get(url, timeout=20)
    assert (answer.status_code, answer.text, "retry-after" in answer.headers) == (503, "mine", False)


@pytest.mark.parametrize("kind", [b"text/plain; charset=utf-8", b"application/json"])
def test_what_serve_refuses_in_a_bare_line_is_said_as_the_api_says_it(kind):
    """A router that is full answers before a replica could."""

    async def is_full(scope, receive, send):
        headers = [(b"Content-Type", kind), (b"retry-after", b"7")]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        for part in (b"Request dropped", b" due to backpressure"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    with served(is_full) as url, httpx.Client(timeout=20) as client:
        for _ in range(2):
            answer = client.post(url, content=b"{}")
            assert answer.status_code == 429
            if kind == b"application/json":
                assert answer.text == "Request dropped due to backpressure" and answer.headers["retry-after"] == "7"
            else:
                assert answer.json()["error"] | {"message": ""} == {
                    "message": "", "type": "rate_limit_error", "param": None, "code": "queue_full"
                } and answer.headers["retry-after"] == "1"  # fmt: skip


def test_a_body_that_comes_too_slowly_is_refused_by_its_code():
    with served(says_nothing, body_grace_s=0.1) as url:
        begun = time.monotonic()

        def trickle() -> Iterator[bytes]:
            while time.monotonic() < begun + 20:
                yield b" "
                time.sleep(0.05)

        answer = httpx.post(url, content=trickle(), timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "slow_body")


class Own(Presence):
    """Knows one application with an engine, behind /own, and one without at the root."""

    def __init__(self) -> None:
        super().__init__()
        self._routes = {"/own": False, "": None}


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_no_replica_would_take_is_refused_while_the_request_waits_for_one(is_chunked):
    """Serve's proxy reads on and keeps all of it meanwhile."""
    num_read = 0

    async def reads_on(scope, receive, send):
        nonlocal num_read
        while (message := await receive())["type"] != "http.disconnect" and message.get("more_body"):
            num_read += len(message["body"])
        if scope["path"] == "/":
            await refuses(scope, receive, send)

    part = b"x" * 2**20
    content = (part for _ in range(11)) if is_chunked else part * 11
    with served(reads_on, presence=Own()) as url, httpx.Client(timeout=20) as client:
        with contextlib.suppress(httpx.WriteError):  # it is told and cut off in the midst of the rest
            answer = client.post(f"{url}/own/v1/completions", content=content)
            assert answer.status_code == 413 and "8388608" in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert num_read <= 8 * 2**20 and (num_read == 0) == (not is_chunked)
        assert client.post(url, content=part * 11).text == "mine", "another application's limits are its own"


def test_nothing_is_said_to_a_client_that_is_gone():
    sent: list[dict[str, Any]] = []

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def keep(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/", "headers": []}
    asyncio.run(Front(says_nothing)(scope, gone, keep))
    assert sent == []
