"""Span export: a process's way to an OpenTelemetry collector by OTLP, through a bounded queue; what is lost is counted.

A collector that hangs or is away costs spans, never a request: one thread of OpenTelemetry's BatchSpanProcessor sends them.
OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, ...) hold.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from paceline import __version__
from paceline.config import max_batched_spans, max_queued_spans, otlp_protocol, span_delay_ms
from paceline.infra.state.redis_clients import redact

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest wait for a collector when a process ends."""
TRACES_PATH = "/v1/traces"
"""Where collectors take spans by OTLP over HTTP; for an endpoint that names no path."""
_EXPORTER_LOGS = "opentelemetry.exporter.otlp"


class SpanCounts:
    """What became of the spans of one process. Thread-safe."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued, self._lock = max_queued, threading.Lock()
        self._num_queued = self._num_exported = self._num_dropped = 0

    def admit(self) -> bool:
        """Whether a span finds room in the queue; counted as dropped where it does not."""
        with self._lock:
            is_full = self._num_queued >= self._max_queued
            self._num_dropped += is_full
            self._num_queued += not is_full
            return not is_full

    def settle(self, num_spans: int, *, is_exported: bool) -> None:
        """Spans have left the queue."""
        with self._lock:
            self._num_queued -= num_spans
            self._num_exported += num_spans * is_exported
            self._num_dropped += num_spans * (not is_exported)

    def drop(self, num_spans: int) -> None:
        """Spans never came to the queue."""
        with self._lock:
            self._num_dropped += num_spans

    def values(self) -> dict[str, int]:
        """Spans that the collector took, and those lost."""
        with self._lock:
            return {"exported": self._num_exported, "dropped": self._num_dropped}


class _LastWords(logging.Handler):
    """Keeps an exporter's latest complaint, of which it would log several a batch."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class _CountedExporter(SpanExporter):
    """OpenTelemetry's exporter with counts, and one line in the log when the collector goes and when it comes back."""

    def __init__(self, endpoint: str, counts: SpanCounts) -> None:
        self._endpoint, self._counts, self._is_up = redact(endpoint), counts, True
        self._words, self._logs = _LastWords(), logging.getLogger(_EXPORTER_LOGS)
        self._logs.propagate = False
        self._logs.addHandler(self._words)
        self._inner = _make_exporter(endpoint)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        is_up = False
        try:
            result = self._inner.export(spans)
            is_up = result is SpanExportResult.SUCCESS
        finally:
            self._counts.settle(len(spans), is_exported=is_up)
        if self._is_up and not is_up:
            logger.warning("spans are dropped: %s does not take them: %s", self._endpoint, self._words.text)
        elif is_up and not self._is_up:
            logger.info("spans are taken again by %s", self._endpoint)
        self._is_up = is_up
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()
        self._logs.removeHandler(self._words)


def _make_exporter(endpoint: str) -> SpanExporter:
    if otlp_protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    has_path = urlsplit(endpoint).path not in ("", "/")
    return HttpExporter(endpoint=endpoint if has_path else endpoint.rstrip("/") + TRACES_PATH)


class _BoundedQueue(SpanProcessor):
    """In front of a BatchSpanProcessor, which would drop without counting."""

    def __init__(self, batches: BatchSpanProcessor, counts: SpanCounts) -> None:
        self._batches, self._counts = batches, counts

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is not None and context.trace_flags.sampled and self._counts.admit():
            self._batches.on_end(span)


class SpanExport:
    """A tracer whose spans go to a collector."""

    def __init__(self, endpoint: str, *, ratio: float | None, process_id: str) -> None:
        """Starts the thread that sends. ratio: as in SpanTarget. Raises: ConfigError."""
        max_queued = max_queued_spans()
        self.counts = SpanCounts(max_queued)
        exporter = _CountedExporter(endpoint, self.counts)
        self._batches = BatchSpanProcessor(
            exporter,
            max_queue_size=max_queued,
            max_export_batch_size=max_batched_spans(),
            schedule_delay_millis=span_delay_ms(),
        )
        resource = Resource.create({SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: process_id})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # nobody named it by a variable
            resource = resource.merge(Resource({SERVICE_NAME: "paceline"}))
        provider = TracerProvider(
            sampler=None if ratio is None else ParentBased(TraceIdRatioBased(ratio)),
            resource=resource,
            shutdown_on_exit=False,  # it would wait for a dead collector for half a minute
        )
        provider.add_span_processor(_BoundedQueue(self._batches, self.counts))
        self.tracer = provider.get_tracer("paceline", __version__)

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most; nothing is sent afterwards."""
        ending = threading.Thread(target=self._batches.shutdown, name="spans-end", daemon=True)
        ending.start()
        ending.join(CLOSE_S)
