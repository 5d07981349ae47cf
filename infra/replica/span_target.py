"""Span target: where a service sends OpenTelemetry's spans, and whether it can; imports nothing of OpenTelemetry itself."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config import ServiceConfig, max_batched_spans, otlp_protocol, span_delay_ms
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.infra.replica.spans import ProcessSpans

_MODULES = {
    "http/protobuf": ("opentelemetry.exporter.otlp.proto.http", "'paceline[otel]'"),
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc", "opentelemetry-exporter-otlp-proto-grpc"),
}
"""Protocol -> package of its exporter, and what pip installs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanTarget:
    """What every process of a service that makes spans is told."""

    endpoint: str
    model: str
    """Name under which the model is served."""
    ratio: float | None = None
    """Share of the traces begun here that are sampled; None = what OTEL_TRACES_SAMPLER says, else all."""

    @classmethod
    def of(cls, config: ServiceConfig) -> SpanTarget | None:
        """None where the service makes no spans. Raises: ConfigError when this computer could not send them."""
        if config.otlp_traces_endpoint is None:
            return None
        protocol = otlp_protocol()
        module, package = _MODULES[protocol]
        if not _is_there(module):
            raise ConfigError(
                f"otlp_traces_endpoint needs OpenTelemetry's exporter for {protocol}, which is not installed: "
                f"pip install {package}"
            )
        max_batched_spans()
        span_delay_ms()
        return cls(endpoint=config.otlp_traces_endpoint, model=config.model_name, ratio=config.otlp_traces_ratio)

    def open(self, process_id: str) -> ProcessSpans:
        """The spans of this process; the collector need not be there. Raises: ConfigError."""
        from paceline.infra.replica.spans import ProcessSpans

        return ProcessSpans(self, process_id)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
