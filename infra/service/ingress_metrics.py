"""Ingress metrics: how often answers changed their replica, appended to the metrics of an engine."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from paceline.infra.web.metrics import MetricSpec, metric_spec
from paceline.serving.resume.client import ResumeCounters

INGRESS_METRICS: tuple[tuple[str, MetricSpec], ...] = (
    ("num_requests", metric_spec("ingress_requests", "counter", "1", "Requests that this ingress sent to engines")),
    ("num_broken", metric_spec("ingress_broken", "counter", "1", "Answers whose replica was lost while it wrote them")),
    ("num_resumed", metric_spec("ingress_resumed", "counter", "1", "Answers that another replica took over")),
    ("num_given_up", metric_spec("ingress_given_up", "counter", "1", "Requests that failed because no replica finished them")),
)  # fmt: skip
"""Attribute of ResumeCounters -> metric."""


class _Counters:
    def __init__(self, counters: ResumeCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        for name, spec in INGRESS_METRICS:
            value = float(getattr(self._counters, name))
            yield CounterMetricFamily(spec.name, f"{spec.text} (unit {spec.unit})", value=value)


def render_ingress_metrics(counters: ResumeCounters) -> bytes:
    """Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Counters(counters))  # type: ignore[arg-type]
    return generate_latest(registry)
