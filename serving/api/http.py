"""HTTP basics: visits begin, bodies are read, errors answered, and a full queue told when to try again."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.config import MAX_BODY_BYTES
from paceline.errors import CapacityError, EngineStoppedError, RequestError
from paceline.serving.api.access_log import access_record
from paceline.serving.api.generation import Cutoff, Expired, Hangup
from paceline.serving.wire.accounts import Clients, Visit
from paceline.serving.wire.exchange import VISIT
from paceline.serving.wire.format import error_body, to_json

log = logging.getLogger(__name__)

_CODES = {401: "invalid_api_key", 403: "not_allowed", 404: "not_found", 408: "slow_body", 503: "unavailable"}
_DRAIN_RETRY_S = 2
"""A replica that shuts down or has failed is replaced, or others take its requests, within seconds."""


class QueueFull(CapacityError):
    """The engine's queue is full, with an estimate of when it will not be."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def visit_of(request: Request) -> Visit:
    """The visit that a locked route's check has begun."""
    return getattr(request.state, VISIT)


async def read_body(request: Request, max_bytes: int | None = None) -> bytes:
    """The body of a request; raises HTTPException 413 above max_bytes, Hangup when the client goes before its end.

    max_bytes: None = what the client's limits allow.
    """
    if max_bytes is None:
        visit = getattr(request.state, VISIT, None)
        max_bytes = MAX_BODY_BYTES if visit is None else visit.account.limits.max_body_bytes
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise HTTPException(413, f"the body must be at most {max_bytes} bytes")
            chunks.append(chunk)
    except ClientDisconnect as e:
        access_record(request).is_disconnected = True
        raise Hangup("the client closed the connection before the body was complete") from e
    return b"".join(chunks)


def on_loop(check: Callable[[Request], None]) -> Callable[[Request], Awaitable[None]]:
    """A check that does no I/O as a coroutine: FastAPI would send a plain function through its thread pool."""

    async def checked(request: Request) -> None:
        check(request)

    return checked


def enter(clients: Clients) -> Callable[[Request], None]:
    """A check that begins a request's visit; raises HTTPException 401 or 403, CapacityError beyond the client's limits."""

    def check(request: Request) -> None:
        setattr(request.state, VISIT, clients.enter(request))

    return check


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    return Response(to_json(body), status_code=status, media_type="application/json")


def answer_errors(app: FastAPI, *, sends_request_id: bool = False) -> None:
    """Have an application answer every error with OpenAI's error object; only errors raised on purpose show their message."""

    async def answer(request: Request, error: Exception) -> Response:
        record = access_record(request)
        headers: dict[str, str] = {}
        param, code = getattr(error, "param", None), getattr(error, "code", None)
        if isinstance(error, RequestError):
            status, kind = 400, "invalid_request_error"
        elif isinstance(error, CapacityError):
            status, kind, code = 429, "rate_limit_error", getattr(error, "code", "queue_full")
            headers = {"Retry-After": str(getattr(error, "retry_after_s", 1))}
        elif isinstance(error, EngineStoppedError):
            status, kind, code = 503, "server_error", "unavailable"
            headers = {"Retry-After": str(_DRAIN_RETRY_S)}
        elif isinstance(error, Expired):
            status, kind, code = error.status, error.kind, error.code
            headers = {"x-should-retry": "false"}  # OpenAI's clients would send it again, with the same time limit
        elif isinstance(error, Cutoff):
            status, kind, code = error.status, error.kind, error.code
            headers = {"Retry-After": str(_DRAIN_RETRY_S)} if status >= 500 else {}
        elif isinstance(error, HTTPException):
            status, headers = error.status_code, dict(error.headers or {})
            kind = "invalid_request_error" if status < 500 else "server_error"
            code = code or _CODES.get(status)
        elif isinstance(error, RequestValidationError):
            status, kind, param = 400, "invalid_request_error", str(error.errors()[0]["loc"][-1])
            error = RequestError(f"{param}: {error.errors()[0]['msg']}")
        else:
            log.error("request %s to %s failed", record.request_id, record.route, exc_info=error)
            status, kind, code = 500, "server_error", "internal_error"
        message = "internal error; see the server's log" if status == 500 else str(getattr(error, "detail", error))
        if sends_request_id and record.request_id:
            headers["x-request-id"] = record.request_id
        record.error = code or kind
        response = json_response(error_body(message, kind=kind, param=param, code=code), status)
        response.headers.update(headers)
        return response

    for kind in (
        RequestError, RequestValidationError, CapacityError, EngineStoppedError, Cutoff, HTTPException, Exception,
    ):  # fmt: skip
        app.add_exception_handler(kind, answer)


WINDOW_S = 60.0
"""How far back finished requests are looked at."""
MAX_RETRY_S = 30
"""Longest wait that is asked for, also where nothing finished within the window."""


class FinishRate:
    """The rate at which a replica finishes requests. One event loop only."""

    def __init__(self, timer: Callable[[], float] = time.monotonic, max_kept: int = 256) -> None:
        """timer: seconds; max_kept: finishes remembered, the newest."""
        self._timer = timer
        self._finished_s: deque[float] = deque(maxlen=max_kept)

    def note(self) -> None:
        """A request has finished."""
        self._finished_s.append(self._timer())

    def retry_after_s(self, num_waiting: int) -> int:
        """Seconds until the queue as it stands should be served, in [1, MAX_RETRY_S].

        That is num_waiting over the rate of the finishes in the window, counted from the oldest one to now.
        """
        now = self._timer()
        while self._finished_s and now - self._finished_s[0] > WINDOW_S:
            self._finished_s.popleft()
        if num_waiting == 0:
            return 1
        if not self._finished_s:
            return MAX_RETRY_S
        seconds_each = (now - self._finished_s[0]) / len(self._finished_s)
        return min(max(math.ceil(num_waiting * seconds_each), 1), MAX_RETRY_S)
