"""Front: what Serve's proxy does with a request before it takes a place of a replica, and how long it waits for readers.

Serve gives a request to a replica at its first byte and reads the answer's last one from it, so that clients who send or
read nothing would hold the replica's places. The proxy imports this module by PROXY_VARIABLE, which must stand in the
environment of Ray's processes: `paceline serve` sets it, ray_cluster.yaml and the manifests for Kubernetes do.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from ray.util.metrics import Counter
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from paceline.config import MAX_BODY_BYTES
from paceline.infra.replica.late_timers import StepWatch
from paceline.infra.service.presence import Presence
from paceline.names import REQUEST_ID_RULE, is_request_id
from paceline.serving.wire.exchange import (
    BODY_GRACE_S,
    WRITE_S,
    AsgiMessage,
    AsgiReceive,
    AsgiScope,
    AsgiSend,
    BodyClock,
    send_in_time,
)
from paceline.serving.wire.format import error_body, to_json

log = logging.getLogger(__name__)

PROXY_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_CALLBACK = "paceline.infra.service.front.middlewares"
HELD_BYTES = 64 * 1024
"""Part of a body that waits in the proxy: most bodies are whole by then, and a thousand connections hold 64 MiB."""
GAP_RETRY_S = 5
"""When clients may try again while no replica runs: short against the start of a target, long against a refusal."""
LOST_RETRY_S = 1
"""When clients may try again whose replica was lost: the others take requests at once."""
REFUSALS = "paceline_refusals"
_CODES = {408: "slow_body", 503: "no_replica"}
_OF_SERVE = "/-/"
_STEERING = (
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"x-session-id",
    b"serve-multiplexed-model-id",
)
"""Headers by which clients would tell Serve how long and where to run; nobody in front of us needs them."""


class Front:
    """ASGI middleware of Serve's proxy, the outermost one."""

    def __init__(
        self,
        app: Any,
        *,
        presence: Presence | None = None,
        body_grace_s: float = BODY_GRACE_S,
        write_s: float = WRITE_S,
    ) -> None:
        """presence: says that no replica takes requests, which are refused then; None = they always wait for one."""
        self._app, self._body_grace_s, self._write_s = app, body_grace_s, write_s
        self._presence = presence or Presence()

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope["headers"] = checked_headers(scope["headers"])
            if not scope["path"].startswith(_OF_SERVE) and await self._presence.is_gone(scope["path"]):
                raise HTTPException(
                    503, "no replica runs now, one starts; try again", {"Retry-After": str(GAP_RETRY_S)}
                )
            if int(dict(scope["headers"]).get(b"content-length", 0)) > self._max_bytes(scope):
                raise _too_large()
            held = await self._held(scope, receive)
        except HTTPException as e:
            await _refuse(send, e)
            return
        if held is None:  # the client is gone
            return

        has_begun = is_gone = is_full = is_large = False
        num_left = self._max_bytes(scope)

        async def receive_held() -> AsgiMessage:
            # Serve reads on and keeps all of it while a request waits for a replica, which would refuse a large one.
            nonlocal is_gone, is_large, num_left
            message = held.pop(0) if held else await receive()
            num_left -= len(message.get("body", b""))
            if num_left < 0:
                is_large, message = True, {"type": "http.disconnect"}
            is_gone = is_gone or message["type"] == "http.disconnect"
            return message

        async def send_to_reader(message: AsgiMessage) -> None:
            nonlocal has_begun, is_full
            has_begun = True
            if message["type"] == "http.response.start" and message["status"] == 429:  # Serve's own is a bare line
                is_full = _content_type(message) != b"application/json"
                if is_full:
                    full = HTTPException(429, "all places are taken; try again", {"Retry-After": "1"})
                    await _refuse(send, full, "queue_full")
            if not is_full:
                await send_in_time(send, message, self._write_s, scope.get("client"))

        try:
            await self._app(scope, receive_held, send_to_reader)
        except Exception as e:
            if has_begun or (is_gone and not is_large):  # the answer breaks off, or nobody waits for one
                raise
            log.warning("a request ended without an answer: %r", e)
        if not has_begun and is_large:
            await _refuse(send, _too_large())
        elif not has_begun and not is_gone:  # Serve says nothing where a replica is lost, and uvicorn a plain 500
            lost = HTTPException(
                503, "the replica of this request is lost; try again", {"Retry-After": str(LOST_RETRY_S)}
            )
            await _refuse(send, lost, "replica_lost")

    def _max_bytes(self, scope: AsgiScope) -> float:
        """Of a body; other applications of the cluster have their own limits."""
        return MAX_BODY_BYTES if self._presence.is_own(scope["path"]) else math.inf

    async def _held(self, scope: AsgiScope, receive: AsgiReceive) -> list[AsgiMessage] | None:
        """The body's first messages: all of it, or HELD_BYTES. Raises: HTTPException 408 when they do not come in time."""
        held: list[AsgiMessage] = []
        if not any(k in (b"content-length", b"transfer-encoding") for k, _ in scope["headers"]):
            return held
        clock, num_bytes, is_whole = BodyClock(self._body_grace_s), 0, False
        while not is_whole and num_bytes < HELD_BYTES:  # the rest is the replica's, which has deadlines of its own
            try:
                message = await clock.receive(receive)
            except TimeoutError:
                raise HTTPException(408, clock.reason) from None
            if message["type"] == "http.disconnect":
                return None
            held.append(message)
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
        return held


def checked_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that go on to Serve, which reads the request's id as text. Raises: HTTPException 400."""
    for name, value in headers:
        if name == b"x-request-id" and not is_request_id(value.decode("latin-1")):
            raise HTTPException(400, f"x-request-id {REQUEST_ID_RULE}")
    return [
        (k, v) for k, v in headers if k.replace(b"_", b"-") not in _STEERING and not k.startswith(b"x-serve-router-")
    ]


@functools.cache
def refusals() -> Counter:
    """What the front of this process answered instead of a replica, by status; Ray's metrics have it."""
    return Counter(REFUSALS, description="Requests that the proxy's guard answered", tag_keys=("code",))


def _content_type(message: AsgiMessage) -> bytes:
    """Of an answer's first message, without its parameters."""
    found = next((v for k, v in message.get("headers", ()) if k.lower() == b"content-type"), b"")
    return bytes(found).partition(b";")[0].strip().lower()


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body must be at most {MAX_BODY_BYTES} bytes")


async def _refuse(send: AsgiSend, error: HTTPException, code: str | None = None) -> None:
    """code: None = the one of _CODES, if there is one."""
    refusals().inc(tags={"code": str(error.status_code)})
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    if error.status_code == 429:
        kind = "rate_limit_error"
    body = to_json(error_body(error.detail, kind=kind, code=code or _CODES.get(error.status_code)))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *((k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items()),
    ]
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def middlewares() -> list[Middleware]:
    """What Serve's proxy wraps its application in; from then on uvicorn servers of its process have our connections."""
    from uvicorn.config import HTTP_PROTOCOLS

    from paceline.infra.service.connections import Connection

    HTTP_PROTOCOLS["auto"] = f"{Connection.__module__}:{Connection.__qualname__}"  # Serve lets nobody choose a protocol
    StepWatch().start()
    return [Middleware(Front, presence=Presence().start())]
