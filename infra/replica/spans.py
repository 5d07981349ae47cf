"""Spans: what OpenTelemetry is told of requests and of the control plane's deeds; never text of a prompt or an answer.

A request has a span of its HTTP exchange, and below it one for each engine request with the phases queue, prefill and
decode. A thread of their own writes them once they are over; those of the engine are made of times that it noted. Names
follow OpenTelemetry's conventions and, where those have none, vLLM's; what only Paceline has begins with `paceline.`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline.infra.replica.span_export import SpanCounts, SpanExport
from paceline.infra.replica.span_target import SpanTarget
from paceline.machine import Clock, SystemClock
from paceline.names import without_tenants
from paceline.serving.api.access_log import AccessRecord
from paceline.serving.engine.output import EndedRequest

logger = logging.getLogger(__name__)

REQUEST_SPAN = "llm_request"
_W3C = TraceContextTextMapPropagator()
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_OF_RECORD = {
    "method": "http.request.method", "route": "http.route", "status": "http.response.status_code",
    "request_id": "paceline.request_id", "answer_id": "gen_ai.request.id", "n": "gen_ai.request.n",
    "stream": "paceline.stream", "priority": "paceline.priority", "bucket": "paceline.bucket", "group": "paceline.group",
    "prompt_tokens": "gen_ai.usage.prompt_tokens", "completion_tokens": "gen_ai.usage.completion_tokens",
    "cached_tokens": "paceline.num_cached_tokens", "drafter_version": "paceline.drafter_version",
    "acceptance_length": "paceline.acceptance_length", "error": "error.type", "disconnected": "paceline.disconnected",
}  # fmt: skip
"""Field of the access log's line -> attribute; the tenant's name is not among them, nor in that of a bucket of its own."""
_MAX_WAITING = 4096
"""HTTP and engine requests that have ended and wait for their spans: 4 s of 500 requests a second."""
_NUM_ENGINE_SPANS = 4
"""Of an engine request, with those of its phases."""
_CLOSE_S = 1.0


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _of_nobody(value: Any) -> Any:
    """A value, of a text or texts without names of tenants."""
    if isinstance(value, list):
        return [_of_nobody(each) for each in value]
    return without_tenants(value) if isinstance(value, str) else value


class SpanWriter:
    """A thread that writes spans which are over, so that neither event loop nor engine does; its queue is bounded."""

    def __init__(self, counts: SpanCounts) -> None:
        """counts: where spans count as dropped that find no room or cannot be written."""
        self._counts = counts
        self._waiting: queue.Queue[tuple[Callable[[], None], int] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, write: Callable[[], None], num_spans: int) -> None:
        """Have `write` make so many spans soon. From any thread; never blocks."""
        try:
            self._waiting.put_nowait((write, num_spans))
        except queue.Full:
            self._counts.drop(num_spans)

    def close(self) -> None:
        """Write what waits, for a second at most."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            write, num_spans = item
            try:
                write()
            except Exception:  # the next ones must still be written
                self._counts.drop(num_spans)
                logger.exception("spans could not be written")


class _HttpSpan:
    """An HTTP request's span that is under way."""

    def __init__(self, span: Span, model: str, start_ns: int, writer: SpanWriter) -> None:
        self._span, self._model, self._start_ns, self._writer = span, model, start_ns, writer
        self.traceparent = ""
        if span.is_recording():
            carrier: dict[str, str] = {}
            _W3C.inject(carrier, set_span_in_context(span))
            self.traceparent = carrier["traceparent"]

    def end(self, record: AccessRecord) -> None:
        """The response has ended; the record does not change any more."""
        if self._span.is_recording():
            end_ns = self._start_ns + int((record.timer() - record.start_s) * 1e9)
            self._writer.put(lambda: self._write(record, end_ns), 1)

    def _write(self, record: AccessRecord, end_ns: int) -> None:
        span, fields = self._span, record.fields()
        fields["bucket"] = _of_nobody(fields.get("bucket"))
        span.set_attributes(_known({name: fields.get(field) for field, name in _OF_RECORD.items()}))
        span.set_attribute("gen_ai.response.model", self._model)
        if "finish_reason" in fields:
            span.set_attribute("gen_ai.response.finish_reasons", fields["finish_reason"].split(","))
        if "ttft_ms" in fields:
            span.set_attribute("gen_ai.latency.time_to_first_token", fields["ttft_ms"] / 1e3)
        if record.code >= 500 or (record.error is not None and record.code < 400):  # the latter: the stream broke off
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)


class HttpRequestSpans:
    """Spans of HTTP requests, each the child of the caller's span where that sends a `traceparent`. One event loop only."""

    def __init__(self, export: SpanExport, model: str, writer: SpanWriter) -> None:
        self._export, self._model, self._writer = export, model, writer

    def begin(self, record: AccessRecord, headers: Sequence[tuple[bytes, bytes]]) -> _HttpSpan:
        """The span of a request that has just come."""
        carrier = {k.decode(): v.decode("latin-1") for k, v in headers if k in _CONTEXT_HEADERS}
        start_ns = time.time_ns()
        span = self._export.tracer.start_span(
            f"{record.method} {record.route}",
            context=_W3C.extract(carrier, Context()),
            kind=SpanKind.SERVER,
            start_time=start_ns,
        )
        return _HttpSpan(span, self._model, start_ns, self._writer)


class EngineSpans:
    """Spans of engine requests."""

    def __init__(self, export: SpanExport, model: str, writer: SpanWriter, *, clock: Clock | None = None) -> None:
        """clock: the engine's."""
        self._export, self._model, self._writer, self._clock = export, model, writer, clock or SystemClock()

    def record_end(self, ended: EndedRequest) -> None:
        """Have the spans of an ended request made; never blocks."""
        self._writer.put(lambda: self.make(ended), _NUM_ENGINE_SPANS)

    def make(self, ended: EndedRequest) -> None:
        """The spans of one ended request."""
        offset_s = time.time() - self._clock.now()  # the engine's clock does not follow the steps of the wall clock

        def at(seconds: float) -> int:
            return int((seconds + offset_s) * 1e9)

        tracer = self._export.tracer
        span = tracer.start_span(
            REQUEST_SPAN,
            context=_W3C.extract({"traceparent": ended.request.traceparent}, Context()),
            kind=SpanKind.INTERNAL,
            start_time=at(ended.submitted_s),
            attributes=request_attributes(ended, self._model),
        )
        if not span.is_recording():
            return
        if ended.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for name, start_s, end_s in phases(ended):
            tracer.start_span(name, context=inside, start_time=at(start_s)).end(at(end_s))
        span.end(at(ended.ended_s))


def phases(ended: EndedRequest) -> list[tuple[str, float, float]]:
    """(name, start, end) of what an engine request went through, in the engine's seconds; a later one only if it came so far."""
    marks = [ended.submitted_s, ended.admitted_s, ended.first_token_s]
    found = []
    for name, start_s, next_s in zip(("queue", "prefill", "decode"), marks, [*marks[1:], None], strict=True):
        if start_s is not None:
            found.append((name, start_s, ended.ended_s if next_s is None else next_s))
    return found


def request_attributes(ended: EndedRequest, model: str) -> dict[str, Any]:
    """What the span of an engine request says; what did not come about is left out."""
    request, stats, start_s = ended.request, ended.stats, ended.submitted_s
    lengths_s = {name: end_s - begin_s for name, begin_s, end_s in phases(ended)}
    has_first = ended.first_token_s is not None
    return _known({
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": request.params.max_tokens,
        "gen_ai.request.temperature": request.params.temperature,
        "gen_ai.request.top_p": request.params.top_p,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [ended.finish_reason],
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.completion_tokens": stats.num_emitted_tokens,
        "gen_ai.latency.time_in_queue": lengths_s["queue"],
        "gen_ai.latency.time_to_first_token": ended.first_token_s - start_s if ended.first_token_s is not None else None,
        "gen_ai.latency.e2e": ended.ended_s - start_s,
        "gen_ai.latency.time_in_model_prefill": lengths_s.get("prefill") if has_first else None,
        "gen_ai.latency.time_in_model_decode": lengths_s.get("decode"),
        "gen_ai.latency.time_in_model_inference": None if ended.admitted_s is None else ended.ended_s - ended.admitted_s,
        "error.type": "error" if ended.finish_reason == "error" else None,
        "paceline.bucket": without_tenants(stats.bucket),
        "paceline.group": request.counted_group,
        "paceline.drafter_version": stats.drafter_version or None,
        "paceline.num_rounds": stats.num_rounds,
        "paceline.num_draft_tokens": stats.num_draft_tokens,
        "paceline.num_accepted_tokens": stats.num_accepted_tokens,
        "paceline.acceptance_length": stats.acceptance_length if stats.num_rounds else None,
        "paceline.draft_ms": stats.draft_ms,
        "paceline.verify_ms": stats.verify_ms,
        "paceline.round_ms": stats.round_ms,
        "paceline.num_cached_tokens": stats.num_cached_tokens,
        "paceline.num_resumed_tokens": len(request.resumed_token_ids) or None,
        "paceline.was_preempted": ended.was_preempted or None,
    })  # fmt: skip


class DeedSpans:
    """Spans of what the control plane does, each a trace of its own."""

    def __init__(self, export: SpanExport, model: str) -> None:
        self._export, self._model = export, model

    def record_deed(self, name: str, seconds: float, attributes: Mapping[str, Any]) -> None:
        """A deed that took so long and is over now; attributes get the prefix `paceline.`."""
        end_ns = time.time_ns()
        values = {f"paceline.{key}": _of_nobody(value) for key, value in _known(attributes).items()}
        values["gen_ai.response.model"] = self._model
        start_ns = end_ns - int(max(seconds, 0.0) * 1e9)
        name = f"paceline.{name}"
        self._export.tracer.start_span(name, Context(), start_time=start_ns, attributes=values).end(end_ns)


class ProcessSpans:
    """All spans of one process, and their way to the collector."""

    def __init__(self, target: SpanTarget, process_id: str) -> None:
        """Raises: ConfigError."""
        self._export = export = SpanExport(target.endpoint, ratio=target.ratio, process_id=process_id)
        self._writer = writer = SpanWriter(export.counts)
        self.http = HttpRequestSpans(export, target.model, writer)
        self.engine = EngineSpans(export, target.model, writer)
        self.deeds = DeedSpans(export, target.model)

    def counters(self) -> dict[str, int]:
        """See SpanCounts.values."""
        return self._export.counts.values()

    def close(self) -> None:
        """Write and send what waits, for a few seconds at most."""
        self._writer.close()
        self._export.close()
