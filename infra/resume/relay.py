"""HTTP relay: the process in front lets an engine's process answer a request for state, metrics, dashboard or commands.

The request crosses whole, headers and peer included, so that the routes behind check tokens as if it had come to them;
the answer comes back in parts as it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from paceline.infra.resume.client import ItemStream
from paceline.serving.api.http import read_body

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024
MAX_PARTS = 16
"""Parts of an answer that wait for their reader."""
NUM_TRIES = 2
"""Replicas that a request without a body is sent to, when the first dies before it answers."""
PREFIXES = ("/paceline", "/dashboard")
_HOP_HEADERS = frozenset({b"transfer-encoding", b"connection"})


class HttpRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request as it crosses."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    root_path: str = ""
    """Part of `path` that the service's routes are below."""


class HttpPart(msgspec.Struct, array_like=True, frozen=True):
    """The head of an answer (status > 0) or a piece of its body."""

    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(HttpRequest).decode
_decode_part = msgspec.msgpack.Decoder(HttpPart).decode


async def answer_http(app: Any, raw: bytes) -> AsyncGenerator[bytes, None]:
    """Run an ASGI application on an encoded HttpRequest and yield encoded HttpParts, the head first."""
    request = _decode_request(raw)
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": request.method,
        "path": request.path, "raw_path": request.path.encode(), "query_string": request.query,
        "root_path": request.root_path,
        "headers": list(request.headers), "client": request.client, "server": None, "state": {},
    }  # fmt: skip
    parts: asyncio.Queue[HttpPart | None] = asyncio.Queue(MAX_PARTS)
    is_read = False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:  # the reader's leaving cancels the task
            await asyncio.get_running_loop().create_future()
        is_read = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await parts.put(HttpPart(message["status"], tuple((bytes(k), bytes(v)) for k, v in message["headers"])))
        elif message.get("body"):
            await parts.put(HttpPart(body=bytes(message["body"])))

    async def run() -> None:
        try:
            await app(scope, receive, send)
        except Exception:  # FastAPI has answered 500 by now
            log.exception("%s %s failed", request.method, request.path)
        await parts.put(None)

    task = asyncio.ensure_future(run())
    try:
        while (part := await parts.get()) is not None:
            yield _encode(part)
    finally:
        task.cancel()


def relay_router(open_stream: Callable[[bytes], ItemStream], own_metrics: Callable[[], bytes]) -> APIRouter:
    """Routes that some engine answers: /metrics and everything below /paceline and /dashboard.

    own_metrics: what this process appends to an engine's metrics, in the same format; may block.
    """

    async def relay(request: Request) -> Response:
        return await _relay(request, open_stream)

    async def metrics(request: Request) -> Response:
        response = await _relay(request, open_stream)
        if response.status_code != 200:
            return response
        try:
            body = b"".join([part async for part in response.body_iterator])  # type: ignore[misc]
        except Exception as e:  # the replica ended behind the head
            log.warning("/metrics: no replica answered to the end: %s", type(e).__name__)
            raise _nobody() from e
        return Response(body + await asyncio.to_thread(own_metrics), media_type=response.headers["content-type"])

    router = APIRouter()
    router.add_api_route("/metrics", metrics, methods=["GET"])
    for path in (*PREFIXES, *(f"{prefix}/{{rest:path}}" for prefix in PREFIXES)):
        router.add_api_route(path, relay, methods=["GET", "POST"], response_model=None)
    return router


async def _relay(request: Request, open_stream: Callable[[bytes], ItemStream]) -> StreamingResponse:
    body = await read_body(request, MAX_BODY_BYTES)
    client = request.client
    raw = _encode(
        HttpRequest(
            request.method, request.scope["path"], request.scope.get("query_string", b""), tuple(request.scope["headers"]),
            None if client is None else (client.host, client.port), body, request.scope.get("root_path", ""),
        )
    )  # fmt: skip
    for left in reversed(range(1 if request.method == "POST" else NUM_TRIES)):  # a command is not carried out twice
        stream = open_stream(raw)
        try:
            head = _decode_part(await anext(stream))  # type: ignore[arg-type]
            break
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except Exception as e:
            log.warning("%s %r: no replica answered: %s", request.method, request.url.path, type(e).__name__)
            if not left:
                raise _nobody() from e
    response = StreamingResponse(_bodies(stream), head.status)
    response.raw_headers = [h for h in head.headers if h[0].lower() not in _HOP_HEADERS]
    return response


def _nobody() -> HTTPException:
    return HTTPException(503, "no replica answers; try again", {"Retry-After": "2"})


async def _bodies(stream: ItemStream) -> AsyncIterator[bytes]:
    is_over = False
    try:
        while True:
            try:
                part = _decode_part(await anext(stream))  # type: ignore[arg-type]
            except StopAsyncIteration:
                is_over = True
                return
            yield part.body
    finally:
        if not is_over:
            with contextlib.suppress(Exception):
                stream.cancel()
