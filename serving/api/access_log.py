"""Access log: one line for each HTTP request and its end, never its text; and what is counted of them all.

The middleware makes a record when a request comes in, the handlers fill it, and the line is written once the response has
ended: nothing is logged between two rounds of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request

from paceline.contracts import AnswerTimes, HttpMeters
from paceline.serving.sampling.request import RequestStats, RoundEvent
from paceline.serving.wire.exchange import CUT

log = logging.getLogger("paceline.access")

_ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize",
)  # fmt: skip


@dataclass(slots=True)
class AccessRecord:
    """What is known of one HTTP request so far; times are seconds of the middleware's timer."""

    method: str
    route: str
    start_s: float
    timer: Callable[[], float] = time.perf_counter
    meters: HttpMeters = field(default_factory=HttpMeters)
    status: int | None = None
    """Of the response; None while none was begun."""
    request_id: str = ""
    """The client's x-request-id, or one made for it."""
    answer_id: str = ""
    """Of the answer, made here: what the engine, traces and statistics know the request by."""
    labels: dict[str, Any] = field(default_factory=dict)
    """bucket, group, tenant, priority, n, stream."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_s: float | None = None
    """When the first tokens came."""
    finish_reasons: list[str] = field(default_factory=list)
    stats: list[RequestStats] = field(default_factory=list)
    """The last known of each choice."""
    error: str | None = None
    """Code of the error that the client was told."""
    is_disconnected: bool = False
    """The client hung up before the answer was complete."""
    traceparent: str = ""
    """W3C trace context of its span, for those of its engine requests; '' = it has none."""

    _times: AnswerTimes | None = None
    _latest_s: dict[str, float] = field(default_factory=dict)
    """Engine request -> when its latest chunk came."""

    @property
    def code(self) -> int:
        """Of the response, or what stands for it where the client got none."""
        return self.status if self.status is not None else 499 if self.is_disconnected else 500

    def note_chunk(self, event: RoundEvent) -> None:
        """Time a chunk when the event loop gets it, whenever the client reads it."""
        if not event.token_ids:
            return
        now_s, times = self.timer(), self._times
        if times is None:
            times = self._times = self.meters.times(bool(self.labels.get("stream")))
            self.first_s = now_s
            times.first_token.observe(now_s - self.start_s)
        before_s = self._latest_s.get(event.request_id)
        if before_s is not None:
            num_tokens = len(event.token_ids)
            times.per_token.observe((now_s - before_s) / num_tokens, num_tokens)
        self._latest_s[event.request_id] = now_s

    def close(self) -> None:
        """Count the response, which has ended."""
        is_cut = self.error is not None or self.is_disconnected
        if self._times is not None and not is_cut and self.code < 400:
            self._times.whole.observe(self.timer() - self.start_s)
        self.meters.count(self.route, self.code, self.error is not None and self.code < 400)

    def fields(self) -> dict[str, Any]:
        """The line as plain values; what is not known is left out."""
        stats = self.stats
        num_rounds = sum(s.num_rounds for s in stats)
        accepted = sum(s.num_accepted_tokens for s in stats)
        values: dict[str, Any] = {
            "request_id": self.request_id or None,
            "answer_id": self.answer_id or None,
            "method": self.method,
            "route": self.route,
            "status": self.code,
            **self.labels,
            "bucket": ",".join(sorted({s.bucket for s in stats})) if stats else self.labels.get("bucket"),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": min((s.num_cached_tokens for s in stats), default=None),
            "ttft_ms": None if self.first_s is None else round((self.first_s - self.start_s) * 1e3, 3),
            "duration_ms": round((self.timer() - self.start_s) * 1e3, 3),
            "finish_reason": ",".join(sorted(set(self.finish_reasons))) or None,
            "drafter_version": ",".join(sorted({s.drafter_version for s in stats})) if stats else None,
            "acceptance_length": round(accepted / num_rounds + 1, 4) if num_rounds else None,
            "error": self.error,
            "disconnected": self.is_disconnected or None,
        }
        return {k: v for k, v in values.items() if v is not None}


class HttpSpan(Protocol):
    """The span of an HTTP request that is under way; '' as its traceparent: it is not sampled."""

    traceparent: str

    def end(self, record: AccessRecord) -> None:
        """The response has ended; must not block."""


class HttpSpans(Protocol):
    """Makes a span of each request; must not block."""

    def begin(self, record: AccessRecord, headers: Sequence[tuple[bytes, bytes]]) -> HttpSpan: ...


class AccessLog:
    """ASGI middleware: counts each request to the routes that clients use; a line on the logger `paceline.access`; a span."""

    def __init__(
        self, app: Any, timer: Callable[[], float] = time.perf_counter, *, meters: HttpMeters, is_written: bool = True,
        spans: HttpSpans | None = None,
    ) -> None:  # fmt: skip
        """is_written: False: nothing is logged. spans: None: none are made."""
        self._app, self._timer, self._meters, self._is_written = app, timer, meters, is_written
        self._spans = spans

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(_ROUTES):
            await self._app(scope, receive, send)
            return
        route = next(r for r in reversed(_ROUTES) if scope["path"].endswith(r))  # the path itself is the client's text
        record = AccessRecord(scope["method"], route, self._timer(), self._timer, self._meters)
        scope.setdefault("state", {})["access"] = record
        span = None if self._spans is None else self._spans.begin(record, scope["headers"])
        record.traceparent = "" if span is None else span.traceparent

        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # as Serve does with a request whose client is gone
            record.is_disconnected = True
            raise
        finally:
            record.error = record.error or scope["state"].get(CUT)
            record.close()
            if span is not None:
                span.end(record)
            if self._is_written:
                log.info("request", extra={"fields": record.fields()})


def access_record(request: Request) -> AccessRecord:
    """The record of a request; one that nobody reads on routes that are not counted."""
    record = getattr(request.state, "access", None)
    if record is None:
        record = request.state.access = AccessRecord(request.method, request.url.path, time.perf_counter())
    return record
