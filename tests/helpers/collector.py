"""A collector of OpenTelemetry's spans by OTLP over HTTP on a free loopback port; it may be told to hang or to refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Span:
    """One span as it came, with plain attributes and those of its resource."""

    def __init__(self, span: Any, resource: dict[str, Any]) -> None:
        self.name, self.kind, self.resource = span.name, span.kind, resource
        self.trace_id, self.span_id, self.parent_id = (
            i.hex() for i in (span.trace_id, span.span_id, span.parent_span_id)
        )
        self.start_s, self.end_s = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
        self.is_error = span.status.code == 2
        self.attributes = _plain(span.attributes)

    def __repr__(self) -> str:
        return f"{self.name} {self.attributes}"


def _plain(pairs: Any) -> dict[str, Any]:
    def value(v: Any) -> Any:
        kind = v.WhichOneof("value")
        return [value(each) for each in v.array_value.values] if kind == "array_value" else getattr(v, kind)

    return {pair.key: value(pair.value) for pair in pairs}


class Collector:
    """Give its `url` as endpoint; a context manager."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.num_asked = 0
        self.status = 200
        self.go = threading.Event()
        self.go.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.num_asked += 1
                collector.go.wait(60)
                if collector.status == 200:
                    collector.take(self.path, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                """Nothing on the terminal."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                """Clients that gave up are no news."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.bodies.append(body)
        self.paths.append(path)
        for part in request.resource_spans:
            resource = _plain(part.resource.attributes)
            self.spans += [Span(span, resource) for scope in part.scope_spans for span in scope.spans]

    def wait(self, wanted: Callable[[list[Span]], Any], timeout_s: float = 20.0) -> Any:
        """What `wanted` finds among the spans, once it is not empty."""
        deadline = time.monotonic() + timeout_s
        while not (found := wanted(list(self.spans))):
            assert time.monotonic() < deadline, f"spans did not come in time; there are {self.spans}"
            time.sleep(0.02)
        return found

    def trace(self, trace_id: str, num_spans: int) -> list[Span]:
        """The spans of a trace, once there are so many, by their start."""

        def own(spans: list[Span]) -> list[Span]:
            found = [s for s in spans if s.trace_id == trace_id]
            return sorted(found, key=lambda s: (s.start_s, -s.end_s)) if len(found) >= num_spans else []

        return self.wait(own)
