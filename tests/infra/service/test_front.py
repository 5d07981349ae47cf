"""What Serve says by itself reaches clients as the service's own refusal."""

import asyncio
import json

import pytest

from paceline.infra.service.front import Front


async def answer(status, headers, path="/v1/completions"):
    """What a client gets of an application behind the front."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"Internal Server ", "more_body": True})
        await send({"type": "http.response.body", "body": b"Error"})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [], "method": "POST", "client": ("127.0.0.1", 1)}
    await Front(app)(scope, None, send)
    return sent[0], b"".join(m.get("body", b"") for m in sent[1:])


@pytest.mark.parametrize("status", [500, 502, 503])
def test_serves_plain_text_for_a_lost_replica_becomes_an_error_that_says_what_to_do(status):
    start, body = asyncio.run(answer(status, [(b"Content-Type", b"text/plain")]))
    error = json.loads(body)["error"]
    assert start["status"] == 503 and dict(start["headers"])[b"retry-after"] == b"1"
    assert error["code"] == "incomplete" and "send it again" in error["message"]


@pytest.mark.parametrize(
    ("status", "headers", "path"),
    [
        (500, [(b"content-type", b"application/json; charset=utf-8")], "/v1/completions"),
        (404, [(b"content-type", b"text/plain")], "/v1/completions"),
        (200, [], "/v1/completions"),
        (503, [(b"content-type", b"text/plain")], "/-/healthz"),
    ],
)
def test_every_other_answer_passes_as_it_is(status, headers, path):
    start, body = asyncio.run(answer(status, headers, path))
    assert (start["status"], start["headers"], body) == (status, headers, b"Internal Server Error")
